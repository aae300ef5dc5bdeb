"""`EplbState`: a model's experts move between slots and ranks, with codes, scales and all else that
belongs to them."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors.torch")

import conclave  # noqa: E402
from conclave import vllm  # noqa: E402
from conclave.errors import (  # noqa: E402
    ConclaveCommError,
    ConclaveRuntimeError,
    ConclaveTypeError,
    ConclaveUnsupportedError,
    ConclaveValueError,
)
from conclave.vllm._expert_moves import ExpertMover, ways  # noqa: E402
from conclave.vllm.engine.eplb import rearrange_expert_weights_inplace  # noqa: E402
from support import moved_experts as work  # noqa: E402
from support.method_layers import bar_of  # noqa: E402
from support.problems import worst_error  # noqa: E402
from support.process_ranks import Failed, run_ranks  # noqa: E402

pytestmark = pytest.mark.usefixtures("float32_products")

# Words of codes with zero points, orders of columns, scales of two kinds, codes whose meaning is
# kept beside them, and steps of rows, of which every rank has those of all slots.
METHODS = [
    "qwen3_moe-awq-group32",
    "qwen3_moe-gptq-int4-order",
    "qwen3_moe-modelopt-nvfp4",
    "qwen3_moe-compressed-block",
    "qwen3_moe-bnb-nf4-nested-blocks128",
    "qwen3_moe-compressed-tensor-static",
]


def together(work_of: Any, ranks: int = 2) -> list[Any]:
    """What work_of(rank, communicator) returns or raises in a thread of each rank."""
    group = conclave.local_group(ranks)
    found: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            found[rank] = work_of(rank, group[rank])
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def require_slots(model: work.Model, before: list[Any], old: Any, new: Any) -> None:
    """Every tensor's rows are those that the slots' experts had."""
    for index, layer in enumerate(model.moe_layers):
        for tensor, rows in zip(layer.get_expert_weights(), before[index], strict=True):
            of_expert = dict(zip(old[index], rows, strict=True))
            for slot, expert in enumerate(new[index]):
                assert torch.equal(tensor[slot], of_expert[expert])


@pytest.mark.parametrize("name", METHODS)
def test_slots_of_one_rank_change_and_results_keep_their_bits(name: str) -> None:
    model = work.Model(name)
    state = vllm.EplbState(work.config())
    of_model = state.add_model(model)
    expected = model()
    assert worst_error(expected[0], model.expected) <= bar_of(name)
    old = of_model.physical_to_logical_map.tolist()
    before = [work.rows_of(layer) for layer in model.moe_layers]
    assert of_model.expert_load_pass.sum() > 0
    count = model.moe_layers[0].logical_num_experts
    of_model.expert_load_pass[:, :count] += work.skewed(model)  # more than the tokens' own
    state.step()
    assert of_model.expert_load_pass.sum() == 0
    state.rearrange()
    new = of_model.physical_to_logical_map.tolist()
    assert new != old
    require_slots(model, before, old, new)
    assert all(torch.equal(a, b) for a, b in zip(model(), expected, strict=True))
    for layer, slots in enumerate(new):
        for expert in range(count):
            found = [slot for slot, held in enumerate(slots) if held == expert]
            assert int(of_model.logical_replica_count[layer, expert]) == len(found)
            row = of_model.logical_to_physical_map[layer, expert].tolist()
            assert row == found + [-1] * (work.redundant_of(name) + 1 - len(found))
    assert of_model.experts_moved == 0  # none came from another rank


@pytest.mark.parametrize("name", METHODS)
def test_experts_move_between_ranks(name: str) -> None:
    whole = work.Model(name)
    whole_state = vllm.EplbState(work.config()).add_model(whole)
    old = whole_state.physical_to_logical_map.tolist()
    rows = [
        dict(zip(old[i], work.rows_of(m)[0], strict=True)) for i, m in enumerate(whole.moe_layers)
    ]

    def on_rank(rank: int, communicator: Any) -> Any:
        model = work.Model(name, 2, rank)
        state = vllm.EplbState(work.config(), ep_group=communicator)
        of_model = state.add_model(model, global_expert_load=work.skewed(model))
        first = [
            work.slots_of_rank(m, of_model.physical_to_logical_map[i].tolist())
            for i, m in enumerate(model.moe_layers)
        ]
        for index, layer in enumerate(model.moe_layers):
            for slot, expert in enumerate(first[index]):
                assert torch.equal(layer.get_expert_weights()[0][slot], rows[index][expert])
        before = model()
        state.step()
        state.rearrange()
        return before, model(), of_model.physical_to_logical_map.tolist(), of_model.experts_moved

    found = together(on_rank)
    for one in found:
        assert not isinstance(one, BaseException), one
        assert one[2] == found[0][2]
    assert sum(one[3] for one in found) > 0
    for index in range(work.LAYERS):
        for when in (0, 1):
            total = sum(one[when][index] for one in found)
            assert worst_error(total, whole.expected) <= bar_of(name)


def test_experts_move_between_processes(tmp_path: Any) -> None:
    names = [METHODS[0], METHODS[4]]
    isa = os.environ.get("CONCLAVE_ISA")
    ranks = run_ranks(work.moved, 2, tmp_path, names, isa, timeout=200)
    for found in ranks:
        assert not isinstance(found, Failed), found.trace
        for name, (before, after, expected, old, new, again, _) in zip(names, found, strict=True):
            assert old != new == again
            for out in (*before, *after):
                assert worst_error(out, expected) <= bar_of(name)
    assert [found[4] for found in ranks[0]] == [found[4] for found in ranks[1]]
    assert sum(found[6] for of_rank in ranks for found in of_rank) > 0  # came from the other


def test_ranks_that_disagree_and_ranks_that_leave_are_named(tmp_path: Any) -> None:
    name = "qwen3_moe-awq-group32"
    for found in run_ranks(work.with_a_rank_that_differs, 2, tmp_path / "a", name, timeout=200):
        assert not isinstance(found, Failed), found.trace
        error, same, slots = found
        assert error[0] == "kCommMismatch"
        assert "other slots" in error[1]
        assert same
        assert slots
    left = run_ranks(work.with_a_rank_that_leaves, 2, tmp_path / "b", name, timeout=200)[0]
    assert isinstance(left, Failed)
    assert left.is_comm_error, left.trace


def test_bytes_that_changed_on_the_way_are_found_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from conclave.vllm import _expert_moves

    packed = _expert_moves._packed

    def damaged(*given: Any) -> Any:
        found = packed(*given)
        found[-1] ^= 1
        return found

    monkeypatch.setattr(_expert_moves, "_packed", damaged)

    def on_rank(rank: int, communicator: Any) -> Any:
        rows = torch.arange(6.0).reshape(2, 3) + 10 * rank
        first = rows.clone()
        with pytest.raises(ConclaveCommError, match="other bytes"):
            ExpertMover(communicator).move([0, 1, 2, 3], [2, 1, 0, 3], [rows])
        return torch.equal(rows, first)

    assert together(on_rank) == [True, True]


def test_rows_of_a_program_move_by_vllms_function() -> None:
    old = torch.tensor([[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 0, 0]])
    new = torch.tensor([[3, 3, 1, 0, 2, 2], [0, 1, 2, 3, 3, 1]])
    kinds = [(torch.float32, (3,)), (torch.uint8, (5, 2)), (torch.bfloat16, ())]

    def row(layer: int, expert: int, number: int) -> Any:
        dtype, shape = kinds[number]
        return torch.full(shape, 100 * layer + 10 * number + expert).to(dtype)

    def on_rank(rank: int, communicator: Any) -> bool:
        own = slice(2 * rank, 2 * rank + 2)
        weights = [
            [torch.stack([row(i, int(e), n) for e in old[i, own]]) for n in range(3)]
            for i in range(2)
        ]
        rearrange_expert_weights_inplace(old, new, weights, communicator)
        return all(
            torch.equal(weights[i][n][slot], row(i, int(new[i, own][slot]), n))
            for i in range(2)
            for n in range(3)
            for slot in range(2)
        )

    assert together(on_rank, 3) == [True, True, True]


def test_ranks_that_have_an_expert_share_those_that_lack_it() -> None:
    old = [0, 1, 0, 2, 3, 4, 5, 6]
    new = [0, 1, 0, 2, 0, 0, 5, 0]
    assert ways(old, new, 4) == [(0, 0, 2), (0, 1, 3)]
    assert ways(old, old, 4) == []
    assert ways(old, [-1] * 8, 4) == []
    with pytest.raises(ConclaveValueError, match="expert 9"):
        ways(old, [9] * 8, 4)


def test_steps_count_and_the_first_rearrangement_comes_after_a_quarter(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = work.Model("qwen3_moe-awq-group32")
    state = vllm.EplbState(work.config(step_interval=8, window_size=2))
    of_model = state.add_model(model)
    old = of_model.physical_to_logical_map.clone()
    tokens = len(model.hidden) * model.moe_layers[0].top_k
    with caplog.at_level(logging.INFO, "conclave.eplb"):
        model()
        state.step(log_stats=True)
    assert "balancedness 1.0000" in caplog.text
    assert of_model.expert_load_window[0].sum() == work.LAYERS * tokens
    model()
    state.step(is_profile=True)  # counts nothing, not as a step either
    assert torch.equal(of_model.physical_to_logical_map, old)
    state.step(is_dummy=True)
    assert of_model.expert_load_window.sum() == work.LAYERS * tokens
    assert not torch.equal(of_model.physical_to_logical_map, old)  # the second of eight
    moved = of_model.physical_to_logical_map.clone()
    # Counts of slots stay with their experts.
    assert of_model.expert_load_window.sum() == work.LAYERS * tokens
    state.rearrange()
    assert torch.equal(of_model.physical_to_logical_map, moved)
    for _ in range(3):  # a window of two forgets the first
        model()
        state.step()
    assert of_model.expert_load_window.sum() == 2 * work.LAYERS * tokens


def test_what_does_not_go_together_is_named() -> None:
    model = work.Model("qwen3_moe-awq-group32")
    with pytest.raises(ConclaveValueError, match="window_size"):
        vllm.EplbState(work.config(window_size=0))
    with pytest.raises(ConclaveValueError, match="num_nodes"):
        vllm.EplbState(work.config(), num_nodes=0)
    with pytest.raises(ConclaveUnsupportedError, match="policy"):
        vllm.EplbState(work.config(policy="best"))
    state = vllm.EplbState(work.config())
    with pytest.raises(ConclaveValueError, match="enable_eplb"):
        state.add_model(torch.nn.Linear(2, 2))
    with pytest.raises(ConclaveTypeError, match="model"):
        state.add_model("model")
    count = model.moe_layers[0].logical_num_experts
    for load in (torch.ones(1, count), -torch.ones(2, count), torch.full((2, count), torch.nan)):
        with pytest.raises(ConclaveValueError, match="global_expert_load"):
            state.add_model(model, global_expert_load=load)
    state.add_model(model)
    with pytest.raises(ConclaveValueError, match="added before"):
        state.add_model(model)
    with pytest.raises(ConclaveValueError, match="global_expert_loads: expected rows of 1 models"):
        state.rearrange(global_expert_loads=[])
    with pytest.raises(ConclaveTypeError, match="rank_mapping: expected a dict"):
        state.rearrange(rank_mapping=[0])
    for mapping in ({}, {1: 0}, {0: 1}, {0: -1}, {0: 0, 1: 1}, {0: -2}):
        with pytest.raises(ConclaveValueError, match="rank_mapping"):
            state.rearrange(rank_mapping=mapping)
    with pytest.raises(ConclaveUnsupportedError, match="rank_mapping"):
        state.start_async_loop(rank_mapping={0: 0})
    with pytest.raises(ConclaveRuntimeError, match="add a model"):
        vllm.EplbState(work.config()).start_async_loop()
    spread = work.Model("qwen3_moe-awq-group32", 2, 0)
    with pytest.raises(ConclaveValueError, match="ep_group: expected rank 0 of 2"):
        vllm.EplbState(work.config()).add_model(spread)
    with pytest.raises(ConclaveValueError, match="found rank 0 of 1"):
        vllm.EplbState(work.config(), ep_group=conclave.local_group(1)[0]).add_model(spread)


def test_rows_go_to_fewer_ranks_and_to_more() -> None:
    few, many = torch.tensor([[0, 1, 2, 3, 1, 0]]), torch.tensor([[2, 2, 1, 0, 3, 1, 0, 3, 2]])

    def rows(slots: Any, rank: int) -> Any:
        return (10.0 + slots[0, 3 * rank : 3 * rank + 3])[:, None].repeat(1, 4)

    def leaves(rank: int, communicator: Any) -> Any:
        weights = rows(many, rank)
        rearrange_expert_weights_inplace(
            many, few, [[weights]], communicator, rank_mapping={0: 1, 1: -1, 2: 0}
        )
        return weights

    first, second, third = together(leaves, 3)
    assert torch.equal(first, rows(few, 1)) and torch.equal(third, rows(few, 0))
    assert torch.equal(second, rows(many, 1))  # it leaves with what it had

    def joins(rank: int, communicator: Any) -> Any:
        weights = rows(few, {0: 0, 2: 1}[rank]) if rank != 1 else torch.zeros(3, 4)
        rearrange_expert_weights_inplace(
            few, many, [[weights]], communicator, rank_mapping={0: 0, 1: 2}
        )
        return weights

    for rank, found in enumerate(together(joins, 3)):
        assert torch.equal(found, rows(many, rank))


# Steps of rows are held by every rank for all slots: their number changes with the ranks.
@pytest.mark.parametrize("name", ["qwen3_moe-awq-group32", "qwen3_moe-compressed-tensor-static"])
def test_ranks_leave_and_results_stay(name: str) -> None:
    count = work.sizes_of(work.config_of(name)[0])["num_experts"]
    redundant = 3 * -(-count // 2) - count  # two of three ranks have room for all
    expected = work.Model(name).expected
    of_two = conclave.local_group(2)

    def on_rank(rank: int, communicator: Any) -> Any:
        model = work.Model(name, 3, rank, redundant=redundant)
        state = vllm.EplbState(work.config(), ep_group=communicator)
        of_model = state.add_model(model)
        before = model()
        state.step()
        rows = of_model.expert_load_window.sum()
        with pytest.raises(ConclaveValueError, match="slots for"):
            state.rearrange(rank_mapping={0: 0, 1: -1, 2: -1})
        state.rearrange(rank_mapping={0: 1, 1: -1, 2: 0})
        if rank == 1:
            assert not state.model_states
            state.step()
            return before, None, None, None
        assert of_model.expert_load_window.sum() == rows
        width = 2 * (count + redundant) // 3
        assert of_model.physical_to_logical_map.shape == (work.LAYERS, width)
        assert int(of_model.logical_replica_count.sum()) == work.LAYERS * width
        layer = model.moe_layers[0]
        assert (layer.ep_size, layer.ep_rank, layer.global_num_experts) == (2, 1 - rank // 2, width)
        after = model()
        with pytest.raises(ConclaveValueError, match="ep_group"):
            state.step()
        state.ep_group = of_two[layer.ep_rank]
        of_model.expert_load_pass[:, 0] += 1000
        state.step()
        slots = of_model.physical_to_logical_map.tolist()
        state.rearrange()
        assert of_model.physical_to_logical_map.tolist() != slots
        return before, after, model(), of_model.physical_to_logical_map.tolist()

    found = together(on_rank, 3)
    for one in found:
        assert not isinstance(one, BaseException), one
    assert found[0][3] == found[2][3]
    for when, ranks in ((0, (0, 1, 2)), (1, (0, 2)), (2, (0, 2))):
        for index in range(work.LAYERS):
            total = sum(found[rank][when][index] for rank in ranks)
            assert worst_error(total, expected) <= bar_of(name)


def test_layers_with_groups_do_not_change_ranks() -> None:
    def on_rank(rank: int, communicator: Any) -> None:
        model = work.Model("qwen3_moe-awq-group32", 2, rank, communicator, redundant=60)
        state = vllm.EplbState(work.config())
        state.add_model(model)
        with pytest.raises(ConclaveUnsupportedError, match=r"rank_mapping: .* was given groups"):
            state.rearrange(rank_mapping={0: 0, 1: -1})

    assert together(on_rank) == [None, None]


def end_move(state: Any, of_model: Any, model: Any) -> list[Any]:
    """Results of the forwards before each step until all layers are at their new slots."""
    seen = []
    while of_model.rebalanced:
        seen.append(model())
        state.step()
        time.sleep(0.001)
    return seen


@pytest.mark.parametrize("name", ["qwen3_moe-awq-group32", "qwen3_moe-bnb-nf4-nested-blocks128"])
def test_experts_arrive_beside_forwards(name: str) -> None:
    expected = work.Model(name).expected
    of_workers = conclave.local_group(2)

    def on_rank(rank: int, communicator: Any) -> Any:
        model = work.Model(name, 2, rank)
        state = vllm.EplbState(work.config(), ep_group=communicator, worker_group=of_workers[rank])
        of_model = state.add_model(model)
        assert state.is_async and state.async_worker is None
        state.start_async_loop()
        thread = state.async_worker
        state.start_async_loop()
        assert thread is state.async_worker and thread.is_alive()
        old = of_model.physical_to_logical_map.tolist()
        state.rearrange(global_expert_loads=[work.skewed(model)])
        assert of_model.rebalanced and of_model.physical_to_logical_map.tolist() == old
        wanted = of_model.new_physical_to_logical_map.tolist()
        state.rearrange()  # nothing else begins meanwhile
        with pytest.raises(ConclaveRuntimeError, match="rank_mapping"):
            state.rearrange(rank_mapping={0: 0, 1: 1})
        seen = end_move(state, of_model, model)
        assert of_model.physical_to_logical_map.tolist() == wanted != old
        assert len(seen) >= work.LAYERS and of_model.new_physical_to_logical_map is None
        seen.append(model())
        del state
        thread.join(20)  # it ends with the balancer
        return seen, of_model.experts_moved, thread.is_alive()

    found = together(on_rank)
    for one in found:
        assert not isinstance(one, BaseException), one
        assert not one[2]
    assert sum(one[1] for one in found) > 0 or name.endswith("128")  # its slots stay on their rank
    assert len(found[0][0]) == len(found[1][0])
    for outs in zip(*(one[0] for one in found), strict=True):
        for index in range(work.LAYERS):
            assert worst_error(sum(out[index] for out in outs), expected) <= bar_of(name)


def test_experts_arrive_beside_forwards_of_processes(tmp_path: Any) -> None:
    name, isa = METHODS[0], os.environ.get("CONCLAVE_ISA")
    ranks = run_ranks(work.moved_beside_forwards, 2, tmp_path, name, isa, timeout=200)
    for found in ranks:
        assert not isinstance(found, Failed), found.trace
        seen, expected, old, new = found
        assert old != new == ranks[0][3]
        assert len(seen) == len(ranks[0][0]) > work.LAYERS
        for outs in seen:
            for out in outs:
                assert worst_error(out, expected) <= bar_of(name)


def test_weights_that_are_loaded_meanwhile_are_sent_again() -> None:
    name = "qwen3_moe-awq-group32"
    of_workers = conclave.local_group(2)

    def on_rank(rank: int, communicator: Any) -> Any:
        model = work.Model(name, 2, rank)
        state = vllm.EplbState(work.config(), ep_group=communicator, worker_group=of_workers[rank])
        of_model = state.add_model(model)
        state.start_async_loop()
        slots = of_model.physical_to_logical_map.tolist()
        state.rearrange(global_expert_loads=[work.skewed(model)])
        while not state._background.worker.has_ended:
            time.sleep(0.001)
        communicator.barrier()
        for index, layer in enumerate(model.moe_layers):
            for rows in layer.get_expert_weights():
                for slot, expert in enumerate(work.slots_of_rank(layer, slots[index])):
                    rows[slot].fill_(expert % 100)
        end_move(state, of_model, lambda: None)
        new = of_model.physical_to_logical_map.tolist()
        assert new != slots
        return all(
            bool((rows[slot] == torch.tensor(expert % 100).to(rows.dtype)).all())
            for index, layer in enumerate(model.moe_layers)
            for rows in layer.get_expert_weights()
            for slot, expert in enumerate(work.slots_of_rank(layer, new[index]))
        )

    assert together(on_rank) == [True, True]


def test_a_transfer_that_fails_ends_the_move_on_all_ranks() -> None:
    name = "qwen3_moe-awq-group32"
    of_workers = conclave.local_group(2)

    def on_rank(rank: int, communicator: Any) -> Any:
        model = work.Model(name, 2, rank)
        state = vllm.EplbState(work.config(), ep_group=communicator, worker_group=of_workers[rank])
        of_model = state.add_model(model)
        before = model()
        state.start_async_loop()
        slots = of_model.physical_to_logical_map.tolist()
        if rank == 1:
            of_workers[1].abort("told to")
        load = [work.skewed(model)]
        state.rearrange(global_expert_loads=load)
        with pytest.raises(ConclaveCommError):
            end_move(state, of_model, lambda: None)
        assert state.async_worker is None and not of_model.rebalanced
        assert of_model.physical_to_logical_map.tolist() == slots
        assert all(torch.equal(a, b) for a, b in zip(model(), before, strict=True))
        state.rearrange(global_expert_loads=load)  # within the call from now on
        return of_model.physical_to_logical_map.tolist() != slots

    assert together(on_rank) == [True, True]
