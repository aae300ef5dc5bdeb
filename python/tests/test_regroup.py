"""Layers that go to more ranks or fewer while they live."""

from __future__ import annotations

import threading

import numpy
import pytest
from test_ranks import SPEC, made_rows, made_weights, on_ranks

import conclave
from conclave.errors import ConclaveCommError, ConclaveTypeError, ConclaveValueError, Error

CHANGES = [
    (3, (0, 1), (0, 1, 2)),
    (3, (0, 1, 2), (2, 0)),
    (4, (0, 1, 2, 3), (1,)),
    (3, (2,), (0, 1, 2)),
    (4, (0, 1), (2, 3)),
]


def groups_of(change, **options):
    """For each rank: everyone, the group before and the one afterwards, or None."""
    total, *parts = change
    everyone = conclave.local_group(total, **options)
    made = [
        dict(zip(part, conclave.local_group(len(part), **options), strict=True)) for part in parts
    ]
    return [(everyone[rank], made[0].get(rank), made[1].get(rank)) for rank in range(total)]


@pytest.mark.parametrize("change", CHANGES)
def test_ranks_give_each_other_the_layer(change):
    weights = made_weights()
    rows = made_rows(9)
    expected = conclave.Layer.from_tensors(SPEC, **weights)(rows)
    spec = conclave.Layer.from_tensors(SPEC, **weights).spec

    def work(rank, everyone, before, after):
        if before is None:
            layer = conclave.Layer.join(spec, everyone, after)
            assert layer.parallel.ep_size == len(change[2])
            return layer(rows)
        layer = conclave.Layer.from_tensors(SPEC, communicator=before, **weights)
        assert numpy.array_equal(layer(rows), expected)
        if after is None:
            layer.hand_over(everyone)
            return layer(rows)
        found = layer.regroup(everyone, after)
        assert sorted(found.slots.logical_of) == list(range(7))
        assert numpy.array_equal(layer(rows), expected)
        return found(rows)

    for output in on_ranks(groups_of(change), work):
        assert numpy.array_equal(output, expected)


def test_forwards_go_on_meanwhile():
    weights = made_weights()
    rows = made_rows(9)
    whole = conclave.Layer.from_tensors(SPEC, **weights)
    expected = whole(rows)

    def work(rank, everyone, before, after):
        if before is None:
            return conclave.Layer.join(whole.spec, everyone, after, processor_share=0.5)(rows)
        layer = conclave.Layer.from_tensors(SPEC, communicator=before, **weights)
        made = []
        thread = threading.Thread(
            target=lambda: made.append(layer.regroup(everyone, after, processor_share=0.5))
        )
        thread.start()
        for _ in range(20):
            assert numpy.array_equal(layer(rows), expected)
        thread.join()
        return made[0](rows)

    for output in on_ranks(groups_of(CHANGES[0]), work):
        assert numpy.array_equal(output, expected)


def test_a_given_split_and_ranks_that_disagree():
    weights = made_weights()
    rows = made_rows(9)
    whole = conclave.Layer.from_tensors(SPEC, **weights)
    expected = whole(rows)

    def work(rank, everyone, before, after):
        split = {"ep_size": 3, "ep_rank": rank, "placement": "custom"}
        split["rank_of"] = [2, 2, 2, 2, 2, 2, 0]
        if before is None:
            with pytest.raises(ConclaveCommError, match="top_k"):
                conclave.Layer.join(
                    {
                        **SPEC,
                        "top_k": 3,
                        "hidden_size": 40,
                        "intermediate_size": 24,
                        "weight_dtype": "F32",
                        "has_gate": True,
                    },
                    everyone,
                    after,
                )
            return conclave.Layer.join(whole.spec, everyone, after, parallel=split)(rows)
        layer = conclave.Layer.from_tensors(SPEC, communicator=before, **weights)
        with pytest.raises(ConclaveCommError, match="top_k"):
            layer.regroup(everyone, after)
        found = layer.regroup(everyone, after, parallel=split)
        assert found.slots.of_rank(rank) == ((6,) if rank == 0 else ())
        return found(rows)

    for output in on_ranks(groups_of(CHANGES[0]), work):
        assert numpy.array_equal(output, expected)


def test_a_newcomer_that_never_comes():
    weights = made_weights()
    rows = made_rows(9)
    expected = conclave.Layer.from_tensors(SPEC, **weights)(rows)
    groups = groups_of(CHANGES[0], timeout=0.5)

    def work(rank, everyone, before, after):
        if before is None:
            return expected
        layer = conclave.Layer.from_tensors(SPEC, communicator=before, **weights)
        with pytest.raises(ConclaveCommError) as caught:
            layer.regroup(everyone, after)
        assert caught.value.name in ("kCommTimeout", "kCommAborted")
        return layer(rows)

    for output in on_ranks(groups, work):
        assert numpy.array_equal(output, expected)


def test_wrong_requests_are_refused():
    layer = conclave.Layer.from_tensors(SPEC, **made_weights())
    (everyone,) = conclave.local_group(1)
    with pytest.raises(ConclaveTypeError, match="everyone"):
        layer.regroup(None)
    with pytest.raises(Error, match="every rank leaves"):
        layer.hand_over(everyone)
    with pytest.raises(ConclaveValueError, match="piece_bytes"):
        layer.regroup(everyone, piece_bytes=1)
    assert numpy.array_equal(layer.regroup(everyone)(made_rows(3)), layer(made_rows(3)))


def test_slots_over_other_ranks():
    before = conclave.balance_experts([1.0] * 6, num_ranks=2, num_redundant_experts=2)
    after = conclave.spread_over(before, [1, -1, 0])
    assert after.num_ranks == 3
    assert len(after.logical_of) == 8
    assert set(after.of_rank(0)) <= set(before.of_rank(1))
    with pytest.raises(ConclaveValueError, match="old_ranks"):
        conclave.spread_over(before, [0, 0])
