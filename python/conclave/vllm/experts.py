"""`fused_experts`: the experts of a layer as one call, with vLLM's argument names and meanings."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from conclave import _frameworks, _gradients
from conclave._growing import growing
from conclave.errors import ConclaveTypeError, ConclaveUnsupportedError, ConclaveValueError, Error
from conclave.layer import Layer
from conclave.spec import MoeSpec, ParallelSpec
from conclave.vllm._arithmetic import quant_spec, scales_and_biases, weight_arguments
from conclave.vllm._packed import packed_layer, readable
from conclave.vllm.activation import MoEActivation, activation_spec, parse_activation
from conclave.vllm.quant import FP8, FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig, dtype_text

Array = Any

_ROWS = ("float32", "float16", "bfloat16")
_WEIGHTS = (*_ROWS, FP8)


@_frameworks.untraced
def fused_experts(
    hidden_states: Array,
    w1: Array,
    w2: Array,
    topk_weights: Array,
    topk_ids: Array,
    inplace: bool = False,
    activation: str | MoEActivation = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: Array | Sequence[int] | None = None,
    quant_config: FusedMoEQuantConfig | None = None,
    allow_deep_gemm: bool = False,
    allow_cutlass_block_scaled_grouped_gemm: bool = False,
    *,
    swiglu_limit: float | None = None,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """The weighted sum of each token's experts.

    Weights are packed at the first call and kept as long as w1 and w2 live; updates in place that
    count a tensor's version up are seen. What has no version, such as numpy, is packed at every
    call: `Layer.from_tensors` is the way to keep it. A layer plans for the calls that it sees, up
    to 16384 tokens (docs/python.md); longer ones run in equal chunks.

    Args:
        hidden_states: [T, H] float32, float16 or bfloat16; T may be 0, rows may be apart.
        w1: [E, 2N, H], gate rows first, then up rows; gate 0, up 0, gate 1, ... for "swigluoai";
            [E, N, H] for activations without a gate. float32, float16, bfloat16, float8_e4m3fn.
        w2: [E, H, N]. Weights whose rows are not dense cost a GPU a contiguous copy.
        topk_weights: [T, k] float32, float16 or bfloat16.
        topk_ids: [T, k] int32 or int64; -1 contributes nothing.
        inplace: write to hidden_states, which is returned.
        activation: a name of `MoEActivation`.
        apply_router_weight_on_input: each expert reads its own w x; its rows are not weighed.
        global_num_experts: -1, or E of the whole layer where w1 holds a part of it.
        expert_map: [global_num_experts], the index in w1 of each expert, -1 for those of other
            ranks, which contribute nothing.
        quant_config: scales, biases and parameters of the activation.
        allow_deep_gemm, allow_cutlass_block_scaled_grouped_gemm: name kernels of vLLM; no effect.
        swiglu_limit: of the activation, unless quant_config has gemm1_clamp_limit.
        out: [T, H] to write to. stream: of CUDA; by default torch's current one.

    Returns:
        [T, H] of hidden_states' library and type.

    Raises:
        Error: naming the argument, with what was expected and found, also for one that requires
        gradients while torch records. ConclaveUnsupportedError with the reason for a quant_config
        that does not run yet.
    """
    del allow_deep_gemm, allow_cutlass_block_scaled_grouped_gemm
    top_k = _check_tokens(hidden_states, topk_weights, topk_ids)
    _gradients.refuse(
        {
            "hidden_states": hidden_states,
            "w1": w1,
            "w2": w2,
            "topk_weights": topk_weights,
            "out": out,
            **scales_and_biases(quant_config),
        }
    )
    _check_sizes(hidden_states, w1)
    if inplace:
        if out is not None:
            raise ConclaveValueError("out: it is hidden_states with inplace=True")
        out = hidden_states
    layer = experts_layer(
        w1,
        w2,
        top_k,
        activation=activation,
        weight_on_input=apply_router_weight_on_input,
        global_num_experts=global_num_experts,
        expert_map=expert_map,
        quant_config=quant_config,
        swiglu_limit=swiglu_limit,
    )
    return layer.forward(
        hidden_states, topk_ids=topk_ids, topk_weights=topk_weights, out=out, stream=stream
    )


def experts_layer(
    w1: Array,
    w2: Array,
    top_k: int,
    *,
    activation: str | MoEActivation = "silu",
    weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: Array | Sequence[int] | None = None,
    quant_config: FusedMoEQuantConfig | None = None,
    swiglu_limit: float | None = None,
) -> Layer:
    """The packed layer of weights, from the cache where they are in it."""
    config = FUSED_MOE_UNQUANTIZED_CONFIG if quant_config is None else quant_config
    if not isinstance(config, FusedMoEQuantConfig):
        raise ConclaveTypeError(
            f"quant_config: expected a FusedMoEQuantConfig, found {type(config).__name__}"
        )
    kind = parse_activation(activation)
    local = _check_weights(w1, w2, kind)
    local_of = _local_of(expert_map, global_num_experts, local)
    spec = _spec(
        top_k,
        kind,
        weight_on_input,
        config.gemm1_alpha,
        config.gemm1_beta,
        swiglu_limit if config.gemm1_clamp_limit is None else config.gemm1_clamp_limit,
        quant_spec(config),
        config.w1_bias is not None or config.w2_bias is not None,
    )
    order = "interleaved" if kind.is_interleaved else "concatenated"

    def arrays() -> dict[str, Any]:
        given = {"gate_up": w1, "down": w2, **weight_arguments(config, w1, w2)}
        return {name: readable(array, _NAMES[name]) for name, array in given.items()}

    def make() -> Layer:
        with _names_of_vllm():
            return growing(
                Layer.from_tensors(
                    spec,
                    parallel=_parallel(local_of),
                    gate_up_order=order,
                    expert_map=local_of,
                    **arrays(),
                )
            )

    def reload(layer: Layer) -> None:
        with _names_of_vllm():
            # On a GPU a layer that uses its weights in place cannot be written to.
            mode = "in_place" if layer.device == "cpu" else "staged"
            layer.reload(mode=mode, gate_up_order=order, expert_map=local_of, **arrays())

    static = (config.a1_scale, config.a2_scale)
    numbers = tuple(scale for scale in static if isinstance(scale, (int, float)))
    places = {
        "w1": w1,
        "w2": w2,
        "w1_scale": config.w1_scale,
        "w2_scale": config.w2_scale,
        "w1_bias": config.w1_bias,
        "w2_bias": config.w2_bias,
        "a1_scale": None if numbers else config.a1_scale,
        "a2_scale": None if numbers else config.a2_scale,
    }
    return packed_layer(places, (spec, local_of, numbers), make, reload)


@functools.lru_cache(maxsize=256)
def _spec(
    top_k: int,
    kind: MoEActivation,
    weight_on_input: bool,
    alpha: float | None,
    beta: float | None,
    limit: float | None,
    quant: Any,
    has_bias: bool,
) -> MoeSpec:
    return MoeSpec(
        top_k=top_k,
        activation=activation_spec(kind, alpha=alpha, beta=beta, limit=limit),
        has_gate=False,
        has_bias=has_bias,
        weight_on="input" if weight_on_input else "output",
        quant=quant,
    )


_NAMES = {
    "gate_up": "w1",
    "down": "w2",
    "gate_up_scale": "w1_scale",
    "down_scale": "w2_scale",
    "gate_up_bias": "w1_bias",
    "down_bias": "w2_bias",
    "gate_up_input_scale": "a1_scale",
    "down_input_scale": "a2_scale",
}


@contextlib.contextmanager
def _names_of_vllm() -> Iterator[None]:
    """Errors of a layer's weights name the arguments that they came from."""
    try:
        yield
    except Error as error:
        ours = re.match(r"\w*", error.tensor)[0]  # type: ignore[index]
        if ours in _NAMES:
            error.args = (str(error).replace(ours, _NAMES[ours], 1),)
            error.tensor = error.tensor.replace(ours, _NAMES[ours], 1)
        raise


