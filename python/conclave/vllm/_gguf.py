"""Experts in blocks as GGUF files store them: the parameters that vLLM has for them, how they are
filled, and the layer that the library makes of them.

w13_qweight [E, 2N, row bytes] has rows of gate, then of up, whatever the activation is; rows of a
type that takes fewer bytes than the longest end in zeros. w13_qweight_type [E, 2] and
w2_qweight_type [E] are numbers of ggml's types, -1 where none was loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from conclave._blocks import Blocks, row_bytes, type_name
from conclave.errors import ConclaveUnsupportedError, ConclaveValueError, Error
from conclave.spec import MoeSpec
from conclave.vllm._checks import Sizes
from conclave.vllm._method_schemes import Declared, PackedScheme, biases
from conclave.vllm._packers import BlockExperts, Packer
from conclave.vllm._stacks import own_experts
from conclave.vllm.activation import MoEActivation
from conclave.vllm.weights import Shard

_NO_TYPE = -1
_VALUES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_SHARDS = {"w13": ("w1", "w3"), "w2": ("w2",)}


class _TypeLoader:
    """Fills w13_qweight_type or w2_qweight_type. A stack of all experts comes by the name of one of
    them, and so does its type, before or after it."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, int], int] = {}  # by shard and expert of the whole layer
        self._stacks: dict[str, int] = {}  # by shard, the expert by whose name a stack came

    def load(self, layer: Any, param: torch.Tensor, source: Any, shard: Shard, expert: int) -> bool:
        number = torch.as_tensor(source)
        _check_shard(param, shard)
        if number.numel() != 1:
            raise ConclaveValueError(
                f"{shard.name}: expected one number, found shape {list(number.shape)}"
            )
        type_name(int(number.item()))  # raises for what is no type
        self._said[shard.which, expert] = int(number.item())
        return self._settle(layer, param, shard)

    def take_stack(self, layer: Any, param: torch.Tensor, shard: Shard, expert: int) -> None:
        """Every expert's type is that of the one by whose name the stack came."""
        self._stacks[shard.which] = expert
        self._settle(layer, param, shard)

    def _settle(self, layer: Any, param: torch.Tensor, shard: Shard) -> bool:
        types = types_of(param, shard.which)
        taken = False
        for expert, local in own_experts(layer):
            by_name = self._stacks.get(shard.which, expert)
            number = self._said.get((shard.which, by_name))
            if number is not None:
                types[local] = number
                taken = True
        return taken


class _BlockLoader:
    """Fills w13_qweight or w2_qweight, which is as wide as the longest row that came. Types may
    come later, so that rows are held to them when a layer is made."""

    def __init__(self) -> None:
        self.widths: dict[tuple[str, int], int] = {}  # bytes of a row, by shard and local expert

    def load(
        self, layer: Any, param: torch.nn.Parameter, source: Any, shard: Shard, expert: int
    ) -> bool:
        """An expert's matrix [rows, row bytes], or all experts' by the name of one."""
        _check_shard(param, shard)
        raw = torch.as_tensor(source).detach()
        raw = raw.contiguous().view(torch.uint8) if raw.dtype in _VALUES else raw
        if raw.dtype != torch.uint8 or raw.ndim not in (2, 3):
            raise ConclaveValueError(
                f"{shard.name}: expected bytes [rows, row bytes], found {raw.dtype} "
                f"{list(raw.shape)}"
            )
        if raw.ndim == 2:
            local = layer._map_global_expert_id_to_local_expert_id(expert)
            if local >= 0:
                self.widths[shard.which, local] = _fill(param, local, raw, shard)
            return local >= 0
        if raw.shape[0] not in (layer.logical_num_experts, layer.global_num_experts):
            raise ConclaveValueError(
                f"{shard.name}: {shard.which} expected {layer.logical_num_experts} experts, found "
                f"shape {list(raw.shape)}"
            )
        types = getattr(layer, f"{shard.name.rpartition('.')[2]}_type")
        types.blocks.take_stack(layer, types, shard, expert)
        for index, local in own_experts(layer):
            matrix = raw[index % raw.shape[0]]
            self.widths[shard.which, local] = _fill(param, local, matrix, shard)
        return True


def _check_shard(param: Any, shard: Shard) -> None:
    allowed = param.shards if shard.gated else param.shards[:1]
    if shard.which not in allowed:
        raise ConclaveValueError(
            f"shard_id: {shard.name} expected one of {', '.join(allowed)}, found {shard.which!r}"
        )


def types_of(param: torch.Tensor, which: str) -> torch.Tensor:
    """The numbers [E] of one of w1, w2, w3, as a view."""
    found = param.detach()
    return found if found.ndim == 1 else found[:, 0 if which == "w1" else 1]


