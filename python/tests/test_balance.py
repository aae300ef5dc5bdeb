"""Which experts get replicas, and which rank holds what."""

from __future__ import annotations

import numpy
import pytest

import conclave
from conclave.errors import ConclaveValueError

# The loads and slots that vLLM's tests of DeepSeek's rule have.
LOADS = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
SLOTS = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]
COUNTS = [[1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1], [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1]]


def test_published_loads_get_the_published_slots():
    for load, expected in zip(LOADS, SLOTS, strict=True):
        for rows in (load, numpy.array(load), numpy.array(load, dtype="float32")):
            slots = conclave.balance_experts(
                rows, num_ranks=8, num_redundant_experts=4, num_nodes=2, num_groups=4
            )
            assert list(slots.logical_of) == expected
            assert slots.first_of == (0, 2, 4, 6, 8, 10, 12, 14, 16)


def test_vllms_function_gives_the_published_maps():
    torch = pytest.importorskip("torch")
    from conclave.vllm import rebalance_experts

    slots, physical, counts = rebalance_experts(torch.tensor(LOADS), 16, 4, 2, 8)
    assert slots.tolist() == SLOTS and counts.tolist() == COUNTS
    assert physical.shape == (2, 12, 2)
    for layer in range(2):
        for expert in range(12):
            held = [slot for slot in physical[layer, expert].tolist() if slot >= 0]
            assert held == [slot for slot in range(16) if SLOTS[layer][slot] == expert]
    # From its own result, shuffled within ranks, nothing moves.
    old = slots.reshape(2, 8, 2).flip(-1).reshape(2, 16)
    assert rebalance_experts(torch.tensor(LOADS), 16, 4, 2, 8, old)[0].tolist() == old.tolist()
    with pytest.raises(AssertionError, match="multiple of 4 ranks, found 7"):
        rebalance_experts(torch.tensor(LOADS), 7, 1, 1, 4)


def test_rules_and_what_they_promise():
    load = [50, 1, 30, 2, 2, 0]
    assert conclave.balance_rules() == ["hierarchical", "global", "surviving", "steady"]
    surviving = conclave.balance_experts(
        load, rule="surviving", num_ranks=3, num_redundant_experts=6
    )
    assert surviving.survives_any_rank() and surviving.num_ranks == 3
    linear = conclave.ExpertSlots(6, (0, 1, 2, 3, 4, 5), (0, 2, 4, 6))
    assert not linear.survives_any_rank()
    assert conclave.balancedness(load, linear) == pytest.approx(85 / 3 / 51)
    steady = conclave.balance_experts(load, rule="steady", num_ranks=3, previous=linear)
    assert conclave.balancedness(load, steady) >= conclave.balancedness(load, linear)
    assert conclave.moved_experts(linear, steady) == sum(
        expert not in linear.of_rank(rank) for rank in range(3) for expert in steady.of_rank(rank)
    )


def test_slots_become_the_split_of_a_layer():
    slots = conclave.balance_experts([9, 1, 5], rule="global", num_ranks=2, num_redundant_experts=1)
    split = slots.parallel(ep_rank=1, reduce="partial")
    assert (split.ep_size, split.ep_rank, split.placement) == (2, 1, "custom")
    assert split.num_redundant_experts == 1 and list(split.replica_of) == [0]
    held = [[], []]
    for expert, rank in zip([0, 1, 2, 0], split.rank_of, strict=True):
        held[rank].append(expert)
    assert [sorted(slots.of_rank(rank)) for rank in range(2)] == [sorted(own) for own in held]
    with pytest.raises(IndexError, match="expected 0 to 1, found 2"):
        slots.of_rank(2)


def test_parts_of_a_balanced_layer_add_up_to_the_whole():
    random = numpy.random.default_rng(5)
    weights = {
        "w13": random.standard_normal((6, 32, 32), dtype="float32"),
        "w2": random.standard_normal((6, 32, 16), dtype="float32"),
    }
    rows = random.standard_normal((40, 32), dtype="float32")
    ids = numpy.minimum(random.integers(0, 6, (40, 2)), random.integers(0, 6, (40, 2)))
    ids[:, 1] = (ids[:, 0] + 1 + ids[:, 1] % 5) % 6
    shares = numpy.full((40, 2), 0.5, dtype="float32")
    whole = conclave.fused_experts(rows, weights["w13"], weights["w2"], shares, ids)
    load = numpy.bincount(ids.flatten(), minlength=6)
    slots = conclave.balance_experts(load, num_ranks=3, rule="global")
    total = numpy.zeros_like(whole)
    for rank in range(3):
        experts = list(slots.of_rank(rank))
        local = numpy.full(6, -1, dtype="int32")
        local[experts] = range(len(experts))
        total += conclave.fused_experts(
            rows,
            numpy.ascontiguousarray(weights["w13"][experts]),
            numpy.ascontiguousarray(weights["w2"][experts]),
            shares,
            ids,
            expert_map=local,
            global_num_experts=6,
        )
    numpy.testing.assert_allclose(total, whole, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("load", "fields", "named"),
    [
        ([], {}, "load"),
        ([1, float("nan")], {}, "load"),
        ([1, -2], {}, "load"),
        ([0, 0], {}, "load"),
        ([1, 2], {"num_ranks": 0}, "num_ranks"),
        ([1, 2], {"num_redundant_experts": -1}, "num_redundant_experts"),
        ([1, 2], {"rule": "best"}, "hierarchical, global, surviving, steady"),
        ([1, 2], {"rule": "steady"}, "previous"),
        ([1, 2], {"previous": [0, 5]}, "previous"),
        ([1, 2], {"rule": "surviving", "num_ranks": 2}, "num_redundant_experts"),
        ([1, 2], {"least_gain": 2.0}, "least_gain"),
    ],
)
def test_wrong_arguments_are_named(load, fields, named):
    with pytest.raises(ConclaveValueError, match=named):
        conclave.balance_experts(load, **{"num_ranks": 1, **fields})


def test_loads_and_slots_of_other_layers_are_refused_by_vllms_function():
    torch = pytest.importorskip("torch")
    from conclave.vllm import rebalance_experts

    loads = torch.tensor(LOADS)
    with pytest.raises(ConclaveValueError, match="weight: expected shape"):
        rebalance_experts(loads[0], 16, 4, 2, 8)
    with pytest.raises(ConclaveValueError, match="old_global_expert_indices: expected 2"):
        rebalance_experts(loads, 16, 4, 2, 8, torch.tensor(SLOTS[:1]))
