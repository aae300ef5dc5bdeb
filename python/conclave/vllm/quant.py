"""How a layer's weights and rows are quantised, in vLLM's words: `FusedMoEQuantConfig`.

A configuration is a value. Whether the library runs it is `unsupported_reason`; those that it does
not run can be made, passed on and looked at, and are refused with that reason where they are used.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

from conclave import _frameworks
from conclave.errors import ConclaveTypeError, ConclaveValueError

Array = Any
DType = Any  # of torch or numpy, or a name

FP8 = "float8_e4m3fn"
# Rows that a scheme of the OCP names beside each type of weights.
_OCP_ROWS: dict[str | None, tuple[str | None, ...]] = {
    "mxfp4": (None, "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3"),
    "mxfp6_e3m2": (None, "mxfp6_e3m2"),
    "mxfp6_e2m3": (None, "mxfp6_e2m3"),
}
MX_TYPES = ("mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8")
_NAMES = (*MX_TYPES, "nvfp4", "int4", "int8", FP8)
_SCALE_FORMATS = (None, "float", "ue8m0")


class _Shape(NamedTuple):
    row: int
    col: int


class GroupShape(_Shape):
    """Rows and columns that share a scale; -1 is all of them."""

    PER_TENSOR: ClassVar[GroupShape]
    PER_TOKEN: ClassVar[GroupShape]
    PER_CHANNEL: ClassVar[GroupShape]

    def is_per_tensor(self) -> bool:
        """One scale for all."""
        return tuple(self) == (-1, -1)

    def is_per_token(self) -> bool:
        """One for each row."""
        return tuple(self) == (1, -1)

    def is_per_channel(self) -> bool:
        """One for each column."""
        return tuple(self) == (-1, 1)

    def is_per_group(self) -> bool:
        """One for some columns of a row."""
        return self.row == 1 and self.col > 1


GroupShape.PER_TENSOR = GroupShape(-1, -1)
GroupShape.PER_TOKEN = GroupShape(1, -1)
GroupShape.PER_CHANNEL = GroupShape(-1, 1)


def dtype_text(dtype: DType) -> str | None:
    """The name of a type: "bfloat16"; None for None."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    return getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")


def named_dtype(name: str) -> DType:
    """torch's type of a name where torch is loaded, else the name."""
    torch = _frameworks.torch()
    return name if torch is None else getattr(torch, name)


def group_shapes(
    quant_dtype: DType,
    per_act_token_quant: bool,
    per_out_ch_quant: bool,
    block_shape: list[int] | None,
) -> tuple[GroupShape | None, GroupShape | None]:
    """Shapes of the rows' and of the weights' scales."""
    if block_shape is not None:
        if per_act_token_quant or per_out_ch_quant:
            raise ConclaveValueError(
                "block_shape: scales by block exclude per_act_token_quant and per_out_ch_quant"
            )
        if len(block_shape) != 2:
            raise ConclaveValueError(f"block_shape: expected 2 numbers, found {block_shape}")
        shape = GroupShape(*block_shape)
        return shape, shape
    rows = None if quant_dtype is None else GroupShape.PER_TENSOR
    if per_act_token_quant:
        rows = GroupShape.PER_TOKEN
    return rows, GroupShape.PER_TOKEN if per_out_ch_quant else None


@dataclasses.dataclass
class FusedMoEQuantDesc:
    """Type, scales and what else belongs to one of the four operands a1, a2, w1, w2."""

    dtype: DType = None  # None: not quantised
    shape: GroupShape | None = None
    scale: Array | None = None
    alpha_or_gscale: Array | None = None
    zp: Array | None = None
    bias: Array | None = None


def _of(operand: str, field: str) -> Any:
    return property(lambda self: getattr(getattr(self, operand), field))


def _precision(operand: FusedMoEQuantDesc) -> Any:
    """What stands in the place of scales and is no array and no number."""
    scale = operand.scale
    return None if isinstance(scale, (int, float)) or hasattr(scale, "shape") else scale


