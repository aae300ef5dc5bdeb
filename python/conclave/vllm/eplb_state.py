"""A model's experts that follow their load, by vLLM's names: counts of a window of steps, new slots
by DeepSeek's rule, and the experts' tensors moved to them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch

from conclave import _conclave
from conclave._process_groups import communicator_of
from conclave.errors import ConclaveTypeError, ConclaveUnsupportedError, ConclaveValueError
from conclave.vllm._expert_moves import ExpertMover, KeptBesideParameters
from conclave.vllm.eplb import EPLBConfig, rebalance_experts
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


class EplbState:
    """Counts which experts a model's tokens go to and moves experts between ranks accordingly.

    One on each rank, with the same arguments; calls from one thread, between forwards, on all ranks
    in the same order. Results stay what they were: tokens go to an expert wherever it lies. Experts
    move in `step` and `rearrange`, whatever `use_async` says, and layers pack those that came at
    their next forward.

    Args:
        parallel_config: what has `eplb_config` (`EPLBConfig`), or that itself.
        device: of the counts and maps: by default that of the layers.
        ep_group: the ranks that the experts are spread over: a group of torch.distributed or a
            Communicator; by default that of the layers, then that of `install`.
        num_nodes: of the ranks, which are numbered node by node.

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
        self._given_group, self._num_nodes = ep_group, num_nodes
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
        layers = _layers_of(model)
        if any(state.model is model for state in self.model_states.values()):
            raise ConclaveValueError("model: it was added before")
        self._join(layers[0])
        state = self._first_state(model, model_config, layers)
        load = None if global_expert_load is None else _checked_load(global_expert_load, state)
        hands_on = getattr(model, "set_eplb_state", None)
        views = (
            state.expert_load_pass,
            state.logical_to_physical_map,
            state.logical_replica_count,
        )
        if hands_on is not None and not isinstance(model, RankedExperts):
            hands_on(*views)
        for index, layer in enumerate(layers):
            layer.set_eplb_state(index, *views)
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
            _write_maps(state, index, order)
        return state

    def _join(self, layer: RankedExperts) -> None:
        """Connects the ranks of the first layer."""
        if self._mover is not None:
            return
        size, rank = (layer.ep_size, layer.ep_rank) if layer.use_ep else (1, 0)
        if size > 1:
            given = self._given_group or _group_of(layer)
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
                their new slots, the others the old ones.
        """
        if is_profile:
            self.rearrange(is_profile=True)
            return
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
        if self.expert_rearrangement_step >= self.expert_rearrangement_step_interval:
            self.expert_rearrangement_step = 0
            self.rearrange()

    def rearrange(self, is_profile: bool = False, rank_mapping: Any = None) -> None:
        """Moves experts now, by the rows of the window. Layers without rows stay as they are.

        Args:
            is_profile: nothing moves.
            rank_mapping: other ranks are not possible: it is None.

        Raises:
            ConclaveCommError: as of `step`.
        """
        if rank_mapping is not None:
            raise ConclaveUnsupportedError(
                "rank_mapping: ranks stay those that the layers were made for; make layers of the "
                "new ranks"
            )
        if is_profile:
            return
        for state in self.model_states.values():
            self._rearrange(state, self._window_load(state))

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
        for index, rows in enumerate(load):
            if not rows.any():
                continue
            old = state.physical_to_logical_map[index].tolist()
            new = rebalance_experts(
                rows[None],
                len(old),
                state.num_groups,
                self._num_nodes if ranks % self._num_nodes == 0 else 1,
                ranks,
                torch.tensor([old]),
            )[0][0].tolist()
            if new != old:
                self._move(state, index, old, new)

    def _move(self, state: EplbModelState, index: int, old: list[int], new: list[int]) -> None:
        layer, mover = state.layers[index], self._mover
        assert mover is not None
        kept = KeptBesideParameters(layer)
        state.experts_moved += mover.move(old, new, layer.get_expert_weights(), kept)
        _reorder_copies_of_all(layer, old, new)
        _write_maps(state, index, new)
        # Counts are of slots, which have other experts now.
        _recount(state, index, old, new)
        method: Any = layer.quant_method
        method.after_eplb_rearrangement(layer)

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


def _layers_of(model: Any) -> list[RankedExperts]:
    """The layers that move their experts, in order. Raises ConclaveValueError where they do not go
    together."""
    given = getattr(model, "moe_layers", None)
    if given is not None:
        found = [getattr(layer, "routed_experts", layer) for layer in given]
    elif isinstance(model, torch.nn.Module):
        every = (m for m in model.modules() if isinstance(m, RankedExperts))
        found = [layer for layer in every if layer.enable_eplb]
    else:
        raise ConclaveTypeError(f"model: expected a module, found {type(model).__name__}")
    if not found:
        raise ConclaveValueError("model: expected a layer with enable_eplb, found none")
    for layer in found:
        if not isinstance(layer, RankedExperts):
            raise ConclaveTypeError(
                f"moe_layers: expected layers of conclave.vllm, found {type(layer).__name__}"
            )
        if not layer.enable_eplb:
            raise ConclaveValueError(f"enable_eplb: expected True of {layer.layer_name!r}")
        sizes = [
            (one.logical_num_experts, one.global_num_experts, one.ep_size, one.ep_rank)
            for one in (layer, found[0])
        ]
        if sizes[0] != sizes[1]:
            raise ConclaveValueError(
                f"model: expected (experts, slots, ranks, rank) of {layer.layer_name!r} as of the "
                f"first layer, {sizes[1]}, found {sizes[0]}"
            )
    return found


def _group_of(layer: RankedExperts) -> Any:
    """The layer's own group of all of its ranks, else that of the process."""
    own = layer._groups.whole_group if layer._groups is not None else None
    if own is not None:
        return own
    from conclave.vllm.engine.groups import get_ep_group

    group = get_ep_group()
    return group.device_group if group.world_size > 1 else None


