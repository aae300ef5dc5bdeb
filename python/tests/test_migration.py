"""Experts that move between ranks while a layer lives."""

from __future__ import annotations

import logging
import time

import numpy
import pytest
from test_ranks import SPEC, made_rows, made_weights, on_ranks

import conclave
from conclave.errors import (
    ConclaveCommError,
    ConclaveRuntimeError,
    ConclaveUnsupportedError,
    ConclaveValueError,
)
from conclave.vllm import EPLBConfig

SPARE = {"spare_experts": 1}


def groups_of(ranks, **options):
    """Two groups of the same ranks."""
    first, second = (conclave.local_group(ranks, **options) for _ in range(2))
    return list(zip(first, second, strict=True))


TURNED = conclave.ParallelSpec(ep_size=2, placement="custom", rank_of=[1, 1, 1, 0, 0, 0, 0])


def test_experts_move_at_once_and_keep_the_bits():
    weights = made_weights()
    rows = made_rows(11)
    expected = conclave.Layer.from_tensors(SPEC, **weights)(rows)

    def work(rank, experts, second):
        layer = conclave.Layer.from_tensors(SPEC, communicator=experts, options=SPARE, **weights)
        assert layer.placement_epoch == 0
        before = layer.slots
        layer.update_placement(TURNED)
        assert numpy.array_equal(layer(rows), expected)
        assert layer.placement_epoch > 0
        layer.plan_for(100)
        layer.update_placement(before, communicator=second, piece_bytes=4096)
        assert sorted(layer.slots.of_rank(rank)) == sorted(before.of_rank(rank))
        return layer(rows)

    for output in on_ranks(groups_of(2), work):
        assert numpy.array_equal(output, expected)


def test_experts_move_beside_forwards():
    weights = made_weights()
    rows = made_rows(11)
    expected = conclave.Layer.from_tensors(SPEC, **weights)(rows)

    def work(rank, experts, second):
        layer = conclave.Layer.from_tensors(SPEC, communicator=experts, options=SPARE, **weights)
        with conclave.Migration(
            layer, TURNED, second, processor_share=1, piece_bytes=4096
        ) as migration:
            with pytest.raises(ConclaveRuntimeError):
                layer.update_placement(layer.slots)
            for _ in range(5):
                assert numpy.array_equal(layer(rows), expected)
            migration.finish()
            assert migration.status.is_done and migration.status.experts_moved > 0
        assert migration.status.rounds_done == migration.status.rounds
        migration.check()
        return layer(rows)

    for output in on_ranks(groups_of(2), work):
        assert numpy.array_equal(output, expected)


def test_experts_come_from_a_checkpoint():
    checkpoint = conclave.Checkpoint("testdata/qwen3-moe-tiny")
    whole = conclave.Layer.from_checkpoint(checkpoint, 0)
    rows = numpy.random.default_rng(1).standard_normal((9, whole.spec.hidden_size), dtype="float32")
    expected = whole(rows)

    def work(rank, experts, second):
        layer = conclave.Layer.from_checkpoint(
            checkpoint, 0, communicator=experts, options={"spare_experts": 2}
        )
        split = conclave.ParallelSpec(ep_size=2, placement="round_robin")
        layer.update_placement(split, source=(checkpoint, 0))
        assert numpy.array_equal(layer(rows), expected)
        with pytest.raises(ConclaveCommError) as caught:
            layer.update_placement(conclave.ParallelSpec(ep_size=2), source=(checkpoint, 1))
        assert caught.value.name == "kCommMismatch"
        assert numpy.array_equal(layer(rows), expected)

    on_ranks(groups_of(2), work)