def _parallel(local_of: tuple[int, ...] | None) -> ParallelSpec | None:
    """A rank that holds what the map says, and sums no more than that."""
    if local_of is None:
        return None
    ranks = tuple(0 if index >= 0 else -1 for index in local_of)
    return ParallelSpec(placement="custom", rank_of=ranks, reduce="partial")


def _local_of(
    expert_map: Array | Sequence[int] | None, global_num_experts: int, local: int
) -> tuple[int, ...] | None:
    if expert_map is None:
        if global_num_experts not in (-1, local):
            raise ConclaveValueError(
                f"global_num_experts: expected {local} as in w1 without an expert_map, "
                f"found {global_num_experts}"
            )
        return None
    entries = _map_entries(expert_map)
    if global_num_experts not in (-1, len(entries)):
        raise ConclaveValueError(
            f"expert_map: expected {global_num_experts} entries, found {len(entries)}"
        )
    held = [index for index in entries if index != -1]
    if len(set(held)) != len(held) or any(not 0 <= index < local for index in held):
        raise ConclaveValueError(
            f"expert_map: expected -1 and each of 0 to {local - 1} at most once, "
            f"found {list(entries)}"
        )
    return entries


_maps: dict[int, tuple[Any, int, tuple[int, ...]]] = {}


def _map_entries(expert_map: Any) -> tuple[int, ...]:
    """The map's entries. Those of a tensor on a GPU are read once for each version of it."""
    if not _frameworks.is_torch(expert_map) or not expert_map.is_cuda:
        values = expert_map.tolist() if hasattr(expert_map, "tolist") else expert_map
        return tuple(int(value) for value in values)
    if expert_map.is_inference():
        return tuple(expert_map.tolist())
    import weakref

    found = _maps.get(id(expert_map))
    if found is not None and found[0]() is expert_map and found[1] == expert_map._version:
        return found[2]
    identity = id(expert_map)
    entries = tuple(expert_map.tolist())
    owner = weakref.ref(expert_map, lambda _: _maps.pop(identity, None))
    _maps[identity] = (owner, expert_map._version, entries)
    return entries


