"""`fused_experts`: the experts of a layer as one call, with vLLM's argument names and meanings."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from conclave import _frameworks, _gradients
from conclave.errors import ConclaveTypeError, ConclaveValueError
from conclave.spec import MoeSpec, QuantSpec
from conclave.vllm._arithmetic import quant_spec, scales_and_biases
from conclave.vllm._checks import check_sizes, check_tokens, check_weights
from conclave.vllm._formats import format_of, refuse_unsupported
from conclave.vllm._packed import packed_layer
from conclave.vllm._packers import ArrayExperts, MethodExperts, RankExperts, six_bit_experts
from conclave.vllm.activation import MoEActivation, activation_spec, parse_activation
from conclave.vllm.quant import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig

Array = Any


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
    linear_beta: float | None = None,
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
            [E, N, H] for activations without a gate. float32, float16, bfloat16; float8_e4m3fn,
            int8 and uint8 as quant_config says, with several codes of a row in a byte.
        w2: [E, H, N] likewise. Weights whose rows are not dense cost a GPU a contiguous copy.
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
        linear_beta: of "situ"; 0: the up rows are taken as they are.
        out: [T, H] to write to. stream: of CUDA; by default torch's current one.

    Returns:
        [T, H] of hidden_states' library and type.

    Raises:
        Error: naming the argument, with what was expected and found, also for one that requires
        gradients while torch records. ConclaveUnsupportedError with the reason for a quant_config
        that does not run.
    """
    del allow_deep_gemm, allow_cutlass_block_scaled_grouped_gemm
    top_k = check_tokens(hidden_states, topk_weights, topk_ids)
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
    check_sizes(hidden_states, w1, format_of(_checked(quant_config)))
    if inplace:
        if out is not None:
            raise ConclaveValueError("out: it is hidden_states with inplace=True")
        out = hidden_states
    experts = experts_layer(
        w1,
        w2,
        top_k,
        activation=activation,
        weight_on_input=apply_router_weight_on_input,
        global_num_experts=global_num_experts,
        expert_map=expert_map,
        quant_config=quant_config,
        swiglu_limit=swiglu_limit,
        linear_beta=linear_beta,
    )
    return experts.run(hidden_states, topk_ids, topk_weights, out, stream)


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
    linear_beta: float | None = None,
) -> RankExperts:
    """The packed layer of weights, from the cache where they are in it."""
    config = _checked(quant_config)
    kind = parse_activation(activation)
    coded = format_of(config)
    sizes = check_weights(w1, w2, kind, coded)
    local_of = local_indices(expert_map, global_num_experts, sizes.experts)
    rule = experts_spec(
        top_k,
        kind,
        weight_on_input,
        config.gemm1_alpha,
        config.gemm1_beta,
        swiglu_limit if config.gemm1_clamp_limit is None else config.gemm1_clamp_limit,
        quant_spec(config, w1, w2),
        None if coded is None else coded.codes,
        config.w1_bias is not None or config.w2_bias is not None,
        linear_beta,
    )
    if coded is not None and coded.method:
        packer: ArrayExperts | MethodExperts = six_bit_experts(
            config, coded, rule, w1, w2, sizes, kind.is_interleaved
        )
    else:
        packer = ArrayExperts(config, rule, w1, w2, local_of, kind.is_interleaved)
    places, numbers = _places(config)
    layer = packed_layer(
        {"w1": w1, "w2": w2, **places}, (rule, local_of, numbers), packer.make, packer.reload
    )
    return RankExperts(layer, local_of if isinstance(packer, MethodExperts) else None)


def _checked(quant_config: FusedMoEQuantConfig | None) -> FusedMoEQuantConfig:
    """A configuration that runs."""
    if quant_config is None:
        return FUSED_MOE_UNQUANTIZED_CONFIG
    if not isinstance(quant_config, FusedMoEQuantConfig):
        raise ConclaveTypeError(
            f"quant_config: expected a FusedMoEQuantConfig, found {type(quant_config).__name__}"
        )
    refuse_unsupported(quant_config)
    return quant_config


def _places(config: FusedMoEQuantConfig) -> tuple[dict[str, Array], tuple[Any, ...]]:
    """The arrays that a layer is made of beside its weights, and what is given as numbers."""
    places, numbers = {}, []
    for name, value in scales_and_biases(config).items():
        if isinstance(value, (int, float)):
            numbers.append((name, value))
        else:
            places[name] = value
    return places, tuple(numbers)


@functools.lru_cache(maxsize=256)
def experts_spec(
    top_k: int,
    kind: MoEActivation,
    weight_on_input: bool,
    alpha: float | None,
    beta: float | None,
    limit: float | None,
    quant: QuantSpec,
    codes: str | None,
    has_bias: bool,
    linear_beta: float | None = None,
) -> MoeSpec:
    """What a layer of given choices computes; its sizes follow from the weights."""
    return MoeSpec(
        weight_dtype=codes,
        top_k=top_k,
        activation=activation_spec(
            kind, alpha=alpha, beta=beta, limit=limit, linear_beta=linear_beta
        ),
        has_gate=False,
        has_bias=has_bias,
        weight_on="input" if weight_on_input else "output",
        quant=quant,
    )


def local_indices(
    expert_map: Array | Sequence[int] | None, global_num_experts: int, local: int
) -> tuple[int, ...] | None:
    """The map's entries, checked; None without a map."""
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
