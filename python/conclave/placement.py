"""Which rank holds which expert: vLLM's functions, with its argument names and meanings."""

from __future__ import annotations

from typing import Any

from conclave import _conclave, _frameworks
from conclave.errors import ConclaveTypeError, ConclaveValueError
from conclave.spec import ParallelSpec, to_dict

Array = Any

_STRATEGIES = ("linear", "round_robin")


def _int32(values: list[int]) -> Array:
    """A torch tensor where torch is loaded, as vLLM has them; else of numpy."""
    torch = _frameworks.torch()
    if torch is not None:
        return torch.tensor(values, dtype=torch.int32)
    import numpy

    return numpy.asarray(values, dtype="int32")


def _split(ep_size: int, ep_rank: int, strategy: str) -> dict[str, Any]:
    if ep_size < 1:
        raise AssertionError(f"ep_size: expected 1 or more, found {ep_size}")
    if not 0 <= ep_rank < ep_size:
        raise ConclaveValueError(f"ep_rank: expected 0 to {ep_size - 1}, found {ep_rank}")
    if strategy not in _STRATEGIES:
        raise ConclaveValueError(
            f"expert_placement_strategy: expected one of {', '.join(_STRATEGIES)}, "
            f"found {strategy!r}"
        )
    return to_dict(ParallelSpec(ep_size=ep_size, ep_rank=ep_rank, placement=strategy))


def determine_expert_map(
    ep_size: int,
    ep_rank: int,
    global_num_experts: int,
    expert_placement_strategy: str = "linear",
    num_fused_shared_experts: int = 0,
    return_expert_mask: bool = False,
) -> tuple[int, Array | None, Array | None]:
    """The experts of a rank.

    Returns:
        The number of local experts; the map [E] int32 from expert to local index, -1 for others'
        (and None with one rank); with return_expert_mask the mask [E + S + 1] int32 of 0 and 1, of
        which the last is the sentinel's, and the map then ends with the S shared experts.

    Raises:
        AssertionError: for ep_size below 1. ConclaveValueError: for an unknown strategy, and a rank
        that is none.
    """
    if ep_size == 1:
        return global_num_experts, None, None
    split = _split(ep_size, ep_rank, expert_placement_strategy)
    shared = num_fused_shared_experts if return_expert_mask else 0
    plain = _conclave.expert_map(global_num_experts, split, 0)
    local = sum(1 for index in plain if index >= 0)
    expert_map = _int32(_conclave.expert_map(global_num_experts, split, shared))
    mask = None
    if return_expert_mask:
        mask = _int32(_conclave.expert_mask(global_num_experts, split, shared))
    return local, expert_map, mask


def determine_expert_placement_strategy(
    expert_placement_strategy: str,
    num_expert_group: int | None = None,
    num_redundant_experts: int = 0,
    enable_eplb: bool = False,
    transport_permits: bool = True,
) -> str:
    """The strategy that can be had: round-robin pays with groups of experts only, and stays in
    place only without replicas and rebalancing. Linear otherwise."""
    strategy, _ = _conclave.placement_strategy(
        expert_placement_strategy,
        num_expert_group or 1,
        num_redundant_experts,
        enable_eplb,
        transport_permits,
    )
    return strategy


def round_robin_routing_tables(
    global_num_experts: int, ep_size: int, ep_rank: int
) -> tuple[Array, Array, Array]:
    """Tables [E] global to physical, [E] physical to global, [local] local to global, int32, for
    transports that address experts by position."""
    split = _split(ep_size, ep_rank, "round_robin")
    tables = _conclave.routing_tables(global_num_experts, split)
    return (
        _int32(tables["position_of_expert"]),
        _int32(tables["expert_at_position"]),
        _int32(tables["expert_of_local"]),
    )


def get_compressed_expert_map(expert_map: Array) -> str:
    """ "0->4, 1->9": local index and expert of every entry but -1, for logs. Raises
    ConclaveTypeError without a map, as one rank has it."""
    if expert_map is None:
        raise ConclaveTypeError("expert_map: expected a map, found None, which one rank has")
    return _conclave.expert_map_text([int(index) for index in expert_map])
