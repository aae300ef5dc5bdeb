"""A model's experts that follow their load, by vLLM's names: counts of a window of steps, new slots
by DeepSeek's rule, and the experts' tensors moved to them."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from conclave import _conclave
from conclave._process_groups import communicator_of
from conclave.errors import ConclaveRuntimeError, ConclaveUnsupportedError, ConclaveValueError
from conclave.vllm._eplb_background import BackgroundMoves
from conclave.vllm._eplb_layers import group_of, layers_of, worker_communicator
from conclave.vllm._eplb_mapping import RankMapping
from conclave.vllm._eplb_ranks import changed_slots, nodes_left, on_new_ranks
from conclave.vllm._eplb_tables import checked_load, hand_on, new_slots, put_arrived, write_maps
from conclave.vllm._expert_moves import ExpertMover, KeptBesideParameters
from conclave.vllm.eplb import EPLBConfig
from conclave.vllm.mapping import build_initial_global_physical_to_logical_map
from conclave.vllm.ranked import RankedExperts

_logger = logging.getLogger("conclave.eplb")


@dataclasses.dataclass
class EplbModelState:
    """One model's slots and counts. Layers have views of them: they are written in place."""

    physical_to_logical_map: torch.Tensor  # [layers, physical] int64
    logical_to_physical_map: torch.Tensor  # [layers, logical, redundant + 1] int64, -1 padded
    logical_replica_count: torch.Tensor  # [layers, logical] int64
    expert_load_pass: torch.Tensor  # [layers, physical] int32, of this step's forward
    expert_load_window: torch.Tensor  # [window, layers, physical] int32
    model_name: str
    model: Any
    layers: list[RankedExperts]
    num_groups: int = 1
    experts_moved: int = 0  # that came to this rank
    # While experts are on their way beside forwards:
    rebalanced: bool = False
    layer_to_transfer: int = 0
    ep_buffer_ready: int = 0  # 1: that layer has arrived on this rank
    new_physical_to_logical_map: torch.Tensor | None = None  # [layers, physical] int64
    moves: list[tuple[int, list[int], list[int]]] = dataclasses.field(default_factory=list)

    def end_move(self) -> None:
        """Nothing is on its way any more."""
        self.rebalanced, self.layer_to_transfer, self.ep_buffer_ready = False, 0, 0
        self.new_physical_to_logical_map = None
        self.moves = []


