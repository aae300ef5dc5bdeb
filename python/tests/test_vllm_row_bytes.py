"""Rows as bytes between ranks: few rows, single columns, and sizes that are no multiples of 8."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import conclave  # noqa: E402
from conclave import vllm  # noqa: E402
from conclave.vllm._row_bytes import bytes_of_rows, rows_of_bytes  # noqa: E402
from support.devices import seeded  # noqa: E402

EXPERTS, WIDTH = 4, 6


def together(work: Callable[[int], Any], ranks: int) -> list[Any]:
    """What work returns in a thread of each rank."""
    found: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("strides", [(1, 1), (1, 0), (0, 0), (7, 5)])
def test_columns_of_any_stride_come_back(count: int, strides: tuple[int, int]) -> None:
    rows = torch.arange(40).as_strided((count, 1), strides)
    packed = torch.cat([torch.zeros(count, 4, dtype=torch.uint8), bytes_of_rows(rows)], dim=1)
    assert torch.equal(rows_of_bytes(packed, 4, 12, torch.int64), rows)


def made(hidden_size: int, top_k: int, **arguments: Any) -> vllm.FusedMoE:
    """A layer whose weights are those of every split of it."""
    layer = vllm.FusedMoE(
        EXPERTS,
        top_k,
        hidden_size,
        WIDTH,
        params_dtype=torch.float32,
        reduce_results=True,
        **arguments,
    )
    generator = seeded(7)
    for expert in range(EXPERTS):
        for shard, name in (("w1", "w13_weight"), ("w3", "w13_weight"), ("w2", "w2_weight")):
            shape = (hidden_size, WIDTH) if shard == "w2" else (WIDTH, hidden_size)
            part = torch.randn(shape, generator=generator)
            layer.weight_loader(getattr(layer, name), part, name, shard, expert)
    return layer


@pytest.mark.parametrize(("hidden_size", "top_k"), [(9, 1), (8, 1), (9, 2)])
@pytest.mark.parametrize("tokens", [(0, 1), (1, 0), (0, 0), (2, 1)])
@pytest.mark.parametrize("told", [False, True])
def test_ranks_with_few_tokens_have_the_whole_result(
    hidden_size: int, top_k: int, tokens: tuple[int, int], told: bool
) -> None:
    experts, data = conclave.local_group(2), conclave.local_group(2)
    rows = [torch.randn(n, hidden_size, generator=seeded(n)) for n in tokens]
    logits = [torch.randn(n, EXPERTS, generator=seeded(n + 5)) for n in tokens]
    whole = made(hidden_size, top_k)

    def work(rank: int) -> Any:
        layer = made(hidden_size, top_k, dp_group=data[rank], ep_group=experts[rank])
        return layer(rows[rank], logits[rank], rank_tokens=list(tokens) if told else None)

    for rank, out in enumerate(together(work, 2)):
        torch.testing.assert_close(out, whole(rows[rank], logits[rank]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("hidden_size", "top_k"), [(9, 1), (9, 2)])
def test_single_rows_travel_to_the_ranks_of_their_experts(hidden_size: int, top_k: int) -> None:
    group = conclave.local_group(2)
    rows = torch.randn(1, hidden_size, generator=seeded(1))
    ids = torch.tensor([[3, 0]])[:, :top_k].as_strided((1, top_k), (0, 1 if top_k > 1 else 0))
    weights = torch.rand(1, top_k, generator=seeded(2))

    def work(rank: int) -> Any:
        exchange = vllm.AllToAllPrepareAndFinalize(group[rank])
        own = torch.tensor([0, 1, -1, -1] if rank == 0 else [-1, -1, 0, 1], dtype=torch.int32)
        config = vllm.FusedMoEQuantConfig.make()
        here = [part[: 1 - rank] for part in (rows, weights, ids)]
        return exchange.prepare(*here, EXPERTS, own, False, config)

    for rank, found in enumerate(together(work, 2)):
        received = 1 if rank == 1 or top_k == 2 else 0
        for one, sent in zip(
            itertools.compress(found, [1, 0, 0, 1, 1]), (rows, ids, weights), strict=True
        ):
            assert torch.equal(one, sent[:received])
