"""Moves whose experts arrive beside forwards: a layer at a time, which a step takes up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from conclave import _conclave
from conclave.vllm._eplb_tables import put_arrived
from conclave.vllm._eplb_worker import (
    STALE,
    WAITS,
    Transfer,
    TransferWorker,
    agreed_on_arrival,
)
from conclave.vllm._expert_moves import KeptBesideParameters

if TYPE_CHECKING:
    from conclave.vllm.eplb_state import EplbModelState


class BackgroundMoves:
    """Every rank calls all of it alike, between the same forwards.

    Args:
        of_worker: a communicator for the thread alone; None: one rank.
        communicator: of the ranks, over which steps agree.
    """

    def __init__(
        self,
        of_worker: _conclave.Communicator | None,
        communicator: _conclave.Communicator | None,
    ) -> None:
        self.worker, self._communicator = TransferWorker(of_worker), communicator

    def begin(self, state: EplbModelState, states: list[EplbModelState]) -> None:
        """Begins the moves of a model's layers, behind those of models before it."""
        if not state.moves:
            return
        table = state.physical_to_logical_map.cpu().clone()
        for index, _, new in state.moves:
            table[index] = torch.tensor(new)
        state.new_physical_to_logical_map = table
        state.rebalanced = True
        if sum(other.rebalanced for other in states) == 1:
            self._ask(state)

    def advance(self, states: list[EplbModelState]) -> None:
        """Takes up a layer that has arrived on all ranks, and asks for the next one. Raises on
        every rank where one has failed."""
        moving = [state for state in states if state.rebalanced]
        if not moving:
            return
        state = moving[0]
        state.ep_buffer_ready = int(self.worker.has_ended and self.worker.error is None)
        verdict = agreed_on_arrival(self.worker, self._communicator)
        if verdict == WAITS:
            return
        if verdict == STALE:  # weights were loaded meanwhile: these are sent
            self._ask(state)
            return
        self.take_up(state)
        following = next((other for other in moving if other.rebalanced), None)
        if following is not None:
            self._ask(following)

    def take_up(self, state: EplbModelState) -> None:
        """Writes the layer that has arrived."""
        if not state.moves or not self.worker.has_ended:
            return
        index, old, new = state.moves.pop(0)
        put_arrived(state, index, old, new, self.worker.take())
        state.ep_buffer_ready = 0
        if not state.moves:
            state.end_move()

    def _ask(self, state: EplbModelState) -> None:
        index, old, new = state.moves[0]
        layer = state.layers[index]
        state.layer_to_transfer, state.ep_buffer_ready = index, 0
        rows, kept = layer.get_expert_weights(), KeptBesideParameters(layer)
        self.worker.ask(Transfer(old, new, rows, kept))
