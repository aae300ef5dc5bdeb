"""How a block is spread over processes, as `tp_plan` of transformers and DTensors say it.

Every process packs its own part of the block, cut from whole tensors by the library, whatever the
plan cut: slices of every expert, or whole experts where the plan spreads these. All ranks of the
mesh have the same tokens and end with the same sums.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from conclave._process_groups import communicator_of
from conclave.errors import ConclaveCommError
from conclave.layer import Layer
from conclave.ranks import Communicator
from conclave.spec import ParallelSpec, to_dict
from conclave.transformers._dealt import DealtLayer
from conclave.transformers._find import Candidate
from conclave.transformers._traits import NotOurs

if TYPE_CHECKING:
    from conclave.transformers._eplb import BlockPlacing


_PHASE = "replacing a block"
_FITS, _NOT_OURS, _FAILED = range(3)


def rank_error(rank: int, phase: str, text: str) -> ConclaveCommError:
    """What a rank learns of another one."""
    error = ConclaveCommError(f"rank {rank}, phase {phase}: {text}")
    error.peer, error.phase = rank, phase
    return error


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether a module holds a part of its weights, and other processes the rest."""
    return any(hasattr(p, "to_local") for p in module.parameters())


class SummedLayer:
    """A layer of some of the experts, whose forward adds up what all ranks have."""

    def __init__(self, layer: Layer, communicator: Communicator) -> None:
        self._layer, self._communicator = layer, communicator
        self._core = layer._core

    def forward(self, rows: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Raises ConclaveCommError for ranks that do not come."""
        part = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
        self._layer.forward(rows, out=part, **arguments)
        total = torch.empty_like(part)
        self._communicator.all_reduce(part.view(-1), total.view(-1), phase="experts of a block")
        return total.to(rows.dtype)


@dataclasses.dataclass(frozen=True)
class Split:
    """A block's ranks, and what each of them holds."""

    communicator: Communicator
    by_expert: bool  # whole experts on each rank; otherwise slices of all of them
    group: Any = None  # of torch.distributed, that the communicator's ranks are
    placing: BlockPlacing | None = None  # of experts that move between ranks

    @property
    def tensor_communicator(self) -> Communicator | None:
        """Whose sums the layer itself makes; None where they are added behind it."""
        return None if self.by_expert else self.communicator

    @property
    def expert_communicator(self) -> Communicator | None:
        """Over which the layer brings rows to experts; None where every rank has all rows."""
        return self.communicator if self.moves_experts else None

    @property
    def moves_experts(self) -> bool:
        """Whether experts may change their rank."""
        return self.by_expert and self.placing is not None

    @property
    def spare_experts(self) -> int:
        """Free places of this rank, for experts on their way."""
        return self.placing.spare_experts if self.placing and self.by_expert else 0

    def parallel(self, num_experts: int) -> dict[str, Any]:
        """The library's word for it."""
        size, rank = self.communicator.size, self.communicator.rank
        if not self.by_expert:
            return to_dict(ParallelSpec(tp_size=size, tp_rank=rank))
        if self.placing is not None:
            return self.placing.parallel(num_experts, size, rank)
        return to_dict(ParallelSpec(ep_size=size, ep_rank=rank, reduce="partial"))

    def over(self, layer: Layer) -> Layer | SummedLayer | DealtLayer:
        """The layer with the result of all ranks, on every rank."""
        if self.moves_experts:
            return DealtLayer(layer, self.communicator)
        return SummedLayer(layer, self.communicator) if self.by_expert else layer

    def require_all(self, reason: str, failure: BaseException | None = None) -> None:
        """Raises NotOurs on every rank where one of them has a reason: they replace a block
        together, or not at all.

        A `failure` is no reason to go on without the block: it is raised here, and on the other
        ranks ConclaveCommError with this one as its `peer`.
        """
        state = _FITS if not reason else _NOT_OURS
        mine = torch.tensor([state if failure is None else _FAILED], dtype=torch.uint8)
        size = self.communicator.size
        states = torch.zeros(size, dtype=torch.uint8)
        try:
            self.communicator.all_gather(mine, states, [1] * size, phase=_PHASE)
        except ConclaveCommError:
            if failure is None:
                raise
        if failure is not None:
            raise failure
        if _FAILED in states:
            rank = states.tolist().index(_FAILED)
            raise rank_error(rank, _PHASE, "an error ended the replacing there")
        if states.any():
            raise NotOurs(reason or "another rank cannot replace the block")


def _group_of(block: torch.nn.Module) -> Any:
    """The ranks that a block's weights are spread over."""
    group, ranks = None, None
    for name, weights in block.named_parameters():
        mesh = getattr(weights, "device_mesh", None)
        if mesh is None:
            continue
        if mesh.ndim != 1:
            raise NotOurs(f"{name} is sharded over a mesh of {mesh.ndim} dimensions, not 1")
        found = torch.distributed.get_process_group_ranks(mesh.get_group())
        if ranks is not None and ranks != found:
            raise NotOurs(f"{name} is sharded over other ranks than the rest of the block")
        group, ranks = mesh.get_group(), found
    return group


def require_no_fsdp(model: torch.nn.Module, path: str) -> None:
    """Raises NotOurs for a module whose weights FSDP spreads: its ranks have tokens of their own,
    and the weights come and go."""
    above = [model, *(model.get_submodule(p) for p in _paths_above(path))]
    if any(hasattr(module, "set_reshard_after_forward") for module in above):
        raise NotOurs("the block is sharded by FSDP, whose ranks have tokens of their own")


def _require_shared_batch(model: torch.nn.Module) -> None:
    """Raises NotOurs where more ranks share the experts than share a batch."""
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    sizes = [getattr(config, name, None) for name in ("tp_size", "ep_size")]
    if sizes[0] is None or sizes[0] != sizes[1]:
        raise NotOurs("the ranks that share the experts do not share a batch")


def _paths_above(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def _spreads_experts(experts: torch.nn.Module) -> bool:
    """Whether stacks of experts are cut by expert."""
    for weights in experts.parameters(recurse=False):
        for placement in getattr(weights, "placements", ()):
            if weights.dim() == 3 and placement.is_shard(0):
                return True
    return False


def spread_of_experts(candidate: Candidate) -> tuple[int, int]:
    """The ranks over which whole experts of a block are spread, and how many experts it has; one
    rank where they are not."""
    if not is_sharded(candidate.block) or not _spreads_experts(candidate.experts):
        return 1, 0
    stacks = (p for p in candidate.experts.parameters(recurse=False) if p.dim() == 3)
    try:
        return int(_group_of(candidate.block).size()), next(stacks).shape[0]
    except NotOurs:
        return 1, 0


def split_of(
    model: torch.nn.Module,
    path: str,
    block: torch.nn.Module,
    experts: torch.nn.Module,
    placing: BlockPlacing | None = None,
) -> Split | None:
    """Of a sharded block; None for one that this process has whole. All ranks call it. `placing`
    says where experts lie that move later.

    Raises NotOurs for a spread that is none of the library's, Error for groups that carry no memory
    of the block's device.
    """
    if not is_sharded(block):
        return None
    require_no_fsdp(model, path)
    by_expert = _spreads_experts(experts)
    if by_expert:
        _require_shared_batch(model)
    group = _group_of(block)
    if next(block.parameters()).device.type != "cpu":
        raise NotOurs("the block is sharded over processes with GPUs")
    communicator = communicator_of(group, "the group of the mesh")
    return Split(communicator, by_expert, group, placing)  # type: ignore[arg-type]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor; for a DTensor all ranks call it."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()
