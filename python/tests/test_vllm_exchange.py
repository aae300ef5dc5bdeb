"""conclave.vllm.AllToAllPrepareAndFinalize: rows that travel between ranks, in halves."""

from __future__ import annotations

import gc
import threading

import numpy
import pytest

import conclave

torch = pytest.importorskip("torch", reason="torch is not installed")

from conclave import vllm  # noqa: E402
from conclave.errors import (  # noqa: E402
    ConclaveCommError,
    ConclaveTypeError,
    ConclaveValueError,
)
from support import exchange_work as work  # noqa: E402
from support.problems import FLOAT32_BAR, worst_error  # noqa: E402
from support.process_ranks import run_ranks  # noqa: E402


def on_threads(size, body, timeout=20):
    """What body(rank, communicator) returned or raised in a thread for each rank."""
    results = [None] * size

    def run(rank, communicator):
        try:
            results[rank] = body(rank, communicator)
        except BaseException as error:
            results[rank] = error

    group = conclave.local_group(size, timeout=timeout)
    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(group)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def check(kind, found, wanted):
    if kind == "unreduced":
        assert torch.equal(found, wanted)
    else:
        assert worst_error(found, wanted.double()) <= FLOAT32_BAR


@pytest.mark.parametrize("kind", work.KINDS)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("is_custom", [False, True])
def test_results_are_those_of_one_rank(kind, size, is_custom):
    rank_of = work.owners(size) if is_custom else None
    results = on_threads(size, lambda rank, group: work.run(group, rank, size, kind, rank_of))
    for rank, outputs in enumerate(results):
        for out in outputs:
            check(kind, out, work.alone(kind, rank))


def test_rows_of_bfloat16_have_the_bits_of_one_rank():
    dtype = torch.bfloat16
    results = on_threads(2, lambda rank, group: work.run(group, rank, 2, "unreduced", dtype=dtype))
    for rank, (out, _) in enumerate(results):
        assert out.dtype == dtype and torch.equal(out, work.alone("unreduced", rank, dtype))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_processes_of_a_group_have_the_bits_of_one(tmp_path):
    for rank, found in enumerate(run_ranks(work.over_a_group, 2, tmp_path)):
        for kind, outputs in found.items():
            for out in outputs:
                check(kind, torch.from_numpy(out), work.alone(kind, rank))


def test_shared_experts_run_while_results_travel():
    def body(rank, group):
        return work.run(group, rank, 2, "unreduced", shared=True)[1]

    for rank, (shared, out) in enumerate(on_threads(2, body)):
        assert torch.equal(shared, 2 * work.tokens(rank)[0])
        assert torch.equal(out, work.alone("unreduced", rank))


def test_two_calls_are_under_way_at_once():
    """The halves of two micro-batches, each exchange of one beside the experts of the other."""

    def body(rank, group):
        w1, w2, expert_map = work.part(rank, 2)
        run = work.KINDS["unreduced"](vllm.FUSED_MOE_UNQUANTIZED_CONFIG)
        ranks = vllm.AllToAllPrepareAndFinalize(group)
        assert ranks.supports_async() and ranks.num_dispatchers() == 2
        batches = [work.tokens(rank, count=count) for count in (5, 3)]
        pending = [
            ranks.prepare_async(rows, weights, ids, 7, expert_map, False, run.quant_config)
            for rows, weights, ids in batches
        ]
        outs, ends = [], []
        for (rows, _, _), (hook, receive) in zip(batches, pending, strict=True):
            hook()
            arrived, scales, counts, ids, weights = receive()
            assert scales is None and counts is None
            fused = torch.empty(len(arrived), work.TOP_K, work.HIDDEN)
            run.apply(fused, arrived, w1, w2, weights, ids, "silu", 7, expert_map, None, None,
                      None, None, None, False)  # fmt: skip
            outs.append(torch.empty_like(rows))
            ends.append(
                ranks.finalize_async(
                    outs[-1], fused, weights, ids, False, run.finalize_weight_and_reduce_impl()
                )
            )
        for hook, receive in ends:
            hook()
            receive()
        return outs

    for rank, outs in enumerate(on_threads(2, body)):
        for out, count in zip(outs, (5, 3), strict=True):
            assert torch.equal(out, work.alone("unreduced", rank, count=count))


def prepared(group, rank, size=2, rank_of=None, **changed):
    ranks = vllm.AllToAllPrepareAndFinalize(group, rank_of)
    rows, weights, ids = work.tokens(rank, count=3)
    given = {"a1": rows, "topk_weights": weights, "topk_ids": ids, "num_experts": 7}
    given["expert_map"] = work.part(rank, size)[2]
    given = {**given, "apply_router_weight_on_input": False, "quant_config": None, **changed}
    return ranks, ranks.prepare(**given)


@pytest.mark.parametrize(
    ("changed", "kind", "text"),
    [
        ({"expert_map": None}, ConclaveValueError, "expert_map"),
        ({"expert_map": torch.arange(7, dtype=torch.int32)}, ConclaveValueError, "expert_map"),
        ({"topk_ids": torch.full((3, 3), 7, dtype=torch.int32)}, ConclaveValueError, "-1 to 6"),
        ({"topk_ids": torch.zeros((2, 3), dtype=torch.int32)}, ConclaveValueError, "topk_ids"),
        ({"apply_router_weight_on_input": True}, ConclaveValueError, "1 choice"),
        ({"rank_of": [0, 1]}, ConclaveValueError, "rank_of"),
    ],
)
def test_an_error_of_one_rank_reaches_the_others(changed, kind, text):
    def body(rank, group):
        return prepared(group, rank, **(changed if rank == 0 else {}))

    first, second = on_threads(2, body, timeout=5)
    assert isinstance(first, kind) and text in str(first)
    assert isinstance(second, ConclaveCommError) and second.name == "kCommMismatch"
    assert "rank 0" in str(second) and "refused" in str(second)