@dataclasses.dataclass
class FusedMoEQuantConfig:
    """Descriptors of both products' rows (a1, a2) and weights (w1, w2).

    Make one with a builder (`fp8_w8a8_moe_quant_config`, ...) or with `make`. `scale_fmt` says how
    dynamic scales of rows of e4m3 are made, as a quantization_config has it: "ue8m0" rounds them
    up to powers of two.
    """

    _a1: FusedMoEQuantDesc
    _a2: FusedMoEQuantDesc
    _w1: FusedMoEQuantDesc
    _w2: FusedMoEQuantDesc
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None
    gemm1_clamp_limit: float | None = None
    is_scale_swizzled: bool = False
    scale_fmt: str | None = None

    a1_scale = _of("_a1", "scale")
    a2_scale = _of("_a2", "scale")
    w1_scale = _of("_w1", "scale")
    w2_scale = _of("_w2", "scale")
    a1_gscale = _of("_a1", "alpha_or_gscale")
    a2_gscale = _of("_a2", "alpha_or_gscale")
    g1_alphas = _of("_w1", "alpha_or_gscale")
    g2_alphas = _of("_w2", "alpha_or_gscale")
    w1_zp = _of("_w1", "zp")
    w2_zp = _of("_w2", "zp")
    w1_bias = _of("_w1", "bias")
    w2_bias = _of("_w2", "bias")
    quant_dtype = _of("_a1", "dtype")
    weight_quant_dtype = _of("_w1", "dtype")

    @property
    def w1_precision(self) -> Any:
        """The object given in place of w1's scales, such as Triton's PrecisionConfig; else None."""
        return _precision(self._w1)

    @property
    def w2_precision(self) -> Any:
        """The object given in place of w2's scales; else None."""
        return _precision(self._w2)

    def __post_init__(self) -> None:
        if self.per_act_token_quant and self.block_shape is not None:
            raise ConclaveValueError("block_shape: illegal quantization: also by token")
        if self.scale_fmt not in _SCALE_FORMATS:
            raise ConclaveValueError(
                f"scale_fmt: expected None, 'float' or 'ue8m0', found {self.scale_fmt!r}"
            )

    @property
    def is_quantized(self) -> bool:
        return self.quant_dtype is not None

    @property
    def per_act_token_quant(self) -> bool:
        return self._a1.shape == GroupShape.PER_TOKEN

    is_per_act_token = per_act_token_quant

    @property
    def per_out_ch_quant(self) -> bool:
        return self._w1.shape == GroupShape.PER_TOKEN

    @property
    def is_per_tensor(self) -> bool:
        return self._a1.shape == GroupShape.PER_TENSOR

    @property
    def block_shape(self) -> list[int] | None:
        shape = self._a1.shape if self._a1.shape is not None else self._w1.shape
        if shape is None or shape.row == -1 or shape.col == -1:
            return None
        return list(shape)

    @property
    def is_block_quantized(self) -> bool:
        return self.block_shape is not None

    def _pair(self) -> tuple[str | None, str | None]:
        return dtype_text(self._w1.dtype), dtype_text(self._a1.dtype)

    @property
    def use_fp8_w8a8(self) -> bool:
        return self._pair()[1] == FP8 and self._pair()[0] in (FP8, None)

    @property
    def use_fp8_w8a16(self) -> bool:
        return self._pair() == (FP8, None)

    @property
    def use_int8_w8a8(self) -> bool:
        return self._pair()[1] == "int8"

    @property
    def use_int8_w8a16(self) -> bool:
        return self._pair() == ("int8", None)

    @property
    def use_int4_w4a16(self) -> bool:
        return self._pair() == ("int4", None)

    @property
    def use_mxfp4_w4a16(self) -> bool:
        return self._pair() == ("mxfp4", None)

    @property
    def use_mxfp4_w4a8(self) -> bool:
        return self._pair() in (("mxfp4", FP8), ("mxfp4", "mxfp8"))

    @property
    def use_mxfp4_w4a4(self) -> bool:
        return self._pair() == ("mxfp4", "mxfp4")

    @property
    def use_nvfp4_w4a4(self) -> bool:
        return self._pair() == ("nvfp4", "nvfp4")

    @property
    def use_nvfp4_w4a16(self) -> bool:
        return self._pair() == ("nvfp4", None)

    @property
    def ocp_mx_scheme(self) -> str | None:
        """ "w_mxfp4_a_mxfp6_e3m2": a pair of types that the OCP's schemes name; None for any other,
        such as one with rows of a real dtype."""
        weights, rows = self._pair()
        if rows not in _OCP_ROWS.get(weights, ()):
            return None
        return f"w_{weights}" if rows is None else f"w_{weights}_a_{rows}"

    @property
    def unsupported_reason(self) -> str | None:
        """Why the library does not run it; None where it does."""
        from conclave.vllm._formats import unsupported_reason

        return unsupported_reason(self)

    @property
    def rows_stay_plain(self) -> bool:
        """Whether rows that the scheme quantises are read as they are on every device: no layer
        makes such codes of rows, and products come nearer to exact ones."""
        from conclave.vllm._formats import rows_stay_plain

        return rows_stay_plain(self)

    def config_name(self, dtype: DType) -> str | None:
        """The part of a tuning file's name that says the types."""
        if self.use_fp8_w8a8:
            return "fp8_w8a8"
        if self.use_int8_w8a16:
            return "int8_w8a16"
        if self.use_int4_w4a16:
            return "int4_w4a16"
        if self.ocp_mx_scheme is None and dtype_text(dtype) == "float32":
            return "float32"
        return None

    def scale_shape(self, max_tokens: int, hidden_dim: int) -> tuple[int, int] | None:
        """Shape of the scales of max_tokens rows; None where rows are not quantised."""
        if not self.is_quantized:
            return None
        if self.block_shape is not None:
            return max_tokens, -(-hidden_dim // self.block_shape[1])
        return (max_tokens, 1) if self.per_act_token_quant else (1, 1)

    def batched_scale_shape(
        self, num_experts: int, max_tokens: int, hidden_dim: int
    ) -> tuple[int, int, int] | None:
        """The same for rows sorted by expert, [E, max_tokens, H]."""
        shape = self.scale_shape(max_tokens, hidden_dim)
        return None if shape is None else (num_experts, *shape)

    @staticmethod
    def make(
        quant_dtype: DType = None,
        per_act_token_quant: bool = False,
        per_out_ch_quant: bool = False,
        block_shape: list[int] | None = None,
        w1_scale: Array | None = None,
        w2_scale: Array | None = None,
        a1_scale: Array | None = None,
        a2_scale: Array | None = None,
        g1_alphas: Array | None = None,
        g2_alphas: Array | None = None,
        a1_gscale: Array | None = None,
        a2_gscale: Array | None = None,
        w1_bias: Array | None = None,
        w2_bias: Array | None = None,
        w1_zp: Array | None = None,
        w2_zp: Array | None = None,
        weight_dtype: DType = None,
        is_scale_swizzled: bool = False,
        gemm1_alpha: float | None = None,
        gemm1_beta: float | None = None,
        gemm1_clamp_limit: float | None = None,
        scale_fmt: str | None = None,
    ) -> FusedMoEQuantConfig:
        """A configuration of any kind.

        Args:
            quant_dtype: type of the rows, None for rows as they are: a dtype, or "nvfp4", "mxfp4",
                "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8".
            weight_dtype: type of the weights; by default quant_dtype.
            per_act_token_quant, per_out_ch_quant: a scale for each row, for each output column.
            block_shape: [rows, columns] of a block of weights that shares a scale.
            w1_scale, w2_scale, a1_scale, a2_scale: scales of the weights; static ones of the rows.
            w1_bias, w2_bias: [E, 2N] and [E, H].
            gemm1_alpha, gemm1_beta, gemm1_clamp_limit: parameters of the activation.
            scale_fmt: "ue8m0" for dynamic scales of rows that are powers of two.
        """
        for argument, dtype in (("quant_dtype", quant_dtype), ("weight_dtype", weight_dtype)):
            if isinstance(dtype, str) and dtype not in _NAMES:
                raise ConclaveTypeError(
                    f"{argument}: expected a dtype or one of {', '.join(_NAMES)}, found {dtype!r}"
                )
        weight_dtype = quant_dtype if weight_dtype is None else weight_dtype
        rows, columns = group_shapes(
            quant_dtype, per_act_token_quant, per_out_ch_quant, block_shape
        )
        desc = FusedMoEQuantDesc
        return FusedMoEQuantConfig(
            desc(quant_dtype, rows, a1_scale, a1_gscale),
            desc(quant_dtype, rows, a2_scale, a2_gscale),
            desc(weight_dtype, columns, w1_scale, g1_alphas, w1_zp, w1_bias),
            desc(weight_dtype, columns, w2_scale, g2_alphas, w2_zp, w2_bias),
            gemm1_alpha,
            gemm1_beta,
            gemm1_clamp_limit,
            is_scale_swizzled,
            scale_fmt,
        )


FUSED_MOE_UNQUANTIZED_CONFIG = FusedMoEQuantConfig.make()
