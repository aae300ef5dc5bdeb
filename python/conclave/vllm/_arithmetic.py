"""From a quantisation in vLLM's words to the library's: the rule, and the planes beside codes."""

from __future__ import annotations

import functools
from typing import Any

from conclave import _frameworks
from conclave._methods import needs_plain_rows
from conclave.errors import ConclaveTypeError, ConclaveValueError
from conclave.spec import MoeSpec, QuantSpec
from conclave.vllm._formats import (
    ROWS_IN_GROUPS,
    WeightFormat,
    array_type,
    format_of,
    refuse_unsupported,
    rows_stay_plain,
)
from conclave.vllm.quant import FusedMoEQuantConfig, dtype_text

_GROUP = 128  # the default of `QuantSpec` where nothing is said of blocks
_OPERANDS = (
    *(f"{operand}_{kind}" for operand in ("w1", "w2") for kind in ("scale", "zp", "bias")),
    *(f"{operand}_{kind}" for operand in ("a1", "a2") for kind in ("scale", "gscale")),
    "g1_alphas",
    "g2_alphas",
)


def scales_and_biases(config: FusedMoEQuantConfig | None) -> dict[str, Any]:
    """The arrays of a configuration by name."""
    return {} if config is None else {name: getattr(config, name, None) for name in _OPERANDS}


def _row_fields(config: FusedMoEQuantConfig, kind: WeightFormat) -> dict[str, Any]:
    """How rows become codes, as fields of `QuantSpec`."""
    rows = dtype_text(config.quant_dtype)
    if rows is None or rows_stay_plain(config) or kind.method:  # a method's reader says it
        return {}
    if rows not in ROWS_IN_GROUPS:
        powers = config.scale_fmt == "ue8m0"
        fields = {"activations": _row_scales(config, kind), "power_of_two_scales": powers}
        if rows != kind.usual_rows:
            fields["activation_dtype"] = rows
        # Groups of rows have as many columns as blocks of weights.
        block = config.block_shape if fields["activations"] == "group" else None
        return fields if block is None else {**fields, "activation_group": int(block[1])}
    return {"activations": "group", "activation_group": 32, **ROWS_IN_GROUPS[rows]}


def _has_steps(quant: QuantSpec) -> bool:
    """Whether rows have a number of the whole layer beside their scales."""
    return quant.activation_scale_rule == "two_level"


@functools.lru_cache(maxsize=256)
def _on_device(quant: QuantSpec, codes: str, device: str) -> QuantSpec:
    """The rule with rows as a device makes them. It is kept, since every call with arrays asks."""
    spec = MoeSpec(weight_dtype=codes, quant=quant)
    return spec.with_plain_rows().quant if needs_plain_rows(spec, device) else quant


def _row_scales(config: FusedMoEQuantConfig, kind: WeightFormat) -> str:
    if config.block_shape is not None and not kind.group:
        return "group"
    static = config.a1_scale is not None
    if static != (config.a2_scale is not None):
        raise ConclaveValueError("quant_config: static scales are both a1_scale and a2_scale")
    if static and config.per_act_token_quant:
        raise ConclaveValueError("quant_config: a1_scale is static, per_act_token_quant dynamic")
    # A scale over the whole batch would make a token depend on the others: by token instead.
    return "tensor_static" if static else "token"


def quant_spec(config: FusedMoEQuantConfig, w1: Any, w2: Any) -> QuantSpec:
    """The rule of a configuration for weights [E, 2N, H] and [E, H, N].

    Raises ConclaveUnsupportedError with the reason of one that does not run.
    """
    refuse_unsupported(config)
    kind = format_of(config)
    if kind is None:
        return QuantSpec()
    for name in ("w1_scale", "w2_scale"):
        if getattr(config, name) is None:
            weights = dtype_text(config.weight_quant_dtype)
            raise ConclaveValueError(f"{name}: weights of {weights} need scales, found None")
    shares, rows, cols = _sharing(config, kind, w1, w2)
    alphas = _number_of_alphas(config, kind)
    quant = QuantSpec(
        weights=shares,
        block_rows=rows,
        block_cols=cols,
        zeros="none" if config.w1_zp is None else "point",
        has_global_scale=alphas,
        **_row_fields(config, kind),
    )
    if _has_steps(quant) and (config.a1_gscale is None or config.a2_gscale is None):
        named = dtype_text(config.quant_dtype)
        raise ConclaveValueError(f"a1_gscale, a2_gscale: rows of {named} need both")
    return _on_device(quant, kind.codes, _frameworks.device_of(w1))


