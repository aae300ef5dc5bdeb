"""vLLM's builders of `FusedMoEQuantConfig`, one for each scheme.

What they make runs; where a scheme quantises rows in a way that no layer does, rows stay as they
are (`rows_stay_plain`).
"""

from __future__ import annotations

from typing import Any

from conclave.errors import ConclaveTypeError, ConclaveUnsupportedError, ConclaveValueError
from conclave.vllm.quant import (
    FP8,
    MX_TYPES,
    FusedMoEQuantConfig,
    FusedMoEQuantDesc,
    GroupShape,
    dtype_text,
    named_dtype,
)

Array = Any
Config = FusedMoEQuantConfig


def _plain(dtype: Any, scale: Array | None, bias: Array | None = None, **more: Any) -> Any:
    return FusedMoEQuantDesc(dtype, scale=scale, bias=bias, **more)


def _group_shape(block_shape: Any) -> GroupShape | None:
    """Of a pair of numbers. What versions of vLLM have at its place is an array, a bias."""
    if block_shape is None:
        return None
    if not isinstance(block_shape, (list, tuple)) or len(block_shape) != 2:
        raise ConclaveTypeError(
            f"block_shape: expected two numbers, found {type(block_shape).__name__}; give what "
            "follows the scales and zero points by name"
        )
    return GroupShape(*block_shape)


def fp8_w8a8_moe_quant_config(
    w1_scale: Array,
    w2_scale: Array,
    a1_scale: Array | None = None,
    a2_scale: Array | None = None,
    *,
    per_act_token_quant: bool = False,
    per_out_ch_quant: bool = False,
    block_shape: list[int] | None = None,
    w1_bias: Array | None = None,
    w2_bias: Array | None = None,
    a1_gscale: Array | None = None,
    a2_gscale: Array | None = None,
    g1_alphas: Array | None = None,
    g2_alphas: Array | None = None,
    **parameters: Any,
) -> Config:
    """e4m3 weights and rows. Scales of w1 [E], [E, 2N], or one a block, as floats or as exponents,
    uint8 or float8_e8m0fnu; a1_scale: static. Parameters are those of the activation, and scale_fmt
    "ue8m0", where scales of rows are powers of two.

    Versions of vLLM disagree about what follows a2_scale by position, so that names are needed.
    """
    return Config.make(
        named_dtype(FP8),
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        a1_scale=a1_scale,
        a2_scale=a2_scale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        per_act_token_quant=per_act_token_quant,
        per_out_ch_quant=per_out_ch_quant,
        block_shape=block_shape,
        a1_gscale=a1_gscale,
        a2_gscale=a2_gscale,
        g1_alphas=g1_alphas,
        g2_alphas=g2_alphas,
        **parameters,
    )


def fp8_w8a16_moe_quant_config(
    w1_scale: Array,
    w2_scale: Array,
    block_shape: list[int] | None = None,
    per_out_ch_quant: bool = False,
    w1_bias: Array | None = None,
    w2_bias: Array | None = None,
    **parameters: Any,
) -> Config:
    """e4m3 weights, rows as they are. Scales and parameters as for `fp8_w8a8_moe_quant_config`."""
    shape = _group_shape(block_shape)
    if per_out_ch_quant:
        shape = GroupShape.PER_TOKEN
    weights = {"dtype": named_dtype(FP8), "shape": shape}
    return Config(
        FusedMoEQuantDesc(),
        FusedMoEQuantDesc(),
        FusedMoEQuantDesc(scale=w1_scale, bias=w1_bias, **weights),
        FusedMoEQuantDesc(scale=w2_scale, bias=w2_bias, **weights),
        **parameters,
    )


def int8_w8a8_moe_quant_config(
    w1_scale: Array,
    w2_scale: Array,
    a1_scale: Array | None = None,
    a2_scale: Array | None = None,
    per_act_token_quant: bool = False,
    w1_bias: Array | None = None,
    w2_bias: Array | None = None,
) -> Config:
    """int8 weights and rows. Versions of vLLM disagree about what follows a2_scale by position:
    biases are given by name."""
    if not isinstance(per_act_token_quant, bool):
        raise ConclaveTypeError(
            "per_act_token_quant: expected a bool, found "
            f"{type(per_act_token_quant).__name__}; give biases by name"
        )
    return Config.make(
        named_dtype("int8"),
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        a1_scale=a1_scale,
        a2_scale=a2_scale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        per_act_token_quant=per_act_token_quant,
    )


