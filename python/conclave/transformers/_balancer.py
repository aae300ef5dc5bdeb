"""Experts of a patched model that follow their load."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from conclave._process_groups import from_process_group
from conclave.balance import ExpertSlots, balancedness
from conclave.balancer import Balancer, BalancerStatus
from conclave.errors import ConclaveRuntimeError
from conclave.layer import Layer
from conclave.ranks import Communicator, local_group
from conclave.transformers._eplb import EplbOptions

_PHASE = "rows of experts"


class ModelBalancer:
    """Counts the rows of a patched model's experts and moves experts between ranks as
    `EplbOptions` say. `balancer_of` gives a model's.

    A step is a forward of the model: it ends by itself, on every rank after the same forward. In a
    graph of `torch.compile` nothing does that: call `step` after each forward there. Blocks count
    that were replaced whole.
    """

    def __init__(
        self, model: torch.nn.Module, blocks: dict[str, Any], options: EplbOptions
    ) -> None:
        """`blocks` has what stands in for each path. On every rank at the same time."""
        self._blocks, self._options = blocks, options
        groups = (getattr(block, "expert_group", None) for block in blocks.values())
        self._group = next((group for group in groups if group is not None), None)
        self._former = BalancerStatus(0, 0, 0, False, 1.0)  # of layers before weights changed
        self._first = [self._rows(layer) for layer in self._now()]  # those of comparisons
        self._core: Balancer | None = self._begin()
        own = weakref.ref(self)  # the model's hook keeps nothing alive

        def end_step(*_: Any) -> None:
            if torch.compiler.is_compiling():  # a graph holds no step
                return
            if (found := own()) is not None:
                found.step()

        self._hook: Any = model.register_forward_hook(end_step)

    def _begin(self) -> Balancer:
        """A balancer of the layers that there are now."""
        self._layers = self._now()
        is_spread = self._group is not None
        communicator = from_process_group(self._group) if is_spread else local_group(1)[0]
        options = self._options
        return Balancer(
            [layer for layer in self._layers if not is_spread or layer.parallel.ep_size > 1],
            communicator,
            rule=options.rule,
            num_nodes=options.num_nodes if is_spread else 1,
            window_size=options.window_size,
            step_interval=options.step_interval,
            log_balancedness=options.log_balancedness,
            log_balancedness_interval=options.log_balancedness_interval,
            use_async=options.use_async and is_spread,
        )

    def _now(self) -> list[Layer]:
        return [block.layer for block in self._blocks.values()]

    @staticmethod
    def _rows(layer: Layer) -> torch.Tensor:
        return torch.tensor(layer.stats().expert_load, dtype=torch.int64)

    def _balancer(self) -> Balancer:
        """The one of the layers that there are now. Raises ConclaveRuntimeError after unpatch."""
        if self._core is None:
            raise ConclaveRuntimeError("the model was given its own blocks back")
        layers = self._now()
        if any(new is not old for new, old in zip(layers, self._layers, strict=True)):
            # Weights were packed again, on every rank; what was under way had their former values.
            self._former = self.status
            self._core = None  # ends the former's move before another begins
            for index, (new, old) in enumerate(zip(layers, self._layers, strict=True)):
                if new is not old:
                    self._first[index].zero_()
            self._core = self._begin()
        return self._core

    def step(self) -> None:
        """Ends a step: on every rank, after the same forward.

        Raises:
            ConclaveCommError: once, where ranks disagree, one is lost or late, or a copy differs;
                the model goes on with its experts where they are.
        """
        self._balancer().step()

    def rebalance(self) -> None:
        """Moves experts now, by the rows of the window: on every rank, between the same forwards.
        It ends a step. With `use_async` the move has begun when it returns, and `status.is_moving`
        says how long it goes on.

        Raises:
            ConclaveCommError: as of `step`.
        """
        balancer = self._balancer()
        balancer.rebalance()
        balancer.step()

    def loads(self) -> dict[str, tuple[int, ...]]:
        """Rows of each expert [E] by the path of its block, of all ranks, since the model was
        patched or its weights were packed again. On every rank at the same time. What
        `EplbOptions.initial_load` takes.

        Raises:
            ConclaveCommError: for ranks that do not come.
        """
        self._balancer()
        found = {}
        for path, layer, first in zip(self._blocks, self._layers, self._first, strict=True):
            rows = self._rows(layer) - first
            found[path] = tuple(self._of_all_ranks(path, layer, rows).tolist())
        return found

    def _of_all_ranks(self, path: str, layer: Layer, rows: torch.Tensor) -> torch.Tensor:
        if layer.parallel.ep_size == 1:
            return rows
        communicator: Communicator = self._blocks[path].expert_communicator
        total = torch.empty_like(rows)
        communicator.all_reduce(rows, total, phase=_PHASE)
        return total

    def balancedness(self) -> float:
        """The mean of the ranks' rows over the largest, both added up over blocks, for `loads` and
        where experts lie now: 1 is perfect. On every rank at the same time."""
        slots, mean, largest = self.slots, 0.0, 0.0
        for path, load in self.loads().items():
            if any(load):
                of_rank = sum(load) / slots[path].num_ranks
                mean += of_rank
                largest += of_rank / balancedness(load, slots[path])
        return mean / largest if largest else 1.0

    @property
    def slots(self) -> dict[str, ExpertSlots]:
        """What each rank holds now of each block."""
        return {path: layer.slots for path, layer in zip(self._blocks, self._now(), strict=True)}

    @property
    def status(self) -> BalancerStatus:
        """What it has done so far."""
        if self._core is None:
            return self._former
        now, before = self._core.status, self._former
        return BalancerStatus(
            before.steps + now.steps,
            before.rebalances + now.rebalances,
            before.experts_moved + now.experts_moved,
            now.is_moving,
            now.balancedness,
        )

    def close(self) -> None:
        """Ends it where it is, as `unpatch` does."""
        self._former = self.status
        self._hook.remove()
        self._core = None


def blocks_of(modules: Sequence[Any], replacements: Sequence[Any]) -> dict[str, Any]:
    """By the path of what was replaced whole, what stands in for it. `modules` are the replaced."""
    return {
        module.path: replacement
        for module, replacement in zip(modules, replacements, strict=True)
        if module.replaced == "block"
    }
