"""The groups of an engine's ranks, as `vllm.distributed` hands them out."""

from __future__ import annotations

from typing import Any

import torch

from conclave.errors import ConclaveRuntimeError, ConclaveTypeError, ConclaveValueError


class GroupCoordinator:
    """Ranks that work together, over a ProcessGroup of torch.distributed; None: one rank."""

    def __init__(self, name: str, group: Any = None) -> None:
        self.unique_name = name
        if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
            raise ConclaveTypeError(
                f"{name}_group: expected a ProcessGroup of torch.distributed, found "
                f"{type(group).__name__}"
            )
        self._group = group
        self.rank_in_group = 0 if group is None else torch.distributed.get_rank(group)
        self.world_size = 1 if group is None else torch.distributed.get_world_size(group)
        ranks = [0] if group is None else torch.distributed.get_process_group_ranks(group)
        self.ranks: list[int] = ranks
        self.rank = ranks[self.rank_in_group]
        self.local_rank = self.rank_in_group

    @property
    def device_group(self) -> Any:
        """The ProcessGroup; of one rank an object that knows its size and rank alone."""
        return _Alone() if self._group is None else self._group

    cpu_group = device_group

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    @property
    def first_rank(self) -> int:
        return self.ranks[0]

    @property
    def last_rank(self) -> int:
        return self.ranks[-1]

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in new memory; with one rank the tensor itself."""
        if self._group is None:
            return input_
        total = input_.clone()
        torch.distributed.all_reduce(total, group=self._group)
        return total

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Tensors of one shape, one after another along dim."""
        if self._group is None:
            return input_
        parts = [torch.empty_like(input_) for _ in self.ranks]
        torch.distributed.all_gather(parts, input_.contiguous(), group=self._group)
        return torch.cat(parts, dim=dim)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """This rank's part, along dim, of the sum over the ranks."""
        if self._group is None:
            return input_
        if input_.shape[dim] % self.world_size != 0:
            raise ConclaveValueError(
                f"input_: expected a multiple of {self.world_size} along axis {dim}, found "
                f"{input_.shape[dim]}"
            )
        part = self.all_reduce(input_).chunk(self.world_size, dim=dim)[self.rank_in_group]
        return part.contiguous()

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        """What rank src of the group has, written to input_."""
        if self._group is not None:
            torch.distributed.broadcast(input_, self.ranks[src], group=self._group)
        return input_

    def barrier(self) -> None:
        """Waits for all ranks of the group."""
        if self._group is not None:
            torch.distributed.barrier(group=self._group)


class _Alone:
    """What code asks a ProcessGroup of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


_AXES = ("tp", "dp", "pcp", "pp", "ep")
_groups = {axis: GroupCoordinator(axis) for axis in _AXES}


def use(given: dict[str, Any]) -> None:
    """Makes these the groups of the process. An ep group of None spans one rank."""
    made = {axis: GroupCoordinator(axis, given.get(axis)) for axis in _AXES}
    ranks = made["tp"].world_size * made["dp"].world_size * made["pcp"].world_size
    if given.get("ep") is not None and made["ep"].world_size != ranks:
        raise ConclaveValueError(
            f"ep_group: expected the {ranks} ranks of tp_group, dp_group and pcp_group, "
            f"found {made['ep'].world_size}"
        )
    _groups.update(made)


def get_tp_group() -> GroupCoordinator:
    return _groups["tp"]


def get_dp_group() -> GroupCoordinator:
    return _groups["dp"]


def get_pcp_group() -> GroupCoordinator:
    return _groups["pcp"]


def get_pp_group() -> GroupCoordinator:
    return _groups["pp"]


def get_ep_group() -> GroupCoordinator:
    return _groups["ep"]


def get_tensor_model_parallel_rank() -> int:
    return get_tp_group().rank_in_group


def get_tensor_model_parallel_world_size() -> int:
    return get_tp_group().world_size


def tensor_model_parallel_all_reduce(input_: torch.Tensor) -> torch.Tensor:
    return get_tp_group().all_reduce(input_)


def tensor_model_parallel_all_gather(input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return get_tp_group().all_gather(input_, dim)


def tensor_model_parallel_reduce_scatter(input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return get_tp_group().reduce_scatter(input_, dim)


def model_parallel_is_initialized() -> bool:
    """Always: groups are those of `install`, from its call on."""
    return True


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1, pipeline_model_parallel_size: int = 1, **sizes: Any
) -> None:
    """Compares the sizes with the groups of `install`, which alone makes groups.

    Raises:
        ConclaveRuntimeError: for another number of ranks than a group has.
    """
    asked = {"tp": tensor_model_parallel_size, "pp": pipeline_model_parallel_size}
    asked["pcp"] = sizes.get("prefill_context_model_parallel_size", 1)
    for axis, size in asked.items():
        if size != _groups[axis].world_size:
            raise ConclaveRuntimeError(
                f"initialize_model_parallel: expected {_groups[axis].world_size} {axis} ranks as "
                f"install was given, found {size}"
            )