def _grouped(
    dtype: Any, scales: tuple, zeros: tuple, block_shape: list[int] | None, given: dict[str, Any]
) -> Config:
    shape = _group_shape(block_shape)
    biases = given.pop("w1_bias", None), given.pop("w2_bias", None)
    rows = given.pop("a1_gscale", None), given.pop("a2_gscale", None)
    w1, w2 = (
        _plain(dtype, scale, bias, zp=zp, shape=shape)
        for scale, zp, bias in zip(scales, zeros, biases, strict=True)
    )
    a1, a2 = (FusedMoEQuantDesc(shape=shape, alpha_or_gscale=scale) for scale in rows)
    return Config(a1, a2, w1, w2, **given)


def int8_w8a16_moe_quant_config(
    w1_scale: Array,
    w2_scale: Array,
    w1_zp: Array | None = None,
    w2_zp: Array | None = None,
    block_shape: list[int] | None = None,
    **further: Any,
) -> Config:
    """int8 weights in groups, rows as they are. Further: w1_bias and w2_bias, parameters of the
    activation, and a1_gscale and a2_gscale, which are kept and not used."""
    return _grouped(named_dtype("int8"), (w1_scale, w2_scale), (w1_zp, w2_zp), block_shape, further)


def int4_w4a16_moe_quant_config(
    w1_scale: Array,
    w2_scale: Array,
    w1_zp: Array | None = None,
    w2_zp: Array | None = None,
    block_shape: list[int] | None = None,
    **further: Any,
) -> Config:
    """4-bit integers in groups, rows as they are. Further: w1_bias and w2_bias, parameters of the
    activation, and a1_gscale and a2_gscale, which are kept and not used."""
    return _grouped("int4", (w1_scale, w2_scale), (w1_zp, w2_zp), block_shape, further)


def int4_w4afp8_moe_quant_config(
    w1_scale: Array,
    w2_scale: Array,
    g1_alphas: Array,
    g2_alphas: Array,
    per_act_token_quant: bool = True,
    per_out_ch_quant: bool = True,
    block_shape: list[int] | None = None,
) -> Config:
    """4-bit integers, e4m3 rows."""
    return Config.make(
        named_dtype(FP8),
        per_act_token_quant,
        per_out_ch_quant,
        block_shape,
        w1_scale,
        w2_scale,
        g1_alphas=g1_alphas,
        g2_alphas=g2_alphas,
        weight_dtype="int4",
    )


def gptq_marlin_moe_quant_config(
    w1_scale: Array,
    w2_scale: Array,
    weight_bits: int,
    group_size: int,
    w1_zp: Array | None = None,
    w2_zp: Array | None = None,
    w1_bias: Array | None = None,
    w2_bias: Array | None = None,
) -> Config:
    """GPTQ weights of 4 or 8 bits. Raises ConclaveValueError for other widths."""
    names = {4: "int4", 8: named_dtype("int8")}
    if weight_bits not in names:
        raise ConclaveValueError(f"weight_bits: expected 4 or 8, found {weight_bits}")
    shape = GroupShape(1, group_size) if group_size > 0 else GroupShape.PER_TOKEN
    return Config(
        FusedMoEQuantDesc(),
        FusedMoEQuantDesc(),
        _plain(names[weight_bits], w1_scale, w1_bias, zp=w1_zp, shape=shape),
        _plain(names[weight_bits], w2_scale, w2_bias, zp=w2_zp, shape=shape),
    )


def _mxfp4(
    rows: Any,
    scales: tuple,
    biases: tuple,
    parameters: dict[str, Any],
    rows_scales: tuple = (None, None),
) -> Config:
    a1, a2 = (FusedMoEQuantDesc(rows, scale=scale) for scale in rows_scales)
    w1, w2 = (_plain("mxfp4", scale, bias) for scale, bias in zip(scales, biases, strict=True))
    return Config(a1, a2, w1, w2, **parameters)


def mxfp4_w4a16_moe_quant_config(
    w1_scale: Array,
    w2_scale: Array,
    w1_bias: Array | None = None,
    w2_bias: Array | None = None,
    **parameters: Any,
) -> Config:
    """mxfp4 weights, rows as they are."""
    return _mxfp4(None, (w1_scale, w2_scale), (w1_bias, w2_bias), parameters)


