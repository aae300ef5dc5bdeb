"""Balancing by vLLM's class names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy

from conclave._process_groups import communicator_of
from conclave.errors import ConclaveValueError
from conclave.ranks import Communicator
from conclave.vllm._eplb_mapping import RankMapping
from conclave.vllm._expert_moves import ExpertMover
from conclave.vllm.eplb import EplbLayerState, map_to_physical, rebalance_experts


class DefaultEplbPolicy:
    """DeepSeek's rule."""

    @classmethod
    def rebalance_experts(
        cls,
        weight: Any,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: Any = None,
    ) -> Any:
        """[layers, num_replicas] int64: the expert of each slot, as
        `conclave.vllm.rebalance_experts` gives it first."""
        return rebalance_experts(
            weight, num_replicas, num_groups, num_nodes, num_ranks, old_global_expert_indices
        )[0]

    @classmethod
    def preserve_intragpu_slots(
        cls, phy2log: numpy.ndarray, num_ranks: int, old_phy2log: numpy.ndarray
    ) -> numpy.ndarray:
        """[layers, slots]: the new experts of each rank, those that it had in the slots of before,
        the others in their order in what is left. As it is where slots do not divide by ranks."""
        slots = phy2log.shape[1]
        if num_ranks <= 0 or slots % num_ranks or phy2log.shape != old_phy2log.shape:
            return phy2log
        width = slots // num_ranks
        found = phy2log.copy()
        for layer in range(phy2log.shape[0]):
            for begin in range(0, slots, width):
                rank = slice(begin, begin + width)
                found[layer, rank] = _in_old_slots(phy2log[layer, rank], old_phy2log[layer, rank])
        return found


def _in_old_slots(new: numpy.ndarray, old: numpy.ndarray) -> list[int]:
    arriving = new.tolist()
    kept: list[int | None] = []
    for expert in old.tolist():
        stays = expert in arriving
        if stays:
            arriving.remove(expert)
        kept.append(expert if stays else None)
    return [arriving.pop(0) if expert is None else expert for expert in kept]


def eplb_map_to_physical_and_record(
    topk_ids: Any,
    expert_load_view: Any,
    logical_to_physical_map: Any,
    logical_replica_count: Any,
    record_enabled: Any,
    num_unpadded_tokens: Any = None,
) -> Any:
    """`conclave.vllm.map_to_physical`; num_unpadded_tokens of 0 says that no token is padding."""
    unpadded = None if num_unpadded_tokens is None else [num_unpadded_tokens]
    state = EplbLayerState(
        expert_load_view, logical_to_physical_map, logical_replica_count, record_enabled, unpadded
    )
    return map_to_physical(topk_ids, state)


def rearrange_expert_weights_inplace(
    old_global_expert_indices: Any,
    new_global_expert_indices: Any,
    expert_weights: Sequence[Iterable[Any]],
    ep_group: Any,
    is_profile: bool = False,
    rank_mapping: Any = None,
) -> None:
    """Moves the rows of every layer's tensors [slots of a rank, ...] from their old slots to the
    new ones, on all ranks of a group at the same time.

    Args:
        old_global_expert_indices, new_global_expert_indices: [layers, slots of all ranks] the
            expert of each slot; -1 for one that holds none.
        ep_group: a group of torch.distributed, a Communicator, or what `get_ep_group` has.
        is_profile: nothing moves.
        rank_mapping: the new rank of each old one, where their number changes. Ranks that leave are
            -1, and all of the group are named: new slots are those of the ranks that stay. Where
            ranks have joined, those of before are named alone, and old slots are theirs.

    Raises:
        ConclaveCommError: ranks that are lost, late or disagree. Error: naming the argument.
    """
    old, new = (given.tolist() for given in (old_global_expert_indices, new_global_expert_indices))
    if not len(old) == len(new) == len(expert_weights):
        raise ConclaveValueError(
            f"expert_weights: expected those of {len(old)} layers, found {len(expert_weights)} and "
            f"new slots of {len(new)}"
        )
    if is_profile:
        return
    is_alone = not isinstance(ep_group, Communicator) and ep_group.size() == 1
    communicator = None if is_alone else communicator_of(ep_group, "ep_group")
    mover = ExpertMover(communicator)
    mapping = None
    if rank_mapping is not None:
        mapping = RankMapping.of(rank_mapping, 1 if communicator is None else communicator.size)
    for of_layer, (before, after) in zip(expert_weights, zip(old, new, strict=True), strict=True):
        if mapping is not None:
            before, after = mapping.slots_before(before), mapping.slots_after(after)
        mover.move(before, after, list(of_layer))
