"""What the parts of a `Layer` share: its core, and the ranks and sources that callers name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from conclave import _conclave, _limits, _runtime
from conclave._devices import traits_of
from conclave._process_groups import communicator_of
from conclave.balance import ExpertSlots
from conclave.checkpoint import Checkpoint, Feed
from conclave.errors import ConclaveTypeError, ConclaveValueError
from conclave.ranks import Communicator
from conclave.spec import ParallelSpec, to_dict

Array = Any  # numpy, torch, or anything with __dlpack__
Ranks = Any  # a Communicator, or a group of torch.distributed

MOST_LAYERS = 2**31 - 1
MOST_BYTES = 2**63 - 1


class LayerBase:
    """A layer of the module, which the parts of `Layer` call."""

    def __init__(self, core: _conclave.Layer) -> None:
        self._core = core
        self._enqueues = traits_of(core.device).enqueues


LayerT = TypeVar("LayerT", bound=LayerBase)


def split_of(
    parallel: ParallelSpec | Mapping[str, Any] | None,
    communicator: Communicator | None,
    tensor_communicator: Communicator | None,
) -> dict[str, Any]:
    """What the caller says, by default the whole of both groups."""
    if parallel is not None:
        return to_dict(parallel, "parallel")
    split: dict[str, Any] = {}
    if communicator is not None:
        split.update(ep_size=communicator.size, ep_rank=communicator.rank)
    if tensor_communicator is not None:
        split.update(tp_size=tensor_communicator.size, tp_rank=tensor_communicator.rank)
    return split


def counted(count: bool | None, context: _conclave.Context) -> bool:
    """Whether a layer counts rows by expert: as the caller says, else where it costs nothing."""
    return traits_of(context.device).counts if count is None else _limits.flag("count", count)


def ranks_of(
    communicator: Ranks | None, tensor_communicator: Ranks | None, device: str | None
) -> tuple[Communicator | None, Communicator | None]:
    """Both groups as communicators that carry the layer's memory: all ranks connect the expert
    group first."""
    place = _runtime.device_name(device)
    experts = communicator_of(communicator, "communicator", place)
    slices = communicator_of(tensor_communicator, "tensor_communicator", place)
    if experts is not None and experts is slices and experts.size > 1:
        raise ConclaveValueError(
            "tensor_communicator: expected other ranks than those of communicator, found the same "
            "group"
        )
    return experts, slices


def required_ranks(ranks: Ranks, argument: str) -> Communicator:
    """A communicator, of a group too."""
    found = communicator_of(ranks, argument)
    if found is None:
        raise ConclaveTypeError(f"{argument}: expected a Communicator or a group, found None")
    return found


def copying(processor_share: float, piece_bytes: int) -> tuple[float, int]:
    """How ranks copy to each other, as checked numbers."""
    return (
        _limits.real("processor_share", processor_share),
        _limits.integer("piece_bytes", piece_bytes, 0, MOST_BYTES),
    )


def slots_of(
    layer: LayerBase, slots: ExpertSlots | ParallelSpec
) -> tuple[int, list[int], list[int]]:
    """The fields of slots, or of a split of the layer's ranks."""
    if isinstance(slots, ExpertSlots):
        return slots._parts()
    num_experts, logical_of, first_of = _conclave.slots_of(
        layer._core.spec()["num_experts"], to_dict(slots, "slots")
    )
    return num_experts, logical_of, first_of


def source_of(
    source: tuple[Checkpoint | Feed, int] | None,
) -> tuple[_conclave.Checkpoint | None, _conclave.Feed | None, int]:
    """The checkpoint or the feed that experts are read from, and the number of the layer."""
    if source is None:
        return None, None, 0
    if not isinstance(source, (tuple, list)) or len(source) != 2:
        raise ConclaveTypeError(
            "source: expected a Checkpoint or a Feed, and the number of a layer, found "
            f"{type(source).__name__}"
        )
    opened, layer = source
    layer = _limits.integer("source[1]", layer, -MOST_LAYERS, MOST_LAYERS)
    if isinstance(opened, Feed):
        return None, opened._core, layer
    if not isinstance(opened, Checkpoint):
        raise ConclaveTypeError(
            f"source[0]: expected a Checkpoint or a Feed, found {type(opened).__name__}"
        )
    return opened._core, None, layer
