"""The types of weights that vLLM's configurations name: what arrays of theirs hold, and how the
library's layers read them."""

from __future__ import annotations

import dataclasses
from typing import Any

from conclave import _frameworks
from conclave.errors import ConclaveTypeError, ConclaveUnsupportedError, ConclaveValueError
from conclave.vllm.quant import FP8, FusedMoEQuantConfig, dtype_text

PLAIN = ("float32", "float16", "bfloat16")
_FLOATS = PLAIN
_EXPONENTS = ("uint8", "float8_e8m0fnu")
_E2M1 = "float4_e2m1fn_x2"

# Rows in groups of columns, as vLLM's kernels make their codes: fields of `QuantSpec`.
ROWS_IN_GROUPS: dict[str, dict[str, Any]] = {
    "mxfp4": {"activation_dtype": _E2M1, "activation_scale_rule": "even_power"},
    "mxfp6_e3m2": {"activation_dtype": "float6_e3m2", "activation_scale_rule": "even_power"},
    "mxfp6_e2m3": {"activation_dtype": "float6_e2m3", "activation_scale_rule": "even_power"},
    "mxfp8": {"power_of_two_scales": True},
    "nvfp4": {
        "activation_dtype": _E2M1,
        "activation_scale_rule": "two_level",
        "activation_group": 16,
    },
}
# Those that Quark, whose reader unpacks codes of 6 bits, makes too, by its names.
QUARKS_ROWS = {"mxfp4": "fp4", "mxfp6_e3m2": "fp6_e3m2", "mxfp6_e2m3": "fp6_e2m3"}


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """One type of weights."""

    codes: str  # the library's name of the type
    types: tuple[str, ...]  # of arrays that hold codes, packed along columns
    bits: int = 8  # of a stored code
    scales: tuple[str, ...] = _FLOATS  # types of the arrays of scales
    group: int = 0  # columns that share a scale; 0: the configuration says what does
    middle: int = 0  # unsigned codes, and zero points, stand for themselves less this number
    needs_alphas: bool = False  # each matrix has one more scale
    rows: tuple[str, ...] = ()  # types that layers quantise rows to beside these weights
    usual_rows: str = FP8  # that a rule of rows means without a name
    plain_rows: tuple[str, ...] = ()  # types of a scheme's rows that layers leave as they are
    method: str = ""  # of checkpoints, whose reader unpacks what arrays of a layer do not hold

    def columns(self, array: Any, argument: str) -> int:
        """Columns of the matrices [E, rows, columns] in an array."""
        width = {"int32": 32, "uint32": 32}.get(_frameworks.dtype_name(array), 8)
        stored = int(array.shape[-1]) * width
        if stored % self.bits:
            raise ConclaveValueError(
                f"{argument}: expected rows of whole codes of {self.bits} bits, found "
                f"{int(array.shape[-1])} bytes"
            )
        return stored // self.bits


_FP6 = WeightFormat(
    FP8,
    ("uint8",),
    bits=6,
    scales=_EXPONENTS,
    group=32,
    rows=tuple(QUARKS_ROWS),
    plain_rows=("mxfp8", FP8),
)
FORMATS: dict[str, WeightFormat] = {
    FP8: WeightFormat(FP8, (FP8,), scales=(*_FLOATS, *_EXPONENTS), rows=(FP8,)),
    "int8": WeightFormat("int8", ("int8", "uint8"), middle=128, rows=("int8",), usual_rows="int8"),
    "int4": WeightFormat(
        "int4",
        ("uint8", "int32", "uint32"),
        bits=4,
        scales=(*_FLOATS, FP8),
        middle=8,
        rows=("int8", FP8),
        usual_rows="int8",
    ),
    "mxfp4": WeightFormat(
        _E2M1,
        ("uint8", _E2M1),
        bits=4,
        scales=_EXPONENTS,
        group=32,
        rows=(FP8, "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8"),
    ),
    "mxfp6_e3m2": dataclasses.replace(_FP6, method="fp6_e3m2"),
    "mxfp6_e2m3": dataclasses.replace(_FP6, method="fp6_e2m3"),
    "mxfp8": WeightFormat(FP8, (FP8,), scales=_EXPONENTS, group=32, rows=("mxfp8",)),
    "nvfp4": WeightFormat(
        _E2M1,
        ("uint8", _E2M1),
        bits=4,
        scales=(FP8,),
        group=16,
        needs_alphas=True,
        rows=("nvfp4",),
    ),
}


def format_of(config: FusedMoEQuantConfig) -> WeightFormat | None:
    """The format of the weights; None for values."""
    return FORMATS.get(dtype_text(config.weight_quant_dtype) or "")


def array_type(array: Any, argument: str, allowed: tuple[str, ...]) -> str:
    """The type of an array, which must be one of these."""
    name = dtype_text(getattr(array, "dtype", None)) or type(array).__name__
    if name not in allowed:
        raise ConclaveTypeError(f"{argument}: expected one of {', '.join(allowed)}, found {name}")
    return name


def unsupported_reason(config: FusedMoEQuantConfig) -> str | None:
    """Why the library does not run a configuration; None where it does."""
    weights, rows = dtype_text(config.weight_quant_dtype), dtype_text(config.quant_dtype)
    kind = format_of(config)
    if kind is None:
        if weights not in (None, *PLAIN):
            known = ", ".join((*FORMATS, *PLAIN))
            return f"weights of {weights} do not run; {known} do"
        return f"rows of {rows} beside weights of values do not run" if rows is not None else None
    if rows not in (None, *kind.rows, *kind.plain_rows):
        known = ", ".join((*kind.rows, *kind.plain_rows)) or "rows as they are"
        return f"rows of {rows} multiply no weights of {weights}; {known} do"
    if (config.w1_zp is None) != (config.w2_zp is None):
        return "zero points are those of both products, w1_zp and w2_zp"
    if config.w1_zp is not None and (kind.middle == 0 or rows is not None):
        return "zero points belong to integers whose rows stay as they are"
    block = config.block_shape
    if rows == kind.usual_rows and kind.bits == 4 and not kind.group and block is not None:
        return f"rows of {weights} have a scale each, found block_shape {block}"
    if config.scale_fmt == "ue8m0" and (rows not in (FP8, "mxfp8") or config.a1_scale is not None):
        found = f"rows of {rows}" if config.a1_scale is None else "static ones"
        return f"scale_fmt: ue8m0 is of scales that are made of rows of {FP8}, found {found}"
    for name in ("w1_precision", "w2_precision"):
        if getattr(config, name) is not None:
            return f"{name}: scales are arrays, by row and column"
    return None


def refuse_unsupported(config: FusedMoEQuantConfig) -> None:
    reason = unsupported_reason(config)
    if reason is not None:
        raise ConclaveUnsupportedError(f"quant_config: {reason}")


def rows_stay_plain(config: FusedMoEQuantConfig) -> bool:
    """Whether rows that a scheme quantises are read as they are on every device."""
    kind = format_of(config)
    return kind is not None and dtype_text(config.quant_dtype) in kind.plain_rows