def mxfp4_mxfp8_moe_quant_config(
    w1_scale: Array,
    w2_scale: Array,
    a1_scale: Array | None = None,
    a2_scale: Array | None = None,
    w1_bias: Array | None = None,
    w2_bias: Array | None = None,
    block_shape: list[int] | None = None,
    *,
    mx_alignment: int = 0,
    **parameters: Any,
) -> Config:
    """mxfp4 weights, mxfp8 rows, whose scales are made of them: a1_scale and a2_scale are None.
    mx_alignment has no effect, since nothing is padded."""
    for name, value in {
        "a1_scale": a1_scale,
        "a2_scale": a2_scale,
        "block_shape": block_shape,
    }.items():
        if value is not None:
            raise ConclaveUnsupportedError(f"{name}: rows of mxfp8 have scales of their own groups")
    return _mxfp4("mxfp8", (w1_scale, w2_scale), (w1_bias, w2_bias), parameters)


def mxfp4_w4a8_moe_quant_config(
    w1_scale: Array,
    w2_scale: Array,
    a1_scale: Array | None = None,
    a2_scale: Array | None = None,
    w1_bias: Array | None = None,
    w2_bias: Array | None = None,
    block_shape: list[int] | None = None,
    **parameters: Any,
) -> Config:
    """mxfp4 weights, e4m3 rows; a1_scale and a2_scale: static."""
    if block_shape is not None:
        raise ConclaveUnsupportedError("block_shape: mxfp4 has groups of 32 columns")
    scales = a1_scale, a2_scale
    return _mxfp4(named_dtype(FP8), (w1_scale, w2_scale), (w1_bias, w2_bias), parameters, scales)


def mxfp4_moe_quant_config(w1_scale: Array, w2_scale: Array) -> Config:
    """mxfp4 weights and rows."""
    return Config.make("mxfp4", w1_scale=w1_scale, w2_scale=w2_scale)


def ocp_mx_moe_quant_config(
    quant_dtype: str,
    w1_scale: Array,
    w2_scale: Array,
    weight_dtype: str | None = None,
    a1_scale: Array | None = None,
    a2_scale: Array | None = None,
    w1_bias: Array | None = None,
    w2_bias: Array | None = None,
    block_shape: list[int] | None = None,
    **parameters: Any,
) -> Config:
    """Types of the OCP's microscaling formats."""
    if dtype_text(quant_dtype) not in MX_TYPES:
        raise ConclaveValueError(
            f"quant_dtype: expected one of {', '.join(MX_TYPES)}, found {quant_dtype!r}"
        )
    return Config.make(
        quant_dtype,
        block_shape=block_shape,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        a1_scale=a1_scale,
        a2_scale=a2_scale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        weight_dtype=weight_dtype,
        **parameters,
    )


def nvfp4_moe_quant_config(
    g1_alphas: Array,
    g2_alphas: Array,
    a1_gscale: Array,
    a2_gscale: Array,
    w1_scale: Array,
    w2_scale: Array,
    w1_bias: Array | None = None,
    w2_bias: Array | None = None,
    is_scale_swizzled: bool = True,
    **parameters: Any,
) -> Config:
    """nvfp4 weights and rows."""
    return Config.make(
        "nvfp4",
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        g1_alphas=g1_alphas,
        g2_alphas=g2_alphas,
        a1_gscale=a1_gscale,
        a2_gscale=a2_gscale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        is_scale_swizzled=is_scale_swizzled,
        **parameters,
    )


def nvfp4_w4a16_moe_quant_config(
    g1_alphas: Array, g2_alphas: Array, w1_scale: Array, w2_scale: Array, **parameters: Any
) -> Config:
    """nvfp4 weights, rows as they are."""
    return Config(
        FusedMoEQuantDesc(),
        FusedMoEQuantDesc(),
        _plain("nvfp4", w1_scale, alpha_or_gscale=g1_alphas),
        _plain("nvfp4", w2_scale, alpha_or_gscale=g2_alphas),
        **parameters,
    )


def biased_moe_quant_config(
    w1_bias: Array | None, w2_bias: Array | None, **parameters: Any
) -> Config:
    """Weights and rows as they are, with biases [E, 2N] and [E, H]. Parameters are those of the
    activation."""
    return Config.make(w1_bias=w1_bias, w2_bias=w2_bias, **parameters)
