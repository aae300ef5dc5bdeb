"""Maps and counts of a balancer's slots, which layers have views of: they are written in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from conclave.errors import ConclaveValueError
from conclave.vllm._expert_moves import Arrived, ExpertMover, KeptBesideParameters
from conclave.vllm.eplb import rebalance_experts
from conclave.vllm.ranked import RankedExperts

if TYPE_CHECKING:
    from conclave.vllm.eplb_state import EplbModelState


def hand_on(state: EplbModelState) -> None:
    """Gives layers their rows of the tensors, and the model all of them where it takes them."""
    views = (
        state.expert_load_pass,
        state.logical_to_physical_map,
        state.logical_replica_count,
    )
    takes = getattr(state.model, "set_eplb_state", None)
    if takes is not None and not isinstance(state.model, RankedExperts):
        takes(*views)
    for index, layer in enumerate(state.layers):
        layer.set_eplb_state(index, *views)


def new_slots(
    rows: torch.Tensor, old: list[int], slots: int, groups: int, nodes: int, ranks: int
) -> list[int]:
    """The expert of each slot for rows [logical], near to the slots of before."""
    before = torch.tensor([old])
    return rebalance_experts(rows[None], slots, groups, nodes, ranks, before)[0][0].tolist()


def put_arrived(
    state: EplbModelState, index: int, old: list[int], new: list[int], arrived: Arrived
) -> None:
    """Writes a layer's rows that have arrived; its maps and counts follow, without a message."""
    layer = state.layers[index]
    ExpertMover.put(arrived, layer.get_expert_weights(), KeptBesideParameters(layer))
    state.experts_moved += arrived.from_others
    reorder_copies_of_all(layer, old, new)
    write_maps(state, index, new)
    # Counts are of slots, which have other experts now.
    recount(state, index, old, new)
    method: Any = layer.quant_method
    method.after_eplb_rearrangement(layer)


def checked_load(name: str, load: Any, state: EplbModelState) -> torch.Tensor:
    """Rows [layers, logical]. Raises ConclaveValueError."""
    found = torch.as_tensor(load)
    if found.shape != state.logical_replica_count.shape:
        raise ConclaveValueError(
            f"{name}: expected {list(state.logical_replica_count.shape)}, found {list(found.shape)}"
        )
    if not torch.isfinite(found.double()).all() or (found < 0).any():
        raise ConclaveValueError(f"{name}: expected finite rows of 0 or more")
    return found


def write_maps(state: EplbModelState, index: int, slots: Sequence[int]) -> None:
    table = torch.full(state.logical_to_physical_map.shape[1:], -1)
    counts = torch.zeros(state.logical_replica_count.shape[1:], dtype=torch.int64)
    for slot, expert in enumerate(slots):
        table[expert, counts[expert]] = slot
        counts[expert] += 1
    state.physical_to_logical_map[index] = torch.tensor(slots)
    state.logical_to_physical_map[index] = table
    state.logical_replica_count[index] = counts


def recount(state: EplbModelState, index: int, old: list[int], new: list[int]) -> None:
    """Rows of a window's slots, given to a slot that the expert has now."""
    first = {expert: slot for slot, expert in reversed(list(enumerate(new)))}
    target = torch.tensor([first[expert] for expert in old], device=state.expert_load_window.device)
    for counts in (state.expert_load_window[:, index], state.expert_load_pass[None, index]):
        before = counts.clone()
        counts.zero_()
        counts.scatter_add_(1, target.expand_as(before), before)


def reorder_copies_of_all(layer: RankedExperts, old: list[int], new: list[int]) -> None:
    """What every rank holds of all slots is put into the new order, without a message, where it
    lies."""
    first = {expert: slot for slot, expert in reversed(list(enumerate(old)))}
    source = [first[expert] for expert in new]
    for parameter in layer.parameters(recurse=False):
        is_of_all = getattr(parameter, "of_all_ranks", False)
        if is_of_all and parameter.shape[0] == len(old) != layer.local_num_experts:
            with torch.no_grad():
                parameter.copy_(parameter[torch.tensor(source, device=parameter.device)])


def copies_in_order(layer: RankedExperts, old: list[int], new: list[int]) -> None:
    """The same where the number of slots changes, in new memory."""
    first = {expert: slot for slot, expert in reversed(list(enumerate(old)))}
    source = torch.tensor([first[expert] for expert in new])
    for parameter in layer.parameters(recurse=False):
        is_of_all = getattr(parameter, "of_all_ranks", False)
        if is_of_all and parameter.shape[0] == len(old) != layer.local_num_experts:
            parameter.data = parameter.data[source.to(parameter.device)].contiguous()
