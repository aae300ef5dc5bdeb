"""Layers whose experts a method of checkpoints packs: the parameters that vLLM has for it, which
the library's reader of the method unpacks when a layer is made."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from conclave.errors import ConclaveUnsupportedError
from conclave.spec import MoeSpec, ParallelSpec
from conclave.vllm._checks import Sizes
from conclave.vllm._packers import MethodExperts, Packer
from conclave.vllm.activation import MoEActivation
from conclave.vllm.weights import pack_flat, unpack_flat


class Declared(NamedTuple):
    """A parameter that is to be made."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    attributes: dict[str, Any]
    fill: int = 0


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One of w13 and w2: rows of `parts` matrices above each other."""

    rows: int
    cols: int
    parts: int
    ranks: int = 1  # over which columns are cut, where each has the scales of all groups


@dataclasses.dataclass(frozen=True)
class Plane:
    """A parameter of w13 and one of w2."""

    name: str  # behind "w13_" and "w2_", and behind a matrix's name in checkpoints
    shape: Callable[[Matrix], tuple[int, ...]]  # of one expert
    dtype: torch.dtype
    kind: str | None = None  # of scales: tensor, channel, group
    is_transposed: bool = False
    turns: bool = False  # the checkpoint has it by rows
    is_of_rows: bool = False  # scales of whole rows, where the kind is group
    is_of_columns: bool = False  # a number for each: those of gate, those of up
    is_read: bool = True  # by layers
    of_all_ranks: bool = False  # the static steps of rows, of which the largest of all counts
    divides: bool = False  # steps are its inverses
    fed_as: str = ""  # its name for the reader, where it is another
    fill: int = 0  # what stands there before anything is loaded

    def attributes(self, is_w2: bool, ranks: int) -> dict[str, Any]:
        """What loaders ask a parameter for."""
        found: dict[str, Any] = {"is_transposed": self.is_transposed}
        if self.kind is not None:
            found["quant_method"] = self.kind
        if self.turns:
            found["turns"] = True
        if self.of_all_ranks:
            found["of_all_ranks"] = True
        if self.is_of_columns:
            found["is_of_columns"] = True
        if is_w2 and self.kind == "group":
            # Every rank has the numbers of whole rows, or of all groups.
            found["load_full_w2"] = self.is_of_rows or ranks > 1
        return found


class PackedScheme(abc.ABC):
    """Parameters whose bytes the library takes apart when a layer is made."""

    @abc.abstractmethod
    def check(self, inner: int, tp_size: int, activation: MoEActivation) -> None:
        """Raises ConclaveUnsupportedError for slices and orders of rows that the parameters do not
        have."""

    @abc.abstractmethod
    def parameters(
        self, experts: int, rows: int, inner: int, hidden: int, dtype: torch.dtype, ranks: int = 1
    ) -> Iterator[Declared]:
        """Those of w13 [rows, hidden] and w2 [hidden, inner], of one of so many tensor-parallel
        ranks."""

    @abc.abstractmethod
    def packer(self, layer: Any, spec: MoeSpec, sizes: Sizes, device: str) -> Packer:
        """What makes a layer of the parameters that a `FusedMoE` has now."""

    @abc.abstractmethod
    def rule(self, layer: Any) -> tuple[Any, ...]:
        """What a layer depends on beside the parameters' memory."""

    def aids(self, layer: Any) -> dict[str, torch.Tensor]:
        """Tensors beside parameters that a layer is made of."""
        return {}


