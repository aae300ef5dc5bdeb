"""A model's layers on fewer ranks: where experts go, and what layers and counts are afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from conclave.errors import ConclaveUnsupportedError, ConclaveValueError
from conclave.vllm._eplb_mapping import RankMapping
from conclave.vllm._eplb_tables import copies_in_order, hand_on, new_slots, write_maps
from conclave.vllm.parallel import FusedMoEParallelConfig
from conclave.vllm.ranked import RankedExperts

if TYPE_CHECKING:
    from conclave.vllm.eplb_state import EplbModelState

Change = tuple[list[int], list[int]]  # the slots of before, of all ranks, and those of the new ones


def nodes_left(mapping: RankMapping, num_nodes: int) -> int:
    """Nodes of the ranks that stay; 1 where these are not as many on each."""
    if mapping.num_old % num_nodes:
        return 1
    width = mapping.num_old // num_nodes
    stay = [
        sum(1 for new in mapping.new_of[i * width : (i + 1) * width] if new >= 0)
        for i in range(num_nodes)
    ]
    left = [count for count in stay if count]
    return len(left) if len(set(left)) == 1 else 1


def changed_slots(
    state: EplbModelState, load: torch.Tensor, mapping: RankMapping, nodes: int
) -> list[Change]:
    """For each layer. Raises ConclaveValueError where experts have no room, and
    ConclaveUnsupportedError for layers that cannot be of other ranks."""
    for layer in state.layers:
        if layer._groups is not None:
            raise ConclaveUnsupportedError(
                f"rank_mapping: {layer.layer_name!r} was given groups, which have the old ranks; "
                "make layers of the new groups, to which rearrange_expert_weights_inplace moves "
                "the rows"
            )
    experts = state.logical_replica_count.shape[1]
    slots = state.physical_to_logical_map.shape[1] // mapping.num_old * mapping.num_new
    if slots < experts:
        raise ConclaveValueError(
            f"rank_mapping: expected ranks with slots for {experts} experts, found {slots} slots "
            f"on {mapping.num_new} ranks"
        )
    changes = []
    for rows, before in zip(load, state.physical_to_logical_map.tolist(), strict=True):
        counted = rows if rows.any() else torch.ones_like(rows)
        stay = mapping.of_stayers(before)
        new = new_slots(counted, stay, slots, state.num_groups, nodes, mapping.num_new)
        changes.append((before, new))
    return changes


def on_new_ranks(state: EplbModelState, changes: Sequence[Change], ranks: int, rank: int) -> None:
    """Layers whose rows are written become those of `rank` of so many; counts stay with their
    experts."""
    width = len(changes[0][1])
    device = state.physical_to_logical_map.device
    state.physical_to_logical_map = torch.zeros(
        (len(changes), width), dtype=torch.int64, device=device
    )
    window = state.expert_load_window
    state.expert_load_window = window.new_zeros((len(window), len(changes), width))
    state.expert_load_pass = state.expert_load_pass.new_zeros((len(changes), width))
    for index, (layer, (old, new)) in enumerate(zip(state.layers, changes, strict=True)):
        copies_in_order(layer, old, new)
        write_maps(state, index, new)
        first = {expert: slot for slot, expert in reversed(list(enumerate(new)))}
        target = torch.tensor([first[expert] for expert in old], device=device)
        counts = window[:, index]
        state.expert_load_window[:, index].scatter_add_(1, target.expand_as(counts), counts)
        layer.global_num_experts = layer._experts.global_num_experts = width
        layer.update_expert_map(_split_of(layer, ranks, rank))
        method: Any = layer.quant_method
        method.after_eplb_rearrangement(layer)
    hand_on(state)


def _split_of(layer: RankedExperts, ranks: int, rank: int) -> FusedMoEParallelConfig:
    split = layer.moe_parallel_config
    changed: dict[str, Any] = {"ep_size": ranks, "ep_rank": rank}
    if split.dp_size == split.ep_size > 1:  # the ranks are those of dp
        changed |= {"dp_size": ranks, "dp_rank": rank}
    return dataclasses.replace(split, **changed)
