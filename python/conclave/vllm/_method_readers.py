"""From the configuration of each packing method to the parameters of its layers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from conclave.errors import ConclaveUnsupportedError, ConclaveValueError
from conclave.vllm._method_schemes import WORD, MethodScheme, Plane

_E8M0_GROUP, _NVFP4_GROUP = 32, 16


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


def _words_of_columns(name: str, bits: int, turns: bool = False) -> Plane:
    """Codes in words along columns, transposed."""
    return Plane(
        name,
        lambda m: (-(-m.cols * bits // WORD), m.rows),
        torch.int32,
        is_transposed=True,
        turns=turns,
    )


def _scales_of_groups(name: str, group: int, turns: bool = False) -> Plane:
    """A scale of each group of columns, or of whole rows, transposed."""
    return Plane(
        name,
        lambda m: (m.groups(group), m.rows),
        torch.float32,
        "group",
        is_transposed=True,
        turns=turns,
        is_of_rows=group <= 0,
    )


def _order(name: str, is_read: bool = True) -> Plane:
    """The group of each column. vLLM has one for gate and up; files may have two."""
    return Plane(
        name,
        lambda m: (2, m.cols) if m.parts == 2 else (m.cols,),
        torch.int32,
        is_order=True,
        is_read=is_read,
    )


# Methods whose files hold codes in the order of a kernel; "gptq_marlin" and "awq_marlin" name a
# kernel that reorders plain files after they are loaded, and are read as those files are.
KERNEL_ORDERS = {
    "marlin": "marlin",
    "gptq-marlin-24": "marlin's for 2:4 sparse weights",
    "bitblas": "bitblas",
    "gptq-bitblas": "bitblas",
}


def refuse_order(order: str) -> NoReturn:
    """Raises ConclaveUnsupportedError for codes that a kernel's tool has moved about."""
    raise ConclaveUnsupportedError(
        f"quant_config: codes lie in the order of a kernel ({order}), which is not read; load the "
        "checkpoint that it was made of: GPTQ's of checkpoint_format gptq or gptq_v2, AWQ's of "
        "version gemm, or pack-quantized of compressed-tensors"
    )


def _refuse_orders_of_kernels(config: Mapping[str, Any]) -> None:
    layout = str(config.get("checkpoint_format") or "gptq").lower()
    if layout not in ("gptq", "gptq_v2"):
        refuse_order(layout)
    for kernel in ("marlin", "bitblas"):
        if config.get(f"is_{kernel}_format"):
            refuse_order(kernel)


def gptq(config: Mapping[str, Any]) -> MethodScheme:
    """Words along columns, transposed; the group of each column."""
    _refuse_orders_of_kernels(config)
    bits, group = int(config["bits"]), int(config["group_size"])
    ordered = bool(config.get("desc_act"))
    planes = (
        _words_of_columns("qweight", bits),
        _scales_of_groups("scales", group),
        Plane(
            "qzeros",
            lambda m: (m.groups(group), m.words_of_rows(bits)),
            torch.int32,
            "group",
            is_transposed=True,
            is_of_rows=group <= 0,
        ),
        _order("g_idx", is_read=ordered),
    )
    return MethodScheme(planes, _text("gptq", config), group, has_all_groups=ordered)


def awq(config: Mapping[str, Any]) -> MethodScheme:
    """Words along rows, transposed."""
    bits = int(config.get("bits") or config.get("w_bit") or 0)
    group = int(config.get("group_size") or config.get("q_group_size") or 0)
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        refuse_order(f"awq of version {version}")
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
        _words_of_columns("weight_packed", bits, turns=True),
        _scales_of_groups("weight_scale", group, turns=True),
        Plane("weight_shape", lambda m: (2,), torch.int64, is_read=False),
    ]
    if not weights.get("symmetric", True):
        planes.append(
            Plane(
                "weight_zero_point",
                lambda m: (m.words_of_rows(bits), m.groups(group)),
                torch.int32,
                "group",
                is_of_rows=group <= 0,
            )
        )
    ordered = weights.get("actorder") not in (None, False, "weight", "static")
    if ordered:
        planes.append(_order("weight_g_idx"))
    text = _text("compressed-tensors", config)
    return MethodScheme(tuple(planes), text, group, has_all_groups=ordered)


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
        packed = (
            _whole("weight_packed", torch.uint8, 4),
            _scales("weight_scale", torch.uint8, _E8M0_GROUP),
        )
        return MethodScheme(packed, text, _E8M0_GROUP)
    if form == "mxfp8-quantized":
        packed = (
            _whole("weight", torch.float8_e4m3fn),
            _scales("weight_scale", torch.uint8, _E8M0_GROUP),
        )
        return MethodScheme(packed, text, _E8M0_GROUP)
    if kind == "int" and bits == 8:
        return _whole_integers(text, weights, group.get("input_activations"))
    if kind == "float" and bits == 8:
        return None
    if form == "marlin-24":
        refuse_order("marlin's for 2:4 sparse weights")
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
    return MethodScheme((flat,), text, has_all_groups=True, has_aids=True)