@dataclasses.dataclass(frozen=True)
class MethodScheme(PackedScheme):
    """The parameters of a method, and what its reader is told."""

    planes: tuple[Plane, ...]
    method: str  # the text of a quantization_config
    modules: tuple[str, ...] = ()  # what its rules for modules call the experts
    group: int = 0  # of columns, which tensor-parallel ranks must not cut
    # Columns of a slice belong to any groups, so that each tensor-parallel rank has all groups.
    has_all_groups: bool = False
    is_stacked: bool = False  # tensors of all experts at once, maybe smaller than parameters
    has_aids: bool = False  # further tensors of a matrix, kept as they come
    combines: bool = False  # a tensor of scales may have those of gate and up
    mixes_rows: bool = False  # elements hold codes, or zero points, of several rows

    def check(self, inner: int, tp_size: int, activation: MoEActivation) -> None:
        if activation.is_interleaved and self.mixes_rows:
            raise ConclaveUnsupportedError(
                f"activation: rows of gate and up alternate in {activation.value}, and elements "
                "with codes of several rows cannot be told apart so"
            )
        if tp_size == 1 or self.has_all_groups:
            return
        if self.group > 0 and inner % self.group:
            raise ConclaveUnsupportedError(
                f"intermediate_size: a rank's {inner} columns are no whole groups of {self.group}"
            )

    def parameters(
        self, experts: int, rows: int, inner: int, hidden: int, dtype: torch.dtype, ranks: int = 1
    ) -> Iterator[Declared]:
        del dtype
        parts = 2 if rows == 2 * inner else 1
        ranks = ranks if self.has_all_groups else 1
        if self.has_aids and ranks > 1 and inner * hidden % 2:
            raise ConclaveUnsupportedError(
                f"intermediate_size: a rank's {inner} rows of {hidden} codes end within a byte"
            )
        for plane in self.planes:
            for name, matrix in (
                ("w13", Matrix(rows, hidden, parts)),
                ("w2", Matrix(hidden, inner, 1, ranks)),
            ):
                attributes = plane.attributes(name == "w2", ranks)
                if self.has_aids:
                    attributes |= {"use_bitsandbytes_4bit": True, "aids": {}}
                    if name == "w2" and ranks > 1:
                        attributes["flat_cols"] = inner * ranks
                if self.is_stacked:
                    attributes["is_stacked"] = True
                if self.combines and plane.kind == "group" and name == "w13":
                    attributes["may_be_combined"] = True
                shape = (experts, *plane.shape(matrix))
                yield Declared(f"{name}_{plane.name}", shape, plane.dtype, attributes, plane.fill)

    def packer(self, layer: Any, spec: MoeSpec, sizes: Sizes, device: str) -> Packer:
        kind: MoEActivation = layer.activation

        def tensors() -> dict[str, torch.Tensor]:
            found = dict(self.tensors(layer, kind.is_gated, kind.is_interleaved))
            if layer.has_bias:
                separator = "_" if self.is_stacked else "."
                for name, bias in biases(layer, kind.is_gated, kind.is_interleaved):
                    whole = bias if name == "down" else bias.repeat(1, self._ranks(layer))
                    found[f"{name}_proj{separator}bias"] = whole
            return found

        ranks, parallel = self._ranks(layer), None
        if ranks > 1:
            sizes = sizes._replace(inner=sizes.inner * ranks)
            parallel = ParallelSpec(tp_size=ranks, tp_rank=layer.tp_rank, reduce="partial")
        return MethodExperts(
            spec, sizes, self.method, tensors, device, parallel=parallel, modules=self.modules
        )

    def rule(self, layer: Any) -> tuple[Any, ...]:
        return (self.method, self.modules, layer.tp_rank, self._ranks(layer))

    def _ranks(self, layer: Any) -> int:
        """Ranks of which the library cuts out this one's part, where it reads tensors as whole."""
        return layer.tp_size if self.has_all_groups else 1

    def aids(self, layer: Any) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name in ("w13_weight", "w2_weight") if self.has_aids else ():
            kept = getattr(layer, name).aids
            found |= {f"{name}.{key}": tensor for key, tensor in kept.items()}
        return found

    def tensors(
        self, layer: torch.nn.Module, gated: bool, interleaved: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters by the names that the reader knows, gate and up apart."""
        for plane in self.planes:
            if not plane.is_read:
                continue
            joint = getattr(layer, f"w13_{plane.name}")
            alone = getattr(layer, f"w2_{plane.name}")
            if plane.of_all_ranks:
                joint, alone = (largest_step(t, plane.divides, layer) for t in (joint, alone))
            halves = _halves(joint, plane, interleaved) if gated else [joint]
            names = ("gate_proj", "up_proj") if gated else ("up_proj",)
            for name, tensor in zip((*names, "down_proj"), (*halves, alone), strict=True):
                whole = self._widened(tensor, plane, name == "down_proj", layer)
                fed = whole.transpose(1, 2) if plane.turns else whole
                if not self.has_aids:
                    yield f"{name}{plane.fed_as or '.' + plane.name}", fed
                    continue
                for expert in range(fed.shape[0]):
                    yield f"{expert}.{name}.{plane.name}", fed[expert]
        yield from self._fed_aids(layer, "up_proj" if not gated else "gate_proj")

    def _widened(
        self, tensor: torch.Tensor, plane: Plane, is_down: bool, layer: Any
    ) -> torch.Tensor:
        """A tensor of all ranks' size. What is other ranks' is not used, but checked: it repeats
        this rank's."""
        ranks = self._ranks(layer)
        if (
            ranks == 1
            or (is_down and plane.kind is not None)
            or (plane.is_of_columns and not is_down)
        ):
            return tensor
        if is_down and self.has_aids:
            codes = unpack_flat(tensor, tensor.shape[0] * layer.hidden_size)
            return pack_flat(codes.repeat(1, ranks).reshape(tensor.shape[0], -1)).unsqueeze(2)
        axis = 1
        if tensor.ndim == 3 and not self.has_aids:
            axis = 1 if plane.is_transposed == is_down else 2
        return torch.cat([tensor] * ranks, axis)

    def _fed_aids(self, layer: torch.nn.Module, first: str) -> Iterator[tuple[str, torch.Tensor]]:
        """What is kept beside codes."""
        names = {"w1": first, "w2": "down_proj", "w3": "up_proj"}
        for parameter in ("w13_weight", "w2_weight") if self.has_aids else ():
            for (expert, shard, suffix), tensor in getattr(layer, parameter).aids.items():
                yield f"{expert}.{names[shard]}.weight.{suffix}", tensor


def largest_step(steps: torch.Tensor, divides: bool, layer: Any) -> torch.Tensor:
    """The steps of this rank's experts: for each the largest of all ranks', so that rows are those
    of a layer on one rank. Steps of experts elsewhere that were not loaded, which are 0, do not
    count; one of an expert that is here stays, for the reader to refuse."""
    local = layer.local_num_experts
    if steps.shape[0] == local:
        return steps
    own = steps[layer.expert_map >= 0]
    if (own == 0).any():
        return own
    loaded = steps[steps != 0]
    largest = loaded.amin() if divides else loaded.amax()
    return largest.expand(local, *steps.shape[1:]).contiguous()


def biases(layer: Any, gated: bool, interleaved: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of gate, up and down [E, rows]. Of several tensor-parallel ranks the first adds that of
    down."""
    joint = layer.w13_bias
    halves: list[torch.Tensor]
    if not gated:
        halves = [joint]
    elif interleaved:
        halves = [joint[:, ::2], joint[:, 1::2]]
    else:
        halves = list(joint.chunk(2, 1))
    down = layer.w2_bias if layer.tp_rank == 0 else torch.zeros_like(layer.w2_bias)
    names = ("gate", "up", "down") if gated else ("up", "down")
    yield from zip(names, (*halves, down), strict=True)


def _halves(joint: torch.Tensor, plane: Plane, interleaved: bool) -> list[torch.Tensor]:
    if plane.kind == "tensor" and joint.ndim == 1:
        return [joint, joint]
    if plane.is_of_columns:
        return list(joint.unbind(1))
    axis = joint.ndim - 1 if plane.is_transposed or plane.kind == "tensor" else 1
    if interleaved and plane.kind != "tensor":
        return [joint[(slice(None),) * axis + (slice(first, None, 2),)] for first in (0, 1)]
    return list(joint.chunk(2, axis))