def _number_of_alphas(config: FusedMoEQuantConfig, kind: WeightFormat) -> bool:
    """Whether alphas are numbers of whole matrices, and not of their rows."""
    given = [name for name in ("g1_alphas", "g2_alphas") if getattr(config, name) is not None]
    if kind.needs_alphas and len(given) < 2:
        weights = dtype_text(config.weight_quant_dtype)
        raise ConclaveValueError(f"g1_alphas, g2_alphas: weights of {weights} need both")
    if not given or kind.needs_alphas:
        return bool(given)
    experts = int(config.w1_scale.shape[0])
    return all(_count(getattr(config, name)) in (1, experts) for name in given)


def _count(array: Any) -> int:
    count = 1
    for size in getattr(array, "shape", ()):
        count *= int(size)
    return count


def _sharing(
    config: FusedMoEQuantConfig, kind: WeightFormat, w1: Any, w2: Any
) -> tuple[str, int, int]:
    """What shares a scale: a `QuantSpec.weights`, with rows and columns of a block."""
    if kind.group:
        return "block", 1, kind.group
    block = config.block_shape
    if block is not None and config._w1.shape is not None and block[1] > 0:
        return "block", max(int(block[0]), 1), int(block[1])
    # vLLM says so of w4afp8, whose scales of groups the alphas multiply, a number for each row.
    by_row = kind.middle != 0 and config.g1_alphas is not None
    if config.per_out_ch_quant and not by_row:
        return "channel", _GROUP, _GROUP
    if kind.middle == 0:
        return "tensor", _GROUP, _GROUP
    found = {
        _sharing_of(scale, name, rows, kind.columns(weights, operand))
        for scale, name, rows, weights, operand in (
            (config.w1_scale, "w1_scale", int(w1.shape[1]), w1, "w1"),
            (config.w2_scale, "w2_scale", int(w2.shape[1]), w2, "w2"),
        )
    }
    if len(found) > 1:
        raise ConclaveValueError(
            "w1_scale, w2_scale: they share in different ways; give block_shape"
        )
    shares, cols = found.pop()
    return shares, 1 if shares == "block" else _GROUP, cols


def _sharing_of(scale: Any, name: str, rows: int, cols: int) -> tuple[str, int]:
    """From the shape of integers' scales: one a matrix, one a row, or one a group of columns."""
    shape = tuple(int(size) for size in scale.shape)[1:]
    if shape in ((), (1,), (1, 1)) or (shape == (2,) and rows > 2):
        return "tensor", _GROUP
    if shape in ((rows,), (rows, 1)):
        return "channel", _GROUP
    if len(shape) == 2 and shape[0] == rows and shape[1] > 0 and cols % shape[1] == 0:
        return "block", cols // shape[1]
    raise ConclaveValueError(
        f"{name}: expected [E], [E, {rows}, 1] or [E, {rows}, groups of {cols} columns], found "
        f"{[int(size) for size in scale.shape]}"
    )