class EplbState:
    """Counts which experts a model's tokens go to and moves experts between ranks accordingly.

    One on each rank, with the same arguments; calls from one thread, between forwards, on all ranks
    in the same order. Results stay what they were: tokens go to an expert wherever it lies. Experts
    move in `step` and `rearrange`, or beside forwards once `start_async_loop` was called; layers
    pack those that came at their next forward.

    Args:
        parallel_config: what has `eplb_config` (`EPLBConfig`), or that itself.
        device: of the counts and maps: by default that of the layers.
        ep_group: the ranks that the experts are spread over: a group of torch.distributed or a
            Communicator; by default that of the layers, then that of `install`.
        num_nodes: of the ranks, which are numbered node by node.
        worker_group: a Communicator of the same ranks for the async worker alone. Not needed where
            the ranks are a group of torch.distributed, of which each rank makes one.

    Raises:
        ConclaveUnsupportedError: for another policy than the default.
    """

    build_initial_global_physical_to_logical_map = staticmethod(
        build_initial_global_physical_to_logical_map
    )

    def __init__(
        self,
        parallel_config: Any = None,
        device: torch.device | str | None = None,
        *,
        ep_group: Any = None,
        num_nodes: int = 1,
        worker_group: Any = None,
    ) -> None:
        found = getattr(parallel_config, "eplb_config", parallel_config)
        config = EPLBConfig() if found is None else found
        if getattr(config, "policy", "default") != "default":
            raise ConclaveUnsupportedError(f"policy: expected 'default', found {config.policy!r}")
        for name in ("window_size", "step_interval"):
            if getattr(config, name) < 1:
                raise ConclaveValueError(
                    f"{name}: expected 1 or more, found {getattr(config, name)}"
                )
        if num_nodes < 1:
            raise ConclaveValueError(f"num_nodes: expected 1 or more, found {num_nodes}")
        self.parallel_config, self.device = parallel_config, device
        self.model_states: dict[str, EplbModelState] = {}
        self.expert_load_window_size: int = config.window_size
        self.expert_load_window_step = 0
        self.expert_rearrangement_step_interval: int = config.step_interval
        # The first rearrangement comes after a quarter of the interval.
        self.expert_rearrangement_step = config.step_interval - config.step_interval // 4
        self.is_async = bool(getattr(config, "use_async", False))
        self._given_group, self._num_nodes = ep_group, num_nodes
        self._worker_group = worker_group
        self._background: BackgroundMoves | None = None
        self._mover: ExpertMover | None = None
        self._communicator: _conclave.Communicator | None = None

    # Models

    def add_model(
        self, model: Any, model_config: Any = None, global_expert_load: Any = None
    ) -> EplbModelState:
        """Gives a model's layers their slots, in order with copies behind them as they are loaded,
        and counts from now on. On every rank.

        Args:
            model: a module with layers that were made with enable_eplb, all of one size; its
                `moe_layers` has them where it has such an attribute. Where it has
                `set_eplb_state`, that hands the tensors on. `num_expert_groups` is read where there
                is one.
            model_config: whose `model` is the model's name.
            global_expert_load: [layers, logical] rows by which experts move at once.

        Raises:
            ConclaveValueError: naming what does not fit, before anything is changed.
        """
        layers = layers_of(model)
        if any(state.model is model for state in self.model_states.values()):
            raise ConclaveValueError("model: it was added before")
        self._join(layers[0])
        state = self._first_state(model, model_config, layers)
        load = None
        if global_expert_load is not None:
            load = checked_load("global_expert_load", global_expert_load, state)
        hand_on(state)
        self.model_states[state.model_name] = state
        if load is not None:
            self._rearrange(state, load)
            self.expert_rearrangement_step = 0
        return state

    def _first_state(
        self, model: Any, model_config: Any, layers: list[RankedExperts]
    ) -> EplbModelState:
        first = layers[0]
        count, logical, slots = len(layers), first.logical_num_experts, first.global_num_experts
        device = torch.device(self.device or next(first.parameters()).device)
        order = build_initial_global_physical_to_logical_map(logical, slots - logical)
        name = str(getattr(model_config, "model", None) or f"model {len(self.model_states)}")
        if name in self.model_states:
            raise ConclaveValueError(f"model_config: expected a name of its own, found {name!r}")
        state = EplbModelState(
            physical_to_logical_map=torch.tensor([order] * count, device=device),
            logical_to_physical_map=torch.full(
                (count, logical, slots - logical + 1), -1, device=device
            ),
            logical_replica_count=torch.zeros((count, logical), dtype=torch.int64, device=device),
            expert_load_pass=torch.zeros((count, slots), dtype=torch.int32, device=device),
            expert_load_window=torch.zeros(
                (self.expert_load_window_size, count, slots), dtype=torch.int32, device=device
            ),
            model_name=name,
            model=model,
            layers=layers,
            num_groups=int(getattr(model, "num_expert_groups", None) or 1),
        )
        for index in range(count):
            write_maps(state, index, order)
        return state

    def _join(self, layer: RankedExperts) -> None:
        """Connects the ranks of the first layer."""
        if self._mover is not None:
            return
        size, rank = (layer.ep_size, layer.ep_rank) if layer.use_ep else (1, 0)
        if size > 1:
            given = self._given_group or group_of(layer)
            found = communicator_of(given, "ep_group")
            if found is None or (found.size, found.rank) != (size, rank):
                text = "None" if found is None else f"rank {found.rank} of {found.size}"
                raise ConclaveValueError(
                    f"ep_group: expected rank {rank} of {size}, as in the layers' split, found "
                    f"{text}"
                )
            self._communicator = found
        self._mover = ExpertMover(self._communicator)

    # Steps

    def step(
        self, is_dummy: bool = False, is_profile: bool = False, log_stats: bool = False
    ) -> None:
        """Ends a step: after a forward of every model, on every rank.

        Args:
            is_dummy: its rows do not count; the step does.
            is_profile: nothing counts, and nothing moves.
            log_stats: says the balancedness of all ranks' rows in this step, to the logger
                "conclave.eplb".

        Raises:
            ConclaveCommError: ranks that are lost, late or disagree. Layers that were reached have
                their new slots, the others the old ones. A move beside forwards is given up, once
                and on all ranks; later ones are made within the call.
        """
        if is_profile:
            self.rearrange(is_profile=True)
            return
        if self.model_states:
            self._join(next(iter(self.model_states.values())).layers[0])
        for state in self.model_states.values():
            if is_dummy:
                state.expert_load_pass.zero_()
                continue
            if log_stats:
                self._log(state)
            state.expert_load_window[self.expert_load_window_step] = state.expert_load_pass
            state.expert_load_pass.zero_()
        if not is_dummy:
            self.expert_load_window_step += 1
            self.expert_load_window_step %= self.expert_load_window_size
        self.expert_rearrangement_step += 1
        self._advance()
        is_due = self.expert_rearrangement_step >= self.expert_rearrangement_step_interval
        if is_due and not self._is_moving:
            self.expert_rearrangement_step = 0
            self.rearrange()

    def rearrange(
        self,
        is_profile: bool = False,
        execute_shuffle: bool = True,
        global_expert_loads: Sequence[Any] | None = None,
        rank_mapping: Mapping[int, int] | None = None,
    ) -> list[torch.Tensor] | None:
        """Moves experts now, by the rows of the window. Layers without rows stay as they are.

        With an async worker (`start_async_loop`) the move begins now and ends in later steps, a
        layer at a time. While one is under way nothing else begins.

        Args:
            is_profile: nothing moves.
            execute_shuffle: False returns the rows instead, and nothing moves.
            global_expert_loads: for each model rows [layers, logical], in the place of those that
                were counted; the same on every rank.
            rank_mapping: the new rank of each rank, -1 for one that leaves: its experts go to those
                that stay, within this call, and each of these has as many slots as before. Then a
                rank that leaves has no models any more, and layers of the others are of the new
                ranks. Give these a group before the next move, by `ep_group`. Layers that were
                given groups are refused: these have the old ranks.

        Returns:
            The rows [layers, logical] of all ranks for each model, without a shuffle.

        Raises:
            ConclaveCommError: as of `step`. With a rank_mapping nothing has been written then.
            ConclaveValueError, ConclaveTypeError, ConclaveUnsupportedError: naming the argument.
        """
        if is_profile:
            return None
        states = list(self.model_states.values())
        if states:
            self._join(states[0].layers[0])
        loads = self._loads(states, global_expert_loads)
        if not execute_shuffle:
            return loads
        if self._is_moving:
            if rank_mapping is not None:
                raise ConclaveRuntimeError("rank_mapping: experts are on their way; end the steps")
            return None
        if rank_mapping is not None:
            self._change_ranks(states, loads, rank_mapping)
            return None
        for state, load in zip(states, loads, strict=True):
            self._rearrange(state, load)
        return None

    def _loads(self, states: list[EplbModelState], given: Sequence[Any] | None) -> list[Any]:
        if given is None:
            return [self._window_load(state) for state in states]
        if len(given) != len(states):
            raise ConclaveValueError(
                f"global_expert_loads: expected rows of {len(states)} models, found {len(given)}"
            )
        return [
            checked_load("global_expert_loads", load, state)
            for load, state in zip(given, states, strict=True)
        ]

    def _window_load(self, state: EplbModelState) -> torch.Tensor:
        """Rows of each expert [layers, logical] in the windows of all ranks."""
        physical = state.expert_load_window.sum(0, dtype=torch.int64)
        load = torch.zeros_like(state.logical_replica_count)
        load.scatter_add_(1, state.physical_to_logical_map, physical)
        return self._of_all_ranks(load)

    def _of_all_ranks(self, rows: torch.Tensor) -> torch.Tensor:
        mine = rows.cpu().contiguous()
        if self._communicator is None:
            return mine
        total = torch.empty_like(mine)
        self._communicator.all_reduce(mine.view(-1), total.view(-1), "eplb: add up the load")
        return total

    def _rearrange(self, state: EplbModelState, load: torch.Tensor) -> None:
        ranks = 1 if self._communicator is None else self._communicator.size
        nodes = self._num_nodes if ranks % self._num_nodes == 0 else 1
        state.moves = []
        for index, rows in enumerate(load):
            if not rows.any():
                continue
            old = state.physical_to_logical_map[index].tolist()
            new = new_slots(rows, old, len(old), state.num_groups, nodes, ranks)
            if new != old:
                state.moves.append((index, old, new))
        if self._background is not None:
            self._background.begin(state, list(self.model_states.values()))
            return
        for index, old, new in state.moves:
            self._move(state, index, old, new)
        state.moves = []

    def _move(self, state: EplbModelState, index: int, old: list[int], new: list[int]) -> None:
        mover = self._mover
        assert mover is not None
        layer = state.layers[index]
        arrived = mover.receive(old, new, layer.get_expert_weights(), KeptBesideParameters(layer))
        put_arrived(state, index, old, new, arrived)

    # Beside forwards

    def start_async_loop(self, rank_mapping: Any = None, is_profile: bool = False) -> None:
        """Starts the thread that receives experts while forwards run, where `use_async` says so:
        on every rank, after `add_model`. From then on `rearrange` begins a move, and each step
        takes one layer of each model to its new slots once it has arrived on all ranks. Nothing
        happens where the thread runs already.

        The thread has a communicator of its own: made of the group of torch.distributed that the
        ranks have, or `worker_group`.

        Args:
            rank_mapping: None: `rearrange` moves experts to other ranks within the call.
            is_profile: nothing is started.

        Raises:
            ConclaveRuntimeError: there is no model yet.
            ConclaveValueError: ranks without a group, of which no communicator can be made.
            ConclaveUnsupportedError: a rank_mapping.
            ConclaveCommError: ranks that do not come.
        """
        if rank_mapping is not None:
            raise ConclaveUnsupportedError(
                "rank_mapping: experts go to other ranks within `rearrange`"
            )
        if not self.is_async or is_profile or self._background is not None:
            return
        if not self.model_states:
            raise ConclaveRuntimeError("start_async_loop: add a model before")
        layer = next(iter(self.model_states.values())).layers[0]
        self._join(layer)
        communicator = None
        if self._communicator is not None:
            communicator = worker_communicator(self._worker_group, self._given_group, layer)
        self._background = BackgroundMoves(communicator, self._communicator)

    @property
    def async_worker(self) -> threading.Thread | None:
        """The thread, once it was started."""
        return None if self._background is None else self._background.worker.thread

    @property
    def _is_moving(self) -> bool:
        return any(state.rebalanced for state in self.model_states.values())

    def _advance(self) -> None:
        """Takes up a layer that has arrived on all ranks. What fails ends the move on all of them;
        later ones are made within the call."""
        if self._background is None:
            return
        try:
            self._background.advance(list(self.model_states.values()))
        except BaseException:
            self._end_background()
            raise

    def _end_background(self) -> None:
        for state in self.model_states.values():
            state.end_move()
        if self._background is not None:
            self._background.worker.close()
            self._background = None

    def move_to_workspace(
        self, model_state: EplbModelState, ep_group: Any = None, is_profile: bool = False
    ) -> None:
        """Writes the layer that has arrived, between two forwards. `step` calls it, on all ranks
        alike."""
        del ep_group
        if not is_profile and self._background is not None:
            self._background.take_up(model_state)

    # Other ranks

    @property
    def ep_group(self) -> Any:
        """The ranks as they were given. After a rank_mapping: set it to those that are left."""
        return self._given_group

    @ep_group.setter
    def ep_group(self, group: Any) -> None:
        self._given_group = group
        self._mover = self._communicator = None

    def _change_ranks(
        self, states: list[EplbModelState], loads: list[Any], rank_mapping: Any
    ) -> None:
        communicator = self._communicator
        size, rank = (1, 0) if communicator is None else (communicator.size, communicator.rank)
        mapping = RankMapping.of(rank_mapping, size)
        if mapping.grows:
            raise ConclaveValueError(
                f"rank_mapping: expected an entry for each of {size} ranks, found "
                f"{mapping.num_old}; ranks that join make layers of their own"
            )
        nodes = nodes_left(mapping, self._num_nodes)
        changes = [
            changed_slots(state, load, mapping, nodes)
            for state, load in zip(states, loads, strict=True)
        ]
        mover = self._mover
        assert mover is not None
        arrived = []
        for state, change in zip(states, changes, strict=True):
            for layer, (old, new) in zip(state.layers, change, strict=True):
                rows, kept = layer.get_expert_weights(), KeptBesideParameters(layer)
                arrived.append(mover.receive(old, mapping.slots_after(new), rows, kept))
        if communicator is not None:
            communicator.barrier()  # nobody writes before all have received
        self._end_background()
        self._mover = self._communicator = self._given_group = self._worker_group = None
        new_rank = mapping.new_of[rank]
        if new_rank < 0:
            self.model_states.clear()
            return
        pieces = iter(arrived)
        for state, change in zip(states, changes, strict=True):
            for layer in state.layers:
                ExpertMover.put(
                    next(pieces), layer.get_expert_weights(), KeptBesideParameters(layer)
                )
            on_new_ranks(state, change, mapping.num_new, new_rank)

    def _log(self, state: EplbModelState) -> None:
        load = self._of_all_ranks(state.expert_load_pass.long()).double()
        ranks = 1 if self._communicator is None else self._communicator.size
        of_ranks = load.reshape(len(load), ranks, -1).sum(2)
        mean, largest = float(of_ranks.mean(1).sum()), float(of_ranks.amax(1).sum())
        _logger.info(
            "%s: mean %.2f rows a rank, largest %.0f, balancedness %.4f",
            state.model_name,
            mean,
            largest,
            mean / largest if largest else 0.0,
        )