def test_wrong_requests_are_refused():
    weights = made_weights()

    def work(rank, experts, second):
        layer = conclave.Layer.from_tensors(SPEC, communicator=experts, **weights)
        with pytest.raises(ConclaveUnsupportedError, match="spare_experts"):
            conclave.Migration(layer, TURNED, second)
        with pytest.raises(ConclaveValueError, match="slots"):
            layer.update_placement(conclave.ExpertSlots(layer.spec.num_experts, (0,), (0, 1, 1)))
        with pytest.raises(ConclaveValueError, match="piece_bytes"):
            layer.update_placement(layer.slots, piece_bytes=1)
        with pytest.raises(ConclaveCommError):
            layer.update_placement(TURNED if rank else layer.slots)
        return layer(made_rows(3))

    on_ranks(groups_of(2, timeout=10), work)
    with pytest.raises(ConclaveValueError, match="spare_experts"):
        conclave.Layer.from_tensors(SPEC, options={"spare_experts": -1}, **weights)


@pytest.mark.parametrize("use_async", [True, False])
def test_a_balancer_moves_experts_by_their_load(use_async, caplog):
    caplog.set_level(logging.INFO, logger="conclave.balancer")
    weights = made_weights()
    rows = made_rows(40)
    # Every token chooses two experts of the first rank, which have no replicas at first.
    ids = numpy.tile(numpy.array([2, 3], dtype="int32"), (40, 1))
    shares = numpy.full(ids.shape, 0.5, dtype="float32")
    expected = conclave.Layer.from_tensors(SPEC, **weights)(rows, topk_ids=ids, topk_weights=shares)
    config = EPLBConfig(
        window_size=4,
        step_interval=8,
        num_redundant_experts=2,
        log_balancedness=True,
        log_balancedness_interval=2,
        use_async=use_async,
    )

    def work(rank, experts, second):
        experts_of = {"ep_size": 2, "ep_rank": rank, "num_redundant_experts": 2}
        layer = conclave.Layer.from_tensors(
            SPEC,
            communicator=experts,
            parallel=experts_of,
            options={"spare_experts": 2},
            **weights,
        )
        balancer = config.balancer([layer], second)
        for _ in range(40):
            output = layer(rows, topk_ids=ids, topk_weights=shares)
            assert numpy.array_equal(output, expected)
            balancer.step()
            time.sleep(0.005)
        status = balancer.status
        assert status.steps == 40 and status.rebalances >= 2
        assert status.experts_moved > 0
        assert layer.placement_epoch > 0
        return layer.slots

    first, second = on_ranks(groups_of(2), work)
    assert first == second
    assert any("balancer: step 2, balancedness" in line for line in caplog.messages)
    assert any("experts move" in line for line in caplog.messages)


def test_a_step_has_its_own_rows_also_after_counts_begin_anew():
    weights = made_weights()
    rows = made_rows(7)
    one = numpy.zeros((7, 2), "int32")  # all of expert 0
    each = numpy.stack([numpy.arange(7), numpy.arange(7)], axis=1).astype("int32")
    shares = numpy.full((7, 2), 0.5, "float32")

    def work(rank, experts, second):
        layer = conclave.Layer.from_tensors(SPEC, communicator=experts, **weights)
        balancer = conclave.Balancer([layer], second, use_async=False)
        found = []
        for ids, resets in ((one, False), (each, False), (one, True), (each, True)):
            if resets:
                layer.reset_stats()
            layer(rows, topk_ids=ids, topk_weights=shares)
            balancer.step()
            found.append(balancer.status.balancedness)
        return found

    for found in on_ranks(groups_of(2), work):
        assert found == pytest.approx([0.5, 7 / 8, 0.5, 7 / 8])


def test_wrong_balancers_are_named():
    weights = made_weights()
    layer = conclave.Layer.from_tensors(SPEC, **weights)
    alone = conclave.connect("local")
    with pytest.raises(ConclaveValueError, match="window_size"):
        conclave.Balancer([layer], alone, window_size=0)
    with pytest.raises(ConclaveValueError, match="layers"):
        conclave.Balancer([], alone)
    with pytest.raises(ConclaveValueError, match="count"):
        conclave.Balancer([conclave.Layer.from_tensors(SPEC, count=False, **weights)], alone)
    with pytest.raises(ConclaveValueError, match="policy"):
        EPLBConfig(policy="best").balancer([layer], alone)
    with pytest.raises(ConclaveValueError, match="num_redundant_experts"):
        EPLBConfig(num_redundant_experts=3).balancer([layer], alone)