def weight_arguments(
    config: FusedMoEQuantConfig,
    quant: QuantSpec,
    w1: Any,
    w2: Any,
    local_of: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """Biases and the planes of codes, by the names of `Layer.from_tensors`; `quant` is the rule of
    the configuration. Static scales of rows may be those of all experts that `local_of` knows."""
    experts = int(w1.shape[0])
    given = _biases(config, w1, w2)
    kind = format_of(config)
    if kind is None:
        return given
    for operand, name in ((1, "gate_up"), (2, "down")):
        scale = getattr(config, f"w{operand}_scale")
        alphas = getattr(config, f"g{operand}_alphas")
        array_type(scale, f"w{operand}_scale", kind.scales)
        if alphas is not None and _number_of_alphas(config, kind):
            rows = getattr(config, f"a{operand}_gscale")
            given[f"{name}_global_scale"] = _weights_alphas(alphas, rows, experts)
        elif alphas is not None:
            scale = _scaled_rows(scale, alphas, f"g{operand}_alphas")
        given[f"{name}_scale"] = scale
        zero = getattr(config, f"w{operand}_zp")
        if zero is not None:
            weights = w1 if operand == 1 else w2
            given[f"{name}_zero"] = zero_points(zero, weights, kind, f"w{operand}_zp")
        if quant.activations == "tensor_static":
            static = getattr(config, f"a{operand}_scale")
            given[f"{name}_input_scale"] = _steps(static, f"a{operand}_scale", experts, local_of)
        if _has_steps(quant):
            inverse = by_expert(getattr(config, f"a{operand}_gscale"), experts)
            given[f"{name}_input_scale"] = 1 / _frameworks.as_float32(inverse)
    return given


def _steps(static: Any, argument: str, experts: int, local_of: tuple[int, ...] | None) -> Any:
    """Static scales of rows: of the experts that are here, or of all, of which the largest counts.
    Those of experts elsewhere that were not loaded, which are 0, are the largest."""
    count, known = _count(static), len(local_of or ()) or experts
    if count not in (1, experts, known):
        expected = " or ".join(str(number) for number in sorted({1, experts, known}))
        raise ConclaveValueError(f"{argument}: expected {expected} numbers, found {count}")
    if local_of is None or count != known or known == experts:
        return by_expert(static, experts)
    flat = _frameworks.as_float32(static).reshape(-1)
    elsewhere = [index < 0 for index in local_of]
    if _frameworks.is_torch(flat):
        absent = (flat == 0) & flat.new_tensor(elsewhere).bool()
        return flat.masked_fill(absent, float(flat.max()))
    import numpy

    return numpy.where((flat == 0) & numpy.asarray(elsewhere), flat.max(), flat)


def _biases(config: FusedMoEQuantConfig, w1: Any, w2: Any) -> dict[str, Any]:
    """One bias alone brings zeros for the other."""
    experts = int(w1.shape[0])
    w1_bias, w2_bias = config.w1_bias, config.w2_bias
    if w1_bias is None and w2_bias is not None:
        w1_bias = _zeros(w2_bias, (experts, int(w1.shape[1])))
    if w2_bias is None and w1_bias is not None:
        w2_bias = _zeros(w1_bias, (experts, int(w2.shape[1])))
    return {"gate_up_bias": w1_bias, "down_bias": w2_bias}


def _zeros(like: Any, shape: tuple[int, int]) -> Any:
    zeros = _frameworks.empty_like(like, shape, None, "quant_config")
    zeros[...] = 0
    return zeros


def _weights_alphas(alphas: Any, rows: Any, experts: int) -> Any:
    """The weights' own factor of each matrix. Beside rows of codes alphas are the product with the
    rows' factor, whose inverse is `rows`."""
    found = _frameworks.as_float32(alphas)
    if rows is not None:
        factor = by_expert(rows, experts)
        found = found * factor.reshape(experts, *(1,) * (len(found.shape) - 1))
    return found if found.shape else by_expert(found, experts)


def _scaled_rows(scale: Any, alphas: Any, argument: str) -> Any:
    """Scales of groups times one number of each row."""
    shape = [int(size) for size in alphas.shape]
    rows = [int(size) for size in scale.shape[:2]]
    if shape not in (rows, [*rows, 1]):
        raise ConclaveValueError(f"{argument}: expected {[*rows, 1]} as w has rows, found {shape}")
    factor = _frameworks.as_float32(alphas).reshape(*rows, 1)
    return _frameworks.as_float32(scale).reshape(*rows, -1) * factor


def zero_points(zero: Any, weights: Any, kind: WeightFormat, argument: str) -> Any:
    """Zero points [E, rows, groups] as the library has them, less what codes lose.

    Bytes hold two of 4 bits, of rows that follow each other, the first in the lower half, or one.
    """
    name = array_type(zero, argument, ("uint8", "int8", "float32", "float16", "bfloat16"))
    rows = int(weights.shape[1])
    if len(zero.shape) == 2:
        zero = zero.reshape(*zero.shape, 1)
    if kind.bits == 4 and name == "uint8" and 2 * int(zero.shape[1]) == rows:
        zero = _frameworks.interleaved(zero & 15, zero >> 4, 1)
    is_signed = _frameworks.dtype_name(weights) == "int8"
    if is_signed and name == "uint8":
        raise ConclaveTypeError(f"{argument}: expected int8 as w is, found uint8")
    return _frameworks.as_float32(zero) - (0 if is_signed else kind.middle)


def by_expert(scale: Any, num_experts: int) -> Any:
    """A static scale [E] of one number for all, or of one for each."""
    if getattr(scale, "shape", None) is None:
        import numpy

        scale = numpy.asarray(scale, dtype="float32")
    count = _count(scale)
    flat = scale.reshape(-1)
    if count != 1 or num_experts == 1:
        return flat
    if _frameworks.is_torch(flat):
        return flat.expand(num_experts).contiguous()
    return flat.repeat(num_experts)
