"""From the configuration of each packing method to the parameters of its layers.

Which tensors a method has, their shapes and their types says the library's reader of the method;
here stands what vLLM's parameters have beside that.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch

from conclave import _conclave
from conclave.errors import ConclaveUnsupportedError, ConclaveValueError
from conclave.vllm._method_schemes import Matrix, MethodScheme, Plane

_SAMPLE = 1024  # rows and columns, where sizes do not matter


@functools.lru_cache(maxsize=1024)
def _layout(method: str, matrix: str, rows: int, cols: int) -> dict[str, Any]:
    return _conclave.method_layout(method, matrix, rows, cols)


def _is_number(plane: str, shares: str) -> bool:
    return plane in ("global_scale", "input_scale") or (
        plane in ("scale", "zero") and shares == "tensor"
    )


def tensor_scale(
    name: str, is_read: bool = True, dtype: torch.dtype = torch.float32, of_each: bool = True
) -> Plane:
    """One number of each matrix, of which w13 has two, or one of w13 and one of w2."""
    return Plane(
        name,
        lambda m: (2,) if of_each and m.parts == 2 else (),
        dtype,
        "tensor",
        is_read=is_read,
    )


class _Method:
    """The reader's description of the matrices of a configuration.

    Raises ConclaveUnsupportedError with the reason of what is not read.
    """

    def __init__(self, name: str, config: Mapping[str, Any], matrix: str = ".weight") -> None:
        self.text = json.dumps({**config, "quant_method": name})
        self._matrix = matrix
        self._found = _layout(self.text, matrix, _SAMPLE, _SAMPLE)
        if self._found["reason"]:
            raise ConclaveUnsupportedError(f"quant_config: {self._found['reason']}")
        self.codes: str = self._found["codes"]
        self.shares: str = self._found["weights"]
        self.group: int = self._found["block_cols"] if self.shares == "block" else 0

    def types_of(self, plane: str) -> list[str]:
        """The types in which a plane may be stored; empty if matrices have none."""
        for tensor in self._found["tensors"]:
            if tensor["plane"] == plane and tensor["use"] == "plane":
                return list(tensor["dtypes"])
        return []

    @property
    def in_words(self) -> bool:
        """Whether elements hold several codes, or parts of them."""
        return "int32" in self.types_of("codes")

    @property
    def is_ordered(self) -> bool:
        """Whether columns belong to any groups."""
        return bool(self.types_of("column_order"))

    def planes(self, turns: bool = False) -> Iterator[Plane]:
        """A parameter for each tensor that the reader knows the shape of. turns: codes and scales
        lie transposed in them."""
        for place, tensor in enumerate(self._found["tensors"]):
            if tensor["shape"]:
                yield self._plane(place, tensor, turns and tensor["plane"] in ("codes", "scale"))

    def _plane(self, place: int, tensor: Mapping[str, Any], turns: bool) -> Plane:
        name = tensor["name"].removeprefix(self._matrix.removesuffix("weight"))
        dtype = getattr(torch, tensor["dtypes"][0])
        plane, use = tensor["plane"], tensor["use"]
        if use == "unused":
            return Plane(name, lambda m: tuple(tensor["shape"]), dtype, is_read=False)
        if _is_number(plane, self.shares):
            # The steps of e4m3 rows are one of w13; those of nvfp4 are one of gate and one of up.
            of_each = plane != "input_scale" or bool(self.types_of("global_scale"))
            return tensor_scale(name, dtype=dtype, of_each=of_each)
        if plane == "column_order":
            # vLLM has one for gate and up; files may have two.
            return Plane(
                name,
                lambda m: (2, m.cols) if m.parts == 2 else (m.cols,),
                dtype,
                is_order=True,
                is_read=use == "plane",
            )
        kind = None
        if plane != "codes":
            kind = "channel" if self.shares == "channel" and not self.in_words else "group"
        return Plane(
            name,
            functools.partial(self._shape, place, turns, kind == "group"),
            dtype,
            kind,
            is_transposed=turns or tensor["rows_axis"] == 1,
            turns=turns,
            is_of_rows=kind == "group" and self.shares == "channel",
        )

    def _shape(self, place: int, turns: bool, has_groups: bool, m: Matrix) -> tuple[int, ...]:
        """The shape of a parameter of so many matrices above each other, of which the reader knows
        each by itself. Codes that run over the ends of rows run over those of matrices too."""
        first = self._found["tensors"][place]
        parts = 1 if first["rows_axis"] == first["cols_axis"] else m.parts
        cols = m.cols * m.ranks if has_groups else m.cols
        found = _layout(self.text, self._matrix, m.rows // parts, cols)["tensors"][place]
        shape = list(found["shape"])
        shape[found["rows_axis"]] *= parts
        shape[1:] = [math.prod(shape[1:])] if len(shape) > 1 else []
        return tuple(reversed(shape) if turns else shape)

    def steps_of_plain_rows(self, name: str) -> Iterator[Plane]:
        """The parameter of steps that files have although rows stay as they are."""
        if not self.types_of("input_scale"):
            yield tensor_scale(name, is_read=False)

    def scheme(self, *planes: Plane, **choices: Any) -> MethodScheme:
        """Parameters of these planes; by default of all."""
        return MethodScheme(planes or tuple(self.planes()), self.text, self.group, **choices)


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
    method = _Method("gptq", config)
    return method.scheme(has_all_groups=method.is_ordered)


def awq(config: Mapping[str, Any]) -> MethodScheme:
    """Words along rows, transposed."""
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        refuse_order(f"awq of version {version}")
    return _Method("awq", config).scheme()


def compressed_tensors(config: Mapping[str, Any], group: Mapping[str, Any]) -> MethodScheme | None:
    """The packed forms of one group of its schemes; None for 8-bit floats, which are not packed."""
    weights, form = group.get("weights") or {}, group.get("format") or config.get("format")
    if form == "marlin-24":
        refuse_order("marlin's for 2:4 sparse weights")
    if (weights.get("type"), weights.get("num_bits")) == ("float", 8) and form != "mxfp8-quantized":
        return None
    method = _Method("compressed-tensors", config)
    if method.in_words:
        # vLLM has them transposed.
        return method.scheme(*method.planes(turns=True), has_all_groups=method.is_ordered)
    if method.types_of("global_scale"):
        return method.scheme(*method.planes(), *method.steps_of_plain_rows("input_global_scale"))
    return method.scheme()


def mxfp4(config: Mapping[str, Any]) -> MethodScheme:
    """gpt-oss: tensors of all experts, whose rows are padded or not."""
    method = _Method("mxfp4", config, matrix="experts")
    names = {"_blocks": "weight", "_scales": "weight_scale"}
    planes = (
        dataclasses.replace(plane, name=names[plane.name], fed_as=plane.name)
        for plane in method.planes()
    )
    return method.scheme(*planes, is_stacked=True)


def modelopt(config: Mapping[str, Any]) -> MethodScheme | None:
    """The packed algorithms; None for e4m3 with scales by tensor, channel or block, and for what
    has no parameters."""
    try:
        method = _Method("modelopt", config)
    except ConclaveUnsupportedError:
        return None
    is_packed = method.codes != "float8_e4m3fn" or method.types_of("scale")[0] == "uint8"
    if method.types_of("column_factor") or not is_packed:
        return None
    if not method.types_of("global_scale"):
        return method.scheme(combines=True)
    return method.scheme(
        *method.planes(),
        *method.steps_of_plain_rows("input_scale"),
        keeps_all_input_scales=bool(config.get("use_global_sf")),
        combines=True,
    )


def quark(config: Mapping[str, Any]) -> MethodScheme:
    """Floats with exponents as scales; e4m3 by tensor or channel."""
    method = _Method("quark", config)
    if method.in_words:
        kind = ((config.get("global_quant_config") or {}).get("weight") or {}).get("dtype")
        raise ConclaveUnsupportedError(f"quant_config: quark's {kind} does not run here")
    return method.scheme()


def bitsandbytes(config: Mapping[str, Any]) -> MethodScheme:
    """Codes that run over the ends of rows, with tensors that say what they mean; int8 by row."""
    if not config.get("load_in_8bit") and not config.get("load_in_4bit"):
        raise ConclaveValueError("quant_config: bitsandbytes of neither 4 nor 8 bits")
    method = _Method("bitsandbytes", config)
    if config.get("load_in_8bit"):
        form = tensor_scale("weight_format", is_read=False, dtype=torch.uint8)
        return method.scheme(*method.planes(), form)
    if str(config.get("bnb_4bit_quant_storage", "uint8")) != "uint8":
        raise ConclaveUnsupportedError(
            "bnb_4bit_quant_storage: codes are loaded as uint8 here, found "
            f"{config['bnb_4bit_quant_storage']}"
        )
    # Everything beside codes is kept as it comes.
    codes = next(method.planes())
    scheme = method.scheme(codes, has_all_groups=True, has_aids=True)
    return dataclasses.replace(scheme, group=0)
