"""Which split a layer has, from an engine's groups and sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from conclave import _conclave
from conclave._process_groups import communicator_of
from conclave.errors import ConclaveValueError
from conclave.vllm.parallel import FusedMoEParallelConfig

AXES = ("tp", "pcp", "dp", "ep")  # in the order in which all ranks connect


def split_of(
    config: FusedMoEParallelConfig | None,
    groups: dict[str, Any],
    sizes: dict[str, int | None],
    is_sequence_parallel: bool,
) -> FusedMoEParallelConfig:
    """The configuration that is given, else what the groups say, by axis, else one rank. Raises
    where a size, by the argument's name, or is_sequence_parallel says something else."""
    if config is None:
        config = _split_of_groups(groups, is_sequence_parallel)
        if config is None:
            return _one_rank(sizes, is_sequence_parallel)
    # A layer keeps what it was made for, whatever is assigned to the caller's object later.
    config.check()
    config = dataclasses.replace(config)
    for axis, group in groups.items():
        size = sizes.get(f"{axis}_size")
        if size is None or group is None:
            continue
        found = place_of(group, axis)[0]
        if size != found:
            raise ConclaveValueError(
                f"{axis}_size: expected {found}, as {axis}_group has, found {size}"
            )
    if config.is_sequence_parallel != is_sequence_parallel:
        raise ConclaveValueError(
            f"is_sequence_parallel: expected as in moe_parallel_config, found "
            f"{is_sequence_parallel}"
        )
    return config


def _split_of_groups(
    given: dict[str, Any], is_sequence_parallel: bool
) -> FusedMoEParallelConfig | None:
    """The split that the groups themselves say; None without any. ep_group means that experts are
    split over the ranks of all groups, and alone it is the tensor-parallel group too."""
    groups = {axis: place_of(given[axis], axis) for axis in AXES if given[axis] is not None}
    if not groups:
        return None
    if groups.keys() == {"ep"}:
        groups["tp"] = groups["ep"]
    sizes = {axis: groups.get(axis, (1, 0)) for axis in ("tp", "pcp", "dp")}
    return FusedMoEParallelConfig.make(
        tp_size_=sizes["tp"][0],
        tp_rank=sizes["tp"][1],
        pcp_size_=sizes["pcp"][0],
        pcp_rank=sizes["pcp"][1],
        dp_size_=sizes["dp"][0],
        dp_rank=sizes["dp"][1],
        sp_size_=sizes["tp"][0] if is_sequence_parallel else 1,
        enable_expert_parallel="ep" in groups,
    )


def place_of(given: Any, axis: str) -> tuple[int, int]:
    """Size and this process' rank, of a communicator or of any group of torch.distributed."""
    if isinstance(given, _conclave.Communicator):
        return given.size, given.rank
    group = getattr(given, "cpu_group", given)
    if not isinstance(group, torch.distributed.ProcessGroup):
        communicator_of(given, f"{axis}_group")  # says what it is instead
    return group.size(), group.rank()


def _one_rank(sizes: dict[str, int | None], sequence: bool) -> FusedMoEParallelConfig:
    if (ranks := sizes.get("tp_size") or 1) > 1 and ranks == _default_group_size():
        if all(size in (None, 1) for name, size in sizes.items() if name != "tp_size"):
            return FusedMoEParallelConfig.make(
                tp_size_=ranks,
                tp_rank=torch.distributed.get_rank(),
                sp_size_=ranks if sequence else 1,
            )
    for name, size in sizes.items():
        if size not in (None, 1):
            raise ConclaveValueError(
                f"{name}: for {size} ranks give {name.removesuffix('_size')}_group, or "
                "moe_parallel_config, which knows this rank (FusedMoEParallelConfig.make)"
            )
    if sequence:
        raise ConclaveValueError("is_sequence_parallel: give moe_parallel_config with sp_size")
    return FusedMoEParallelConfig()


def _default_group_size() -> int:
    """Ranks of torch.distributed's default group; 0 without one."""
    dist = torch.distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
