"""Layers whose experts a method of checkpoints packs: the parameters that vLLM has for it, which
the library's reader of the method unpacks when a layer is made."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from conclave.errors import ConclaveUnsupportedError, ConclaveValueError

_WORD = 32
_E8M0_GROUP, _NVFP4_GROUP = 32, 16


class Declared(NamedTuple):
    """A parameter that is to be made."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    attributes: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One of w13 and w2: rows of `parts` matrices above each other."""

    rows: int
    cols: int
    parts: int

    def words_of_rows(self, bits: int) -> int:
        """Words that the rows of a column take, of each part by itself."""
        return self.parts * -(-(self.rows // self.parts) * bits // _WORD)

    def groups(self, size: int) -> int:
        """Groups of columns; one where all columns are a group."""
        return 1 if size <= 0 else -(-self.cols // size)


@dataclasses.dataclass(frozen=True)
class Plane:
    """A parameter of w13 and one of w2."""

    name: str  # behind "w13_" and "w2_", and behind a matrix's name in checkpoints
    shape: Callable[[Matrix], tuple[int, ...]]  # of one expert
    dtype: torch.dtype
    kind: str | None = None  # of scales: tensor, channel, group
    is_transposed: bool = False
    turns: bool = False  # the checkpoint has it by rows
    is_order: bool = False  # of columns: one of gate, one of up
    is_read: bool = True  # by layers
    fed_as: str = ""  # its name for the reader, where it is another

    def attributes(self, matrix: Matrix, is_w2: bool) -> dict[str, Any]:
        """What loaders ask a parameter for."""
        found: dict[str, Any] = {"is_transposed": self.is_transposed}
        if self.kind is not None:
            found["quant_method"] = self.kind
        if self.turns:
            found["turns"] = True
        if is_w2 and self.kind == "group":
            groups = self.shape(matrix)[0 if self.is_transposed else -1]
            found["load_full_w2"] = groups == 1
        return found


@dataclasses.dataclass(frozen=True)
class MethodScheme:
    """The parameters of a method, and what its reader is told."""

    planes: tuple[Plane, ...]
    method: str  # the text of a quantization_config
    group: int = 0  # of columns, which tensor-parallel ranks must not cut
    takes_ranks: bool = True  # whether tensor-parallel ranks may have slices
    is_stacked: bool = False  # tensors of all experts at once, maybe smaller than parameters
    keeps_all_input_scales: bool = False  # of the experts of all ranks
    has_aids: bool = False  # further tensors of a matrix, kept as they come
    combines: bool = False  # a tensor of scales may have those of gate and up

    def check(self, inner: int, tp_size: int) -> None:
        """Raises ConclaveUnsupportedError for slices that the method's planes do not have."""
        if tp_size == 1:
            return
        if not self.takes_ranks:
            raise ConclaveUnsupportedError(
                "quant_config: codes of this order are not cut for tensor-parallel ranks; use "
                "expert-parallel ones"
            )
        if self.group > 0 and inner % self.group:
            raise ConclaveUnsupportedError(
                f"intermediate_size: a rank's {inner} columns are no whole groups of {self.group}"
            )

    def parameters(
        self, experts: int, rows: int, inner: int, hidden: int, dtype: torch.dtype
    ) -> Iterator[Declared]:
        """Those of w13 [rows, hidden] and w2 [hidden, inner]."""
        del dtype
        parts = 2 if rows == 2 * inner else 1
        for plane in self.planes:
            for name, matrix in (
                ("w13", Matrix(rows, hidden, parts)),
                ("w2", Matrix(hidden, inner, 1)),
            ):
                attributes = plane.attributes(matrix, name == "w2")
                if self.has_aids:
                    attributes |= {"use_bitsandbytes_4bit": True, "aids": {}}
                if self.is_stacked:
                    attributes["is_stacked"] = True
                if self.combines and plane.kind == "group" and name == "w13":
                    attributes["may_be_combined"] = True
                shape = (experts, *plane.shape(matrix))
                yield Declared(f"{name}_{plane.name}", shape, plane.dtype, attributes)

    def tensors(
        self, layer: torch.nn.Module, gated: bool, interleaved: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters by the names that the reader knows, gate and up apart."""
        for plane in self.planes:
            if not plane.is_read:
                continue
            joint = getattr(layer, f"w13_{plane.name}")
            alone = getattr(layer, f"w2_{plane.name}")
            halves = _halves(joint, plane, interleaved) if gated else [joint]
            names = ("gate_proj", "up_proj") if gated else ("up_proj",)
            for name, tensor in zip((*names, "down_proj"), (*halves, alone), strict=True):
                fed = tensor.transpose(1, 2) if plane.turns else tensor
                if not self.has_aids:
                    yield f"{name}{plane.fed_as or '.' + plane.name}", fed
                    continue
                for expert in range(fed.shape[0]):
                    yield f"{expert}.{name}.{plane.name}", fed[expert]
        yield from self._aids(layer, "up_proj" if not gated else "gate_proj")

    def _aids(self, layer: torch.nn.Module, first: str) -> Iterator[tuple[str, torch.Tensor]]:
        """What is kept beside codes."""
        names = {"w1": first, "w2": "down_proj", "w3": "up_proj"}
        for parameter in ("w13_weight", "w2_weight") if self.has_aids else ():
            for (expert, shard, suffix), tensor in getattr(layer, parameter).aids.items():
                yield f"{expert}.{names[shard]}.weight.{suffix}", tensor


def _halves(joint: torch.Tensor, plane: Plane, interleaved: bool) -> list[torch.Tensor]:
    if plane.kind == "tensor" and joint.ndim == 1:
        return [joint, joint]
    if plane.is_order:
        return list(joint.unbind(1))
    axis = joint.ndim - 1 if plane.is_transposed or plane.kind == "tensor" else 1
    if interleaved and plane.kind != "tensor":
        return [joint[(slice(None),) * axis + (slice(first, None, 2),)] for first in (0, 1)]
    return list(joint.chunk(2, axis))


def _text(method: str, config: Mapping[str, Any]) -> str:
    return json.dumps({**config, "quant_method": method})


def tensor_scale(name: str, is_read: bool = True) -> Plane:
    """One number of each matrix: of w13 two."""
    return Plane(
        name,
        lambda m: (2,) if m.parts == 2 else (),
        torch.float32,
        "tensor",
        is_read=is_read,
    )


def _whole(name: str, dtype: torch.dtype, bits: int = 8, fed_as: str = "") -> Plane:
    """Codes by rows, packed along columns."""
    return Plane(name, lambda m: (m.rows, -(-m.cols * bits // 8)), dtype, fed_as=fed_as)


def _scales(name: str, dtype: torch.dtype, group: int, fed_as: str = "") -> Plane:
    kind = "group" if group > 0 else "channel"
    return Plane(name, lambda m: (m.rows, m.groups(group)), dtype, kind, fed_as=fed_as)


def _order(name: str, is_read: bool = True) -> Plane:
    """The group of each column. vLLM has one for gate and up; files may have two."""
    return Plane(
        name,
        lambda m: (2, m.cols) if m.parts == 2 else (m.cols,),
        torch.int32,
        is_order=True,
        is_read=is_read,
    )


def gptq(config: Mapping[str, Any]) -> MethodScheme:
    """Words along columns, transposed; the group of each column."""
    bits, group = int(config["bits"]), int(config["group_size"])
    ordered = bool(config.get("desc_act"))
    planes = (
        Plane(
            "qweight",
            lambda m: (-(-m.cols * bits // _WORD), m.rows),
            torch.int32,
            is_transposed=True,
        ),
        Plane(
            "scales",
            lambda m: (m.groups(group), m.rows),
            torch.float32,
            "group",
            is_transposed=True,
        ),
        Plane(
            "qzeros",
            lambda m: (m.groups(group), m.words_of_rows(bits)),
            torch.int32,
            "group",
            is_transposed=True,
        ),
        _order("g_idx", is_read=ordered),
    )
    return MethodScheme(planes, _text("gptq", config), group, takes_ranks=not ordered)


def awq(config: Mapping[str, Any]) -> MethodScheme:
    """Words along rows, transposed."""
    bits = int(config.get("bits") or config.get("w_bit") or 0)
    group = int(config.get("group_size") or config.get("q_group_size") or 0)
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise ConclaveUnsupportedError(f"quant_config: awq of version {version} does not run here")
    planes = (
        Plane("qweight", lambda m: (m.cols, m.words_of_rows(bits)), torch.int32, None, True),
        Plane("scales", lambda m: (m.groups(group), m.rows), torch.float32, "group", True),
        Plane(
            "qzeros", lambda m: (m.groups(group), m.words_of_rows(bits)), torch.int32, "group", True
        ),
    )
    return MethodScheme(planes, _text("awq", config), group)


def _packed_words(config: Mapping[str, Any], weights: Mapping[str, Any]) -> MethodScheme:
    """Integers of compressed-tensors in words; parameters are transposed, as vLLM has them."""
    bits = int(weights["num_bits"])
    group = int(weights.get("group_size") or 0) if weights.get("strategy") == "group" else 0
    planes = [
        Plane(
            "weight_packed",
            lambda m: (-(-m.cols * bits // _WORD), m.rows),
            torch.int32,
            is_transposed=True,
            turns=True,
        ),
        Plane(
            "weight_scale",
            lambda m: (m.groups(group), m.rows),
            torch.float32,
            "group",
            is_transposed=True,
            turns=True,
        ),
        Plane("weight_shape", lambda m: (2,), torch.int64, is_read=False),
    ]
    if not weights.get("symmetric", True):
        planes.append(
            Plane(
                "weight_zero_point",
                lambda m: (m.words_of_rows(bits), m.groups(group)),
                torch.int32,
                "group",
            )
        )
    ordered = weights.get("actorder") not in (None, False, "weight", "static")
    if ordered:
        planes.append(_order("weight_g_idx"))
    text = _text("compressed-tensors", config)
    return MethodScheme(tuple(planes), text, group, takes_ranks=not ordered)


def compressed_tensors(config: Mapping[str, Any], group: Mapping[str, Any]) -> MethodScheme | None:
    """The packed forms of one group of its schemes; None for 8-bit floats, which are not packed."""
    weights, form = group.get("weights") or {}, group.get("format") or config.get("format")
    bits, kind = weights.get("num_bits"), weights.get("type")
    text = _text("compressed-tensors", config)
    if form == "pack-quantized":
        return _packed_words(config, weights)
    if kind == "float" and bits == 4 and form == "nvfp4-pack-quantized":
        planes = (
            _whole("weight_packed", torch.uint8, 4),
            _scales("weight_scale", torch.float8_e4m3fn, _NVFP4_GROUP),
            tensor_scale("weight_global_scale"),
            tensor_scale("input_global_scale", is_read=False),
        )
        return MethodScheme(planes, text, _NVFP4_GROUP)
    if kind == "float" and bits == 4 and form == "mxfp4-pack-quantized":
        planes = (
            _whole("weight_packed", torch.uint8, 4),
            _scales("weight_scale", torch.uint8, _E8M0_GROUP),
        )
        return MethodScheme(planes, text, _E8M0_GROUP)
    if form == "mxfp8-quantized":
        planes = (
            _whole("weight", torch.float8_e4m3fn),
            _scales("weight_scale", torch.uint8, _E8M0_GROUP),
        )
        return MethodScheme(planes, text, _E8M0_GROUP)
    if kind == "int" and bits == 8:
        return _whole_integers(text, weights, group.get("input_activations"))
    if kind == "float" and bits == 8:
        return None
    raise ConclaveUnsupportedError(
        f"config_groups: weights of {bits} bits, type {kind}, format {form}, do not run here"
    )


def _whole_integers(
    text: str, weights: Mapping[str, Any], rows: Mapping[str, Any] | None
) -> MethodScheme:
    strategy = weights.get("strategy")
    planes = [_whole("weight", torch.int8)]
    size = int(weights.get("group_size") or 0) if strategy == "group" else 0
    if strategy == "tensor":
        planes.append(tensor_scale("weight_scale"))
    else:
        planes.append(_scales("weight_scale", torch.float32, size))
    if not weights.get("symmetric", True):
        planes.append(_scales("weight_zero_point", torch.int8, size))
    if rows is not None and not rows.get("dynamic"):
        planes.append(Plane("input_scale", lambda m: (), torch.float32, "tensor"))
    return MethodScheme(tuple(planes), text, size)


def mxfp4(config: Mapping[str, Any]) -> MethodScheme:
    """gpt-oss: tensors of all experts, whose rows are padded or not."""
    planes = (
        _whole("weight", torch.uint8, 4, fed_as="_blocks"),
        _scales("weight_scale", torch.uint8, _E8M0_GROUP, fed_as="_scales"),
    )
    return MethodScheme(planes, _text("mxfp4", config), _E8M0_GROUP, is_stacked=True)


def modelopt(config: Mapping[str, Any], algorithm: str) -> MethodScheme | None:
    """The packed algorithms; None for e4m3 with scales by tensor, channel or block."""
    text = _text("modelopt", config)
    if algorithm in ("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8"):
        planes = (
            _whole("weight", torch.uint8, 4),
            _scales("weight_scale", torch.float8_e4m3fn, _NVFP4_GROUP),
            tensor_scale("weight_scale_2"),
            tensor_scale("input_scale", is_read=False),
        )
        keeps = bool(config.get("use_global_sf"))
        return MethodScheme(planes, text, _NVFP4_GROUP, keeps_all_input_scales=keeps, combines=True)
    if algorithm in ("MXFP8", "W4A8_MXFP4_FP8"):
        codes = (torch.float8_e4m3fn, 8) if algorithm == "MXFP8" else (torch.uint8, 4)
        scales = _scales("weight_scale", torch.uint8, _E8M0_GROUP)
        return MethodScheme((_whole("weight", *codes), scales), text, _E8M0_GROUP, combines=True)
    return None


_QUARK_BITS = {"fp4": 4, "fp6_e2m3": 6, "fp6_e3m2": 6}


def quark(config: Mapping[str, Any]) -> MethodScheme:
    """Floats with exponents as scales; e4m3 by tensor or channel."""
    scheme = config.get("global_quant_config") or {}
    weights, rows = scheme.get("weight") or {}, scheme.get("input_tensors")
    kind, text = str(weights.get("dtype")), _text("quark", config)
    if kind in _QUARK_BITS or (kind == "fp8_e4m3" and weights.get("scale_format") == "e8m0"):
        bits = _QUARK_BITS.get(kind, 8)
        codes = _whole("weight", torch.uint8 if bits < 8 else torch.float8_e4m3fn, bits)
        group = int(weights.get("group_size") or _E8M0_GROUP)
        return MethodScheme((codes, _scales("weight_scale", torch.uint8, group)), text, group)
    if kind != "fp8_e4m3":
        raise ConclaveUnsupportedError(f"quant_config: quark's {kind} does not run here")
    planes = [_whole("weight", torch.float8_e4m3fn)]
    by_row = weights.get("qscheme") == "per_channel"
    planes.append(
        _scales("weight_scale", torch.float32, 0) if by_row else tensor_scale("weight_scale")
    )
    if rows is not None and not rows.get("is_dynamic"):
        planes.append(Plane("input_scale", lambda m: (), torch.float32, "tensor"))
    return MethodScheme(tuple(planes), text)


def bitsandbytes(config: Mapping[str, Any]) -> MethodScheme:
    """Codes that run over the ends of rows, with tensors that say what they mean; int8 by row."""
    text = _text("bitsandbytes", config)
    if config.get("load_in_8bit"):
        planes = (
            _whole("weight", torch.int8),
            Plane("SCB", lambda m: (m.rows,), torch.float32, "channel"),
            dataclasses.replace(tensor_scale("weight_format", is_read=False), dtype=torch.uint8),
        )
        return MethodScheme(planes, text)
    if not config.get("load_in_4bit"):
        raise ConclaveValueError("quant_config: bitsandbytes of neither 4 nor 8 bits")
    if str(config.get("bnb_4bit_quant_storage", "uint8")) != "uint8":
        raise ConclaveUnsupportedError(
            "bnb_4bit_quant_storage: codes are loaded as uint8 here, found "
            f"{config['bnb_4bit_quant_storage']}"
        )
    flat = Plane("weight", lambda m: (-(-m.rows * m.cols // 2), 1), torch.uint8)
    return MethodScheme((flat,), text, takes_ranks=False, has_aids=True)
