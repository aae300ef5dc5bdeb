"""What ranks of test_transformers_eplb.py do, each in a process of its own."""

from __future__ import annotations

import logging
from typing import Any

import torch
import transformers

import conclave
import conclave.transformers
from conclave import ExpertSlots
from conclave.errors import ConclaveCommError
from conclave.transformers import EplbOptions, balancer_of
from support import models
from support import sharded_work as work

NAME = "deepseek_v3"
SPREAD = {"tp_size": 2, "ep_size": 2}
REDUNDANT = 2


def quiet() -> None:
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)


def blocks_of(model: Any) -> dict[str, Any]:
    """The replaced blocks by path."""
    return {path: model.get_submodule(path) for path in balancer_of(model).slots}


def inputs_of(block: Any, tokens: int) -> torch.Tensor:
    """Rows of which most choose the same experts."""
    width = block.gate.weight.shape[1]
    generator = torch.Generator().manual_seed(tokens)
    common = torch.randn(1, width, generator=generator)
    return (common + 0.3 * torch.randn(tokens, width, generator=generator))[None]


def block_results(model: Any, paths: list[str]) -> list[torch.Tensor]:
    """Of each block, for one token and for some."""
    found = []
    with torch.no_grad():
        for path in paths:
            block = model.get_submodule(path)
            found += [block(inputs_of(block, tokens)) for tokens in (1, 9, 130)]
    return found


def held(slots: dict[str, ExpertSlots]) -> dict[str, list[list[int]]]:
    """What each rank holds of each block, in whatever order it lies there."""
    return {
        path: [sorted(of.of_rank(rank)) for rank in range(of.num_ranks)]
        for path, of in slots.items()
    }


def is_same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def at_once(rank: int) -> dict[str, Any]:
    """Experts move between two forwards, weights change, and the model gets its blocks back."""
    model = work.spread(NAME, rank, **SPREAD)
    own = work.results(model)
    options = EplbOptions(num_redundant_experts=REDUNDANT, use_async=False, step_interval=10_000)
    report = conclave.transformers.patch(model, eplb=options)
    paths = [m.path for m in report.modules if m.replaced == "block"]
    balancer = balancer_of(model)
    found: dict[str, Any] = {"own": own, "kinds": [m.replaced for m in report.modules]}
    found["first"] = work.results(model)
    found["steps"] = balancer.status.steps
    found["blocks"] = block_results(model, paths)
    found["before"] = balancer.slots
    found["loads"], found["balancedness"] = balancer.loads(), [balancer.balancedness()]
    balancer.rebalance()
    found["after"], found["status"] = balancer.slots, balancer.status
    found["balancedness"].append(balancer.balancedness())
    found["is_same"] = is_same(found["blocks"], block_results(model, paths))
    found["moved"] = work.results(model)
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(1.25)
    found["changed"] = work.results(model)
    found["kept"] = balancer.slots
    conclave.transformers.unpatch(model)
    found["given_back"] = work.results(model)
    return found


def beside_forwards(rank: int, first: dict[str, Any]) -> dict[str, Any]:
    """Experts begin where loads say, and move to a placement's opposite while forwards go on."""
    model = work.spread(NAME, rank, **SPREAD)
    options = EplbOptions(
        num_redundant_experts=REDUNDANT, initial_load=first, window_size=8, step_interval=10_000
    )
    conclave.transformers.patch(model, eplb=options)
    balancer = balancer_of(model)
    placed = balancer.slots
    paths = list(placed)
    expected = block_results(model, paths)
    balancer.rebalance()
    rounds, same = 0, True
    with torch.no_grad():
        while rounds < 2000 and (balancer.status.is_moving or rounds == 0):
            model(models.prompt())  # ends steps
            same = same and is_same(expected, block_results(model, paths))
            rounds += 1
    return {
        "placed": placed,
        "after": balancer.slots,
        "same": same,
        "status": balancer.status,
        "blocks": expected,
    }


def with_slices(rank: int) -> dict[str, Any]:
    """Where ranks hold slices of every expert there is nothing to move."""
    model = work.spread("qwen2_moe", rank, tp_size=2)
    conclave.transformers.patch(model, eplb=EplbOptions(num_redundant_experts=REDUNDANT))
    expected = work.results(model)
    balancer = balancer_of(model)
    balancer.rebalance()
    again = work.results(model)
    return {
        "same": torch.equal(expected[0], again[0]),
        "loads": balancer.loads(),
        "moved": balancer.status.experts_moved,
        "ranks": [slots.num_ranks for slots in balancer.slots.values()],
        "balancedness": balancer.balancedness(),
    }


def with_faults(rank: int) -> dict[str, Any]:
    """What does not fit is refused before anything is replaced; a rank that leaves is named."""
    model = work.spread(NAME, rank, **SPREAD)
    count = 12
    wrong = {
        "short": EplbOptions(initial_load=[1.0] * (count - 1)),
        "negative": EplbOptions(initial_load=[-1.0] * count),
        "three ranks": EplbOptions(
            placement=ExpertSlots(count, tuple(range(count)), (0, 4, 8, count))
        ),
        "redundant": EplbOptions(
            num_redundant_experts=1, placement=ExpertSlots(count, tuple(range(count)), (0, 6, 12))
        ),
        "missing": EplbOptions(placement=ExpertSlots(count, (0,) * count, (0, 6, 12))),
        "path": EplbOptions(initial_load={"model.layers.77.mlp": [1.0] * count}),
    }
    found: dict[str, Any] = {}
    for name, options in wrong.items():
        try:
            conclave.transformers.patch(model, eplb=options)
        except conclave.Error as error:
            found[name] = (type(error).__name__, str(error))
    backwards = ExpertSlots(count, tuple(reversed(range(count))), (0, 5, 12))
    conclave.transformers.patch(model, eplb=EplbOptions(placement=backwards, use_async=False))
    balancer = balancer_of(model)
    found["slots"] = all(
        [sorted(slots.of_rank(r)) for r in (0, 1)] == [list(range(7, 12)), list(range(7))]
        for slots in balancer.slots.values()
    )
    work.results(model)
    if rank == 1:
        return found
    try:
        balancer.rebalance()
    except ConclaveCommError as error:
        found["left"] = (error.peer, str(error))
    return found


def every_part(rank: int, folder: Any, first: dict[str, Any]) -> dict[str, Any]:
    """All that ranks do, in one process, since they take longer to begin than to work; the last one
    ends with a rank that leaves."""
    quiet()
    return {
        "at once": at_once(rank),
        "beside forwards": beside_forwards(rank, first),
        "slices": with_slices(rank),
        "faults": with_faults(rank),
    }