def test_ranks_that_disagree_are_told():
    def body(rank, group):
        rows = work.tokens(rank, count=3)[0]
        return prepared(group, rank, a1=rows if rank == 0 else rows.bfloat16())

    for found in on_threads(2, body, timeout=5):
        assert isinstance(found, ConclaveCommError) and found.name == "kCommMismatch"
        assert "bfloat16" in str(found) and "float32" in str(found)


def test_a_rank_that_does_not_come_is_named():
    def body(rank, group):
        return prepared(group, rank) if rank == 0 else None

    first, _ = on_threads(2, body, timeout=1)
    assert isinstance(first, ConclaveCommError) and "rank 1" in str(first)


def test_wrong_uses_are_refused():
    with pytest.raises(ConclaveValueError, match="group"):
        vllm.AllToAllPrepareAndFinalize(None)
    (alone,) = conclave.local_group(1)
    with pytest.raises(ConclaveValueError, match="rank_of"):
        vllm.AllToAllPrepareAndFinalize(alone, [0, 1])
    ranks, (rows, _, _, ids, weights) = prepared(alone, 0, size=1)
    fused = torch.zeros(len(rows), 3, work.HIDDEN)
    reduce = vllm.TopKWeightAndReduceContiguous()
    with pytest.raises(ConclaveValueError, match="topk_ids"):
        ranks.finalize(rows, fused, weights, ids.clone(), False, reduce)
    ranks.finalize(rows, fused, weights, ids, False, reduce)
    with pytest.raises(ConclaveValueError, match="topk_ids"):  # once for each call
        ranks.finalize(rows, fused, weights, ids, False, reduce)
    with pytest.raises(ConclaveTypeError, match="float64"):
        prepared(alone, 0, size=1, a1=work.tokens(0, count=3)[0].double())


# The exchange beneath.


def test_an_exchange_goes_on_beside_other_work():
    def body(rank, group):
        mine = numpy.full(200_000, rank, dtype=numpy.int64)
        all_of = numpy.empty(400_000, dtype=numpy.int64)
        exchange = group.begin_all_to_all(mine, [100_000] * 2, all_of, [100_000] * 2)
        exchange.wait()
        assert exchange.is_complete
        exchange.wait()
        return all_of

    for found in on_threads(2, body):
        assert (found[:100_000] == 0).all() and (found[100_000:200_000] == 1).all()


def test_an_exchange_that_is_dropped_ends_the_group():
    """Nobody writes its vectors any more, and no peer waits for ever."""

    def body(rank, group):
        mine, all_of = numpy.zeros(8, dtype=numpy.int64), numpy.zeros(8, dtype=numpy.int64)
        exchange = group.begin_all_to_all(mine, [4, 4], all_of, [4, 4])
        if rank == 0:
            group.barrier()  # its exchange may be complete by now: that of the third call is not
            del exchange
            gc.collect()
            return group.is_usable
        exchange.wait()
        group.barrier()
        group.barrier()
        return None

    dropped, waiting = on_threads(2, body, timeout=5)
    assert dropped is False
    assert isinstance(waiting, ConclaveCommError)


def test_an_exchange_names_what_it_waited_for():
    def body(rank, group):
        if rank == 1:
            return None
        mine = numpy.zeros(2, dtype=numpy.int64)
        exchange = group.begin_all_to_all(mine, [1, 1], mine.copy(), [1, 1], "a phase")
        with pytest.raises(ConclaveCommError) as caught:
            exchange.wait()
        assert not exchange.is_complete
        with pytest.raises(conclave.Error):
            exchange.wait()
        return caught.value

    found, _ = on_threads(2, body, timeout=1)
    assert found.peer == 1 and found.phase == "a phase"


def test_layers_cut_into_micro_batches_have_the_bits_of_one():
    problem = {
        "gate_up": numpy.random.default_rng(3).standard_normal((7, 48, 40), dtype="float32"),
        "down": numpy.random.default_rng(4).standard_normal((7, 40, 24), dtype="float32"),
        "router": numpy.random.default_rng(5).standard_normal((7, 40), dtype="float32"),
    }
    spec = {"num_experts": 7, "top_k": 2}
    rows = [
        numpy.random.default_rng(rank).standard_normal((count, 40), dtype="float32")
        for rank, count in enumerate((9, 1))
    ]
    options = conclave.LayerOptions(
        max_tokens=16, chunk_order="micro_batches", micro_batch_tokens=4
    )

    def body(rank, group):
        layer = conclave.Layer.from_tensors(spec, communicator=group, options=options, **problem)
        (order,) = [row for row in layer.plan["rows"] if row["table"] == "chunks"]
        assert (
            order["chosen"] and order["name"] == "micro_batches" and "4 tokens" in order["reason"]
        )
        return numpy.asarray(layer(rows[rank]))

    alone = conclave.Layer.from_tensors(spec, **problem)
    for rank, found in enumerate(on_threads(2, body)):
        numpy.testing.assert_array_equal(found, numpy.asarray(alone(rows[rank])))
    with pytest.raises(ConclaveValueError, match='chunk_order="micro_batches"'):
        conclave.Layer.from_tensors(
            spec, options=conclave.LayerOptions(micro_batch_tokens=4), **problem
        )
