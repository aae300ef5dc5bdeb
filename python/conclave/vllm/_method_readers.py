"""From a configuration of quantised weights to what the library's reader of the method says of it,
and on to the parameters of packed experts.

Which tensors a method has, their shapes and types, what shares a scale and how rows are quantised
says that reader; here stands what vLLM's parameters have beside that.
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
from conclave.errors import ConclaveUnsupportedError
from conclave.vllm._method_schemes import Matrix, MethodScheme, Plane
from conclave.vllm.quant import FP8

_SAMPLE = 1024  # rows and columns, where sizes do not matter


@functools.lru_cache(maxsize=1024)
def _layout(
    method: str, matrix: str, rows: int, cols: int, modules: tuple[str, ...] = ()
) -> dict[str, Any]:
    return _conclave.method_layout(method, matrix, rows, cols, list(modules))


def _is_number(plane: str, shares: str) -> bool:
    return plane in ("global_scale", "input_scale") or (
        plane in ("scale", "zero") and shares == "tensor"
    )


def tensor_scale(
    name: str,
    is_read: bool = True,
    dtype: torch.dtype = torch.float32,
    of_each: bool = True,
    of_all_ranks: bool = False,
) -> Plane:
    """One number of each matrix, of which w13 has two, or one of w13 and one of w2."""
    return Plane(
        name,
        lambda m: (2,) if of_each and m.parts == 2 else (),
        dtype,
        "tensor",
        is_read=is_read,
        of_all_ranks=of_all_ranks,
        divides=name.endswith("_global_scale"),
    )


def _in_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


def as_text(config: Mapping[str, Any]) -> str:
    """A configuration as config.json has it, where torch's types and others stand by their
    names."""
    return json.dumps(config, default=_in_json, skipkeys=True)


def kept_modules(config: Mapping[str, Any]) -> list[str]:
    """The modules that a configuration leaves as they are, as it names them."""
    return _conclave.kept_modules(as_text(config))


def kernel_order(name: str) -> str:
    """The kernel in whose order files of a method hold codes; empty for other methods."""
    text = as_text({"quant_method": name.replace("-", "_")})
    return _layout(text, ".weight", _SAMPLE, _SAMPLE)["kernel_order"]


class Method:
    """The reader's description of the matrices of a configuration, or, with modules, of what its
    rules say of these.

    Raises ConclaveUnsupportedError with the reason of what is not read, and the reader's Error,
    which names the value, for what no such method writes.
    """

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any],
        modules: tuple[str, ...] = (),
        matrix: str = ".weight",
    ) -> None:
        self.text = as_text({**config, "quant_method": name})
        self.modules = modules
        self._matrix = matrix
        self._found = _layout(self.text, matrix, _SAMPLE, _SAMPLE, modules)
        refuse_unread(name, self._found)
        if self._found["has_module_schemes"]:
            raise ConclaveUnsupportedError(
                f"prefix: expected the layer's name, since {name} has rules for modules here, "
                "found ''"
            )
        self.codes: str = self._found["codes"]
        self.shares: str = self._found["weights"]
        self.group: int = self._found["block_cols"] if self.shares == "block" else 0
        self.rows: str = self._found["activations"]  # none, tensor_static, token, group
        self.row_group: int = self._found["activation_group"] if self.rows == "group" else 0
        self.row_scales_are_powers: bool = self._found["power_of_two_scales"]

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale, where weights have blocks."""
        return self._found["block_rows"], self._found["block_cols"]

    def types_of(self, plane: str) -> list[str]:
        """The types in which a plane may be stored; empty if matrices have none."""
        for tensor in self._found["tensors"]:
            if tensor["plane"] == plane and tensor["use"] == "plane":
                return list(tensor["dtypes"])
        return []

    def parameter_of(self, plane: str) -> str:
        """What a parameter of a plane is called behind "w13_" and "w2_"."""
        for tensor in self._found["tensors"]:
            if tensor["plane"] == plane and tensor["use"] == "plane":
                return self._own_name(tensor)
        raise KeyError(plane)

    def _own_name(self, tensor: Mapping[str, Any]) -> str:
        return tensor["name"].removeprefix(self._matrix.removesuffix("weight"))

    @property
    def is_plain_e4m3(self) -> bool:
        """Whether codes of e4m3 lie under the names of plain matrices, with scales that are no
        bytes."""
        others = ("global_scale", "column_order", "column_factor", "zero")
        if self.codes != FP8 or any(map(self.types_of, others)):
            return False
        return self.types_of("codes") == [FP8] and self.types_of("scale")[0] != "uint8"

    @property
    def lies_by_rows(self) -> bool:
        """Whether codes of a row of a matrix follow each other, and are not transposed."""
        return self._found["tensors"][0]["rows_axis"] == 0

    @property
    def in_words(self) -> bool:
        """Whether elements hold several codes, or parts of them."""
        return "int32" in self.types_of("codes")

    @property
    def has_integers(self) -> bool:
        """Whether codes are those of whole numbers, by the reader's word for them."""
        return self.codes in ("int4", "int8")

    @property
    def mixes_rows(self) -> bool:
        """Whether elements of codes, or of zero points that are read, belong to several rows."""
        for tensor in self._found["tensors"]:
            packed = tensor["plane"] == "codes" or (tensor["plane"] == "zero" and self.in_words)
            if tensor["use"] != "plane" or not packed or tensor["rows_axis"] < 0:
                continue
            if tensor["rows_axis"] == tensor["cols_axis"]:
                return True  # a line of codes without rows
            if tensor["shape"][tensor["rows_axis"]] < _SAMPLE:
                return True
        return False

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
        name = self._own_name(tensor)
        dtype = getattr(torch, tensor["dtypes"][0])
        plane, use = tensor["plane"], tensor["use"]
        if use == "unused":
            return Plane(name, lambda m: tuple(tensor["shape"]), dtype, is_read=False)
        if _is_number(plane, self.shares):
            # The steps of e4m3 rows are one of w13; those of nvfp4 are one of gate and one of up.
            of_rows = plane == "input_scale"
            of_each = not of_rows or bool(self.types_of("global_scale"))
            return tensor_scale(name, dtype=dtype, of_each=of_each, of_all_ranks=of_rows)
        if plane in ("column_order", "column_factor"):
            # vLLM has one order for gate and up; files may have two.
            return Plane(
                name,
                lambda m: (2, m.cols) if m.parts == 2 else (m.cols,),
                dtype,
                is_of_columns=True,
                fill=1 if plane == "column_factor" else 0,
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
        size = (m.rows // parts, cols)
        found = _layout(self.text, self._matrix, *size, self.modules)["tensors"][place]
        shape = list(found["shape"])
        shape[found["rows_axis"]] *= parts
        shape[1:] = [math.prod(shape[1:])] if len(shape) > 1 else []
        return tuple(reversed(shape) if turns else shape)

    def steps_of_plain_rows(self, name: str) -> Iterator[Plane]:
        """The parameter of steps that files have although rows stay as they are."""
        if not self.types_of("input_scale"):
            yield tensor_scale(name, is_read=False, of_all_ranks=True)

    def scheme(self, *planes: Plane, **choices: Any) -> MethodScheme:
        """Parameters of these planes; by default of all."""
        planes = planes or tuple(self.planes())
        return MethodScheme(
            planes, self.text, self.modules, self.group, mixes_rows=self.mixes_rows, **choices
        )


def refuse_unread(name: str, found: Mapping[str, Any]) -> None:
    """Raises ConclaveUnsupportedError with the reason why a layout is not read, if there is one."""
    if found["kernel_order"]:
        refuse_order(found["kernel_order"])
    if found["reason"]:
        raise ConclaveUnsupportedError(f"quant_config: {name} does not run here: {found['reason']}")


def refuse_order(order: str) -> NoReturn:
    """Raises ConclaveUnsupportedError for codes that a kernel's tool has moved about."""
    raise ConclaveUnsupportedError(
        f"quant_config: codes lie in the order of a kernel ({order}), which is not read; load the "
        "checkpoint that it was made of: GPTQ's of checkpoint_format gptq or gptq_v2, AWQ's of "
        "version gemm, or pack-quantized of compressed-tensors"
    )


def gptq(config: Mapping[str, Any], modules: tuple[str, ...] = ()) -> MethodScheme:
    """Words along columns, transposed; the group of each column."""
    method = Method("gptq", config, modules)
    return method.scheme(has_all_groups=method.is_ordered)


def awq(config: Mapping[str, Any], modules: tuple[str, ...] = ()) -> MethodScheme:
    """Words along rows, transposed."""
    method = Method("awq", config, modules)
    if method.lies_by_rows:
        refuse_order("awq of version gemv")
    return method.scheme()


def compressed_tensors(method: Method) -> MethodScheme:
    """The packed forms of one group of its schemes."""
    if method.in_words:
        # vLLM has them transposed.
        return method.scheme(*method.planes(turns=True), has_all_groups=method.is_ordered)
    if method.types_of("global_scale"):
        return method.scheme(*method.planes(), *method.steps_of_plain_rows("input_global_scale"))
    return method.scheme()


def mxfp4(config: Mapping[str, Any], modules: tuple[str, ...] = ()) -> MethodScheme:
    """gpt-oss: tensors of all experts, whose rows are padded or not."""
    method = Method("mxfp4", config, modules, matrix="experts")
    names = {"_blocks": "weight", "_scales": "weight_scale"}
    planes = (
        dataclasses.replace(plane, name=names[plane.name], fed_as=plane.name)
        for plane in method.planes()
    )
    return method.scheme(*planes, is_stacked=True)


def modelopt(method: Method) -> MethodScheme:
    """The packed algorithms."""
    planes = [*method.planes()]
    if method.types_of("global_scale"):
        planes += method.steps_of_plain_rows("input_scale")
    elif method.types_of("column_factor") and method.rows == "tensor_static":
        # Codes were rounded by it, so that it cancels out.
        planes.append(tensor_scale("weight_scale_2", is_read=False))
    return method.scheme(*planes, combines=True)


def quark(config: Mapping[str, Any], modules: tuple[str, ...] = ()) -> MethodScheme:
    """Floats with exponents as scales; e4m3 by tensor or channel; integers, with zero points also
    where they are symmetric."""
    method = Method("quark", config, modules)
    if not method.has_integers or method.rows != "tensor_static":
        return method.scheme()
    zero = tensor_scale("input_zero_point", is_read=False, dtype=torch.int8, of_each=False)
    return method.scheme(*method.planes(), zero)


def bitsandbytes(config: Mapping[str, Any], modules: tuple[str, ...] = ()) -> MethodScheme:
    """Codes that run over the ends of rows, with tensors that say what they mean; int8 by row."""
    method = Method("bitsandbytes", config, modules)
    if method.shares == "channel":
        form = tensor_scale("weight_format", is_read=False, dtype=torch.uint8)
        return method.scheme(*method.planes(), form)
    if str(config.get("bnb_4bit_quant_storage") or "uint8") != "uint8":
        raise ConclaveUnsupportedError(
            "bnb_4bit_quant_storage: codes are loaded as uint8 here, found "
            f"{config['bnb_4bit_quant_storage']}"
        )
    # Everything beside codes is kept as it comes.
    codes = next(method.planes())
    scheme = method.scheme(codes, has_all_groups=True, has_aids=True)
    return dataclasses.replace(scheme, group=0)