def _checked_load(load: Any, state: EplbModelState) -> torch.Tensor:
    found = torch.as_tensor(load)
    if found.shape != state.logical_replica_count.shape:
        raise ConclaveValueError(
            f"global_expert_load: expected {list(state.logical_replica_count.shape)}, found "
            f"{list(found.shape)}"
        )
    if not torch.isfinite(found.double()).all() or (found < 0).any():
        raise ConclaveValueError("global_expert_load: expected finite rows of 0 or more")
    return found


def _write_maps(state: EplbModelState, index: int, slots: Sequence[int]) -> None:
    table = torch.full(state.logical_to_physical_map.shape[1:], -1)
    counts = torch.zeros(state.logical_replica_count.shape[1:], dtype=torch.int64)
    for slot, expert in enumerate(slots):
        table[expert, counts[expert]] = slot
        counts[expert] += 1
    state.physical_to_logical_map[index] = torch.tensor(slots)
    state.logical_to_physical_map[index] = table
    state.logical_replica_count[index] = counts


def _recount(state: EplbModelState, index: int, old: list[int], new: list[int]) -> None:
    """Rows of a window's slots, given to a slot that the expert has now."""
    first = {expert: slot for slot, expert in reversed(list(enumerate(new)))}
    target = torch.tensor([first[expert] for expert in old], device=state.expert_load_window.device)
    for counts in (state.expert_load_window[:, index], state.expert_load_pass[None, index]):
        before = counts.clone()
        counts.zero_()
        counts.scatter_add_(1, target.expand_as(before), before)


def _reorder_copies_of_all(layer: RankedExperts, old: list[int], new: list[int]) -> None:
    """What every rank holds of all slots is put into the new order, without a message."""
    first = {expert: slot for slot, expert in reversed(list(enumerate(old)))}
    source = [first[expert] for expert in new]
    for parameter in layer.parameters(recurse=False):
        is_of_all = getattr(parameter, "of_all_ranks", False)
        if is_of_all and parameter.shape[0] == len(old) != layer.local_num_experts:
            with torch.no_grad():
                parameter.copy_(parameter[torch.tensor(source, device=parameter.device)])
