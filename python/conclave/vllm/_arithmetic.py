"""From a quantisation in vLLM's words to the library's: what runs, why not, which scales."""

from __future__ import annotations

from typing import Any

from conclave import _frameworks
from conclave.errors import ConclaveUnsupportedError, ConclaveValueError
from conclave.spec import QuantSpec
from conclave.vllm.quant import FP8, FusedMoEQuantConfig, dtype_text

_GROUP = 128  # columns of a row that share a dynamic scale
_PLAIN = ("float32", "float16", "bfloat16")


def unsupported_reason(config: FusedMoEQuantConfig) -> str | None:
    """Why the library does not run a configuration; None where it does."""
    weights, rows = dtype_text(config.weight_quant_dtype), dtype_text(config.quant_dtype)
    if weights not in (None, FP8, *_PLAIN):
        return f"weights of {weights} do not run yet; {FP8}, float32, float16 and bfloat16 do"
    if rows not in (None, FP8):
        return f"rows quantised to {rows} do not run yet; {FP8} and rows as they are do"
    if rows == FP8 and weights != FP8:
        return f"rows of {FP8} multiply weights of {FP8} only, found {weights}"
    if config.w1_zp is not None or config.w2_zp is not None:
        return "zero points do not run yet"
    if config.is_scale_swizzled:
        return "swizzled scales are not read: give them by row and column"
    block = config.block_shape
    if rows == FP8 and block is not None and block[1] != _GROUP:
        return f"rows are quantised in groups of {_GROUP} columns, found block_shape {block}"
    for name in ("a1_gscale", "a2_gscale", "g1_alphas", "g2_alphas"):
        if getattr(config, name) is not None:
            return f"{name} belongs to formats that do not run yet"
    return None


def refuse_unsupported(config: FusedMoEQuantConfig) -> None:
    reason = unsupported_reason(config)
    if reason is not None:
        raise ConclaveUnsupportedError(f"quant_config: {reason}")


def _row_scales(config: FusedMoEQuantConfig) -> str:
    if config.quant_dtype is None:
        return "none"
    if config.block_shape is not None:
        return "group"
    static = config.a1_scale is not None
    if static != (config.a2_scale is not None):
        raise ConclaveValueError("quant_config: static scales are both a1_scale and a2_scale")
    if static and config.per_act_token_quant:
        raise ConclaveValueError("quant_config: a1_scale is static, per_act_token_quant dynamic")
    # A scale over the whole batch would make a token depend on the others: by token instead.
    return "tensor_static" if static else "token"


def quant_spec(config: FusedMoEQuantConfig, power_of_two_scales: bool = False) -> QuantSpec:
    """The rule of a configuration that runs.

    Raises ConclaveUnsupportedError with the reason of one that does not.
    """
    refuse_unsupported(config)
    if dtype_text(config.weight_quant_dtype) != FP8:
        return QuantSpec()
    block = config.block_shape
    if block is not None and config._w1.shape is not None:
        rows, cols = block
        kind = "block"
    else:
        rows = cols = _GROUP
        kind = "channel" if config.per_out_ch_quant else "tensor"
    return QuantSpec(
        weights=kind,
        block_rows=rows,
        block_cols=cols,
        activations=_row_scales(config),
        power_of_two_scales=power_of_two_scales,
    )


_OPERANDS = ("w1_scale", "w2_scale", "a1_scale", "a2_scale", "w1_bias", "w2_bias")


def scales_and_biases(config: FusedMoEQuantConfig | None) -> dict[str, Any]:
    """The arrays of a configuration by name."""
    return {} if config is None else {name: getattr(config, name, None) for name in _OPERANDS}


def weight_arguments(config: FusedMoEQuantConfig, w1: Any, w2: Any) -> dict[str, Any]:
    """Biases and scales by the names of `Layer.from_tensors`. One bias alone brings zeros for the
    other."""
    experts = int(w1.shape[0])
    w1_bias, w2_bias = config.w1_bias, config.w2_bias
    if w1_bias is None and w2_bias is not None:
        w1_bias = _zeros(w2_bias, (experts, int(w1.shape[1])))
    if w2_bias is None and w1_bias is not None:
        w2_bias = _zeros(w1_bias, (experts, int(w2.shape[1])))
    given: dict[str, Any] = {"gate_up_bias": w1_bias, "down_bias": w2_bias}
    if dtype_text(config.weight_quant_dtype) == FP8:
        for name, scale in (("w1_scale", config.w1_scale), ("w2_scale", config.w2_scale)):
            if scale is None:
                raise ConclaveValueError(f"{name}: weights of {FP8} need scales, found None")
        given["gate_up_scale"] = config.w1_scale
        given["down_scale"] = config.w2_scale
        if config.quant_dtype is not None and config.a1_scale is not None:
            given["gate_up_input_scale"] = by_expert(config.a1_scale, experts)
            given["down_input_scale"] = by_expert(config.a2_scale, experts)
    return given


def _zeros(like: Any, shape: tuple[int, int]) -> Any:
    zeros = _frameworks.empty_like(like, shape, None, "quant_config")
    zeros[...] = 0
    return zeros


def by_expert(scale: Any, num_experts: int) -> Any:
    """A static scale [E] of one number for all, or of one for each."""
    if getattr(scale, "shape", None) is None:
        import numpy

        scale = numpy.asarray(scale, dtype="float32")
    count = 1
    for size in scale.shape:
        count *= int(size)
    flat = scale.reshape(-1)
    if count != 1 or num_experts == 1:
        return flat
    if _frameworks.is_torch(flat):
        return flat.expand(num_experts).contiguous()
    return flat.repeat(num_experts)