def _fill(param: torch.nn.Parameter, local: int, raw: torch.Tensor, shard: Shard) -> int:
    """Takes this rank's part of one matrix: rows of gate and up, columns of down. Returns the bytes
    of its rows."""
    axis = 1 if shard.which == "w2" else 0
    rows = param.shape[1] if shard.which == "w2" or not shard.gated else param.shape[1] // 2
    whole = rows if axis == 1 else rows * shard.tp_size
    if raw.shape[0] != whole or raw.shape[axis] % shard.tp_size:
        raise ConclaveValueError(
            f"{shard.name}: {shard.which} expected {whole} rows of bytes for {shard.tp_size} "
            f"tensor-parallel ranks, found shape {list(raw.shape)}"
        )
    part = raw.chunk(shard.tp_size, axis)[shard.tp_rank]
    width = part.shape[1]
    with torch.no_grad():
        _widen(param, width)
        first = rows if shard.which == "w3" else 0
        target = param[local, first : first + rows]
        target[:, :width] = part
        target[:, width:] = 0
    return width


def _widen(param: torch.nn.Parameter, width: int) -> None:
    if width > param.shape[2]:
        wider = param.data.new_zeros(*param.shape[:2], width)
        wider[:, :, : param.shape[2]] = param.data
        param.data = wider


def _row_bytes(name: str, kind: str, cols: int) -> int:
    try:
        return row_bytes(kind, cols)
    except Error as error:
        raise ConclaveUnsupportedError(
            f"{name}: a rank's {cols} columns are no whole blocks of {kind}: {error}"
        ) from error


class GgufScheme(PackedScheme):
    """Blocks of any types, of each matrix its own."""

    def check(self, inner: int, tp_size: int, activation: MoEActivation) -> None:
        """Types are known when weights come: slices are checked then."""

    def parameters(
        self, experts: int, rows: int, inner: int, hidden: int, dtype: torch.dtype, ranks: int = 1
    ) -> Iterator[Declared]:
        del dtype, ranks
        parts = rows // inner
        for name, height, count in (("w13", rows, parts), ("w2", hidden, 1)):
            given = {"is_gguf_weight": True, "blocks": _BlockLoader(), "shards": _SHARDS[name]}
            yield Declared(f"{name}_qweight", (experts, height, 0), torch.uint8, given)
            types = (experts, count) if count > 1 else (experts,)
            said = {
                "is_gguf_weight_type": True,
                "blocks": _TypeLoader(),
                "shards": _SHARDS[name],
            }
            yield Declared(f"{name}_qweight_type", types, torch.int32, said, _NO_TYPE)

    def packer(self, layer: Any, spec: MoeSpec, sizes: Sizes, device: str) -> Packer:
        return BlockExperts(spec, sizes, lambda: _blocks(layer, sizes), device)

    def rule(self, layer: Any) -> tuple[Any, ...]:
        """The types: which codes a layer has depends on them."""
        named = (layer.w13_qweight_type, layer.w2_qweight_type)
        return ("gguf", *(tuple(types.flatten().tolist()) for types in named))


def _blocks(layer: Any, sizes: Sizes) -> Iterator[Blocks]:
    """Every matrix of the layer as it is now."""
    gated = layer.activation.is_gated
    up = sizes.inner if gated else 0
    matrices = [
        ("up", "w13", "w3" if gated else "w1", slice(up, up + sizes.inner), sizes.hidden),
        ("down", "w2", "w2", slice(0, sizes.hidden), sizes.inner),
    ]
    if gated:
        matrices.append(("gate", "w13", "w1", slice(0, sizes.inner), sizes.hidden))
    for name, param, which, rows, cols in matrices:
        stored = getattr(layer, f"{param}_qweight")
        types = types_of(getattr(layer, f"{param}_qweight_type"), which).tolist()
        for expert, number in enumerate(types):
            if number == _NO_TYPE:
                raise ConclaveValueError(
                    f"{param}_qweight_type: {which} of expert {expert} has none: load it"
                )
            kind = type_name(number)
            width = _row_bytes(f"{param}_qweight", kind, cols)
            found = stored.blocks.widths.get((which, expert), stored.shape[2])
            if width != found:
                raise ConclaveValueError(
                    f"{param}_qweight: {which} of expert {expert} expected {width} bytes for a row "
                    f"of {cols} columns of {kind}, found {found}"
                )
            yield Blocks(name, expert, kind, stored.detach()[expert, rows, :width])
    if layer.has_bias:
        for name, bias in biases(layer, gated, interleaved=False):
            for expert, row in enumerate(bias.detach()):
                yield Blocks(f"{name}_bias", expert, _VALUES[bias.dtype], row[None])