def _shape(array: Array, argument: str, rank: int, letters: str) -> tuple[int, ...]:
    shape = _frameworks.shape_of(array, argument)
    if len(shape) != rank:
        raise ConclaveValueError(f"{argument}: expected shape {letters}, found {list(shape)}")
    return tuple(int(size) for size in shape)


def _dtype(array: Array, argument: str, allowed: tuple[str, ...]) -> str:
    name = dtype_text(getattr(array, "dtype", None)) or type(array).__name__
    if name not in allowed:
        raise ConclaveTypeError(f"{argument}: expected one of {', '.join(allowed)}, found {name}")
    return name


def _check_tokens(hidden_states: Array, topk_weights: Array, topk_ids: Array) -> int:
    tokens, _ = _shape(hidden_states, "hidden_states", 2, "[T, H]")
    if dtype_text(getattr(hidden_states, "dtype", None)) == FP8:
        raise ConclaveUnsupportedError(
            "hidden_states: rows that are quantised already do not run; give them as they were"
        )
    _dtype(hidden_states, "hidden_states", _ROWS)
    rows, top_k = _shape(topk_ids, "topk_ids", 2, "[T, k]")
    _dtype(topk_ids, "topk_ids", ("int32", "int64"))
    weights = _shape(topk_weights, "topk_weights", 2, "[T, k]")
    _dtype(topk_weights, "topk_weights", _ROWS)
    if rows != tokens:
        raise ConclaveValueError(
            f"topk_ids: expected {tokens} rows as in hidden_states, found {rows}"
        )
    if weights != (rows, top_k):
        raise ConclaveValueError(
            f"topk_weights: expected shape {[rows, top_k]} as topk_ids, found {list(weights)}"
        )
    device = _frameworks.device_of(hidden_states)
    for argument, array in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
        _check_device(array, argument, device)
    return top_k


def _check_device(array: Array, argument: str, device: str) -> None:
    found = _frameworks.device_of(array)
    if found != device:
        raise ConclaveValueError(f"{argument}: expected it on {device}, found it on {found}")


def _check_weights(w1: Array, w2: Array, kind: MoEActivation) -> int:
    experts, rows, hidden = _shape(w1, "w1", 3, "[E, 2N, H]")
    held, out_rows, inner = _shape(w2, "w2", 3, "[E, H, N]")
    dtype = _dtype(w1, "w1", _WEIGHTS)
    _dtype(w2, "w2", (dtype,))
    _check_device(w2, "w2", _frameworks.device_of(w1))
    expected = 2 * inner if kind.is_gated else inner
    if rows != expected:
        raise ConclaveValueError(
            f"w1: expected {expected} rows for the {inner} columns of w2 and activation "
            f"{kind.value}, found {rows}"
        )
    if held != experts:
        raise ConclaveValueError(f"w2: expected {experts} experts as in w1, found {held}")
    if out_rows != hidden:
        raise ConclaveValueError(f"w2: expected {hidden} rows as w1 has columns, found {out_rows}")
    return experts


def _check_sizes(hidden_states: Array, w1: Array) -> None:
    hidden = _shape(w1, "w1", 3, "[E, 2N, H]")[2]
    if int(hidden_states.shape[1]) != hidden:
        raise ConclaveValueError(
            f"hidden_states: Hidden size mismatch: expected {hidden} columns as in w1, "
            f"found {int(hidden_states.shape[1])}"
        )
    _check_device(hidden_states, "hidden_states", _frameworks.device_of(w1))
