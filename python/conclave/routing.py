"""Logits to expert ids and weights: vLLM's calls, with its argument names and meanings.

Scores are formed in float64 and rounded once; of equal scores the lower id comes first. NaN logits
compare as -inf; a row without a finite logit gets ids 0..k-1 with weight 0.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from conclave import _conclave, _frameworks, _gradients, _limits, _runtime
from conclave.errors import ConclaveTypeError, ConclaveUnsupportedError, ConclaveValueError
from conclave.spec import RouterSpec, from_dict, to_dict

Array = Any

_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
_PUBLISHED_EPSILON = 1e-20
_MOST_GROUPS = 2**31 - 1


class RoutingMethodType(enum.IntEnum):
    """vLLM's routing methods; docs/coming-from-vllm.md has the rule of each."""

    Default = 0
    Renormalize = 1
    DeepSeekV3 = 2
    Llama4 = 3
    RenormalizeNaive = 4
    TopK = 5
    SigmoidRenorm = 6
    MiniMax2 = 7
    Sigmoid = 8
    Unspecified = 9
    DeepseekV4 = 100
    Custom = 101
    Simulated = 102

    def router_spec(self) -> RouterSpec:
        """The rule as a `RouterSpec`, without sizes and scales.

        Raises ConclaveUnsupportedError for Unspecified and Custom, which name no rule.
        """
        if self in (RoutingMethodType.Unspecified, RoutingMethodType.Custom):
            raise ConclaveUnsupportedError(
                f"RoutingMethodType.{self.name} names no rule: say it by the fields of RouterSpec"
            )
        return from_dict(RouterSpec, _conclave.routing_method(self.name))


def get_routing_method_type(
    scoring_func: str,
    top_k: int,
    renormalize: bool,
    num_expert_group: int | None = None,
    has_e_score_bias: bool = False,
    routed_scaling_factor: float | None = 1.0,
) -> RoutingMethodType:
    """The routing method that a layer's arguments amount to, as newest vLLM names it.

    Llama4 is never the answer: it takes the logit of the best expert and then its sigmoid, so that
    its weights and those of Sigmoid are the same, but with renormalize they are 1.
    """
    del top_k, routed_scaling_factor
    kinds = RoutingMethodType
    if scoring_func == "sqrtsoftplus":
        return kinds.DeepseekV4 if renormalize else kinds.Unspecified
    if has_e_score_bias:
        if scoring_func != "sigmoid" or not renormalize:
            return kinds.Unspecified
        if (num_expert_group or 0) > 0:
            return kinds.DeepSeekV3
        return kinds.MiniMax2  # whose weights are scaled
    if scoring_func == "sigmoid":
        return kinds.SigmoidRenorm if renormalize else kinds.Sigmoid
    if scoring_func == "softmax":
        return kinds.RenormalizeNaive if renormalize else kinds.Default
    return kinds.Unspecified


@functools.lru_cache(maxsize=256)
def _router(device: str, num_experts: int, top_k: int, router: RouterSpec) -> _conclave.Router:
    spec = {"num_experts": num_experts, "top_k": top_k, "router": to_dict(router)}
    return _conclave.Router(_runtime.context(device), spec)


# Made once for each set of arguments: a router is found by its rule, which is quick to look up if
# it is the same object.
_rule = functools.lru_cache(maxsize=256)(RouterSpec)


def _check_pair(hidden_states: Array | None, gating_output: Array) -> None:
    shape = getattr(gating_output, "shape", None)
    if shape is None or len(shape) != 2:
        found = type(gating_output).__name__ if shape is None else list(shape)
        raise ConclaveValueError(f"gating_output: expected shape [T, num_experts], found {found}")
    dtype = _frameworks.dtype_name(gating_output)
    if dtype not in ("float32", "float16", "bfloat16"):
        raise ConclaveTypeError(
            f"gating_output: expected float32, float16 or bfloat16, found {dtype}"
        )
    if hidden_states is None:
        return
    rows = _frameworks.shape_of(hidden_states, "hidden_states")
    if not rows:
        raise ConclaveValueError("hidden_states: expected shape [T, H], found []")
    if rows[0] != shape[0]:
        raise ConclaveValueError(
            f"gating_output: number of tokens mismatch: expected {rows[0]} rows as in "
            f"hidden_states, found {shape[0]}"
        )


def _check_score(scoring_func: str) -> None:
    if not isinstance(scoring_func, str) or scoring_func not in _SCORES:
        raise ConclaveValueError(
            f"scoring_func: expected one of {', '.join(_SCORES)}, found {scoring_func!r}"
        )


def _refuse_gradients(gating_output: Array, bias: Array | None) -> None:
    _gradients.refuse({"gating_output": gating_output, "e_score_correction_bias": bias})


def _float_vector(values: Array, argument: str) -> Array:
    """A bias as the device reads it: float32 there."""
    if _frameworks.is_torch(values) and values.is_cuda:
        return values.float().contiguous()
    if not hasattr(values, "shape"):
        raise ConclaveTypeError(f"{argument}: expected an array, found {type(values).__name__}")
    return values


def route(
    gating_output: Array,
    topk: int,
    router: RouterSpec,
    *,
    selection_bias: Array | None = None,
    expert_scale: Array | None = None,
    global_scale: Array | None = None,
    token_ids: Array | None = None,
    hash_table: Array | None = None,
    tensors: Mapping[str, Array] | None = None,
    banned_experts: Array | Sequence[int] | None = None,
    expert_budget: int | None = None,
    stream: Any = None,
) -> tuple[Array, Array]:
    """Routes by any rule that `RouterSpec` can say.

    Args:
        gating_output: logits [T, E], float32, float16 or bfloat16; rows may be apart.
        topk: k.
        router: the rule; docs/routing.md has its formulas. Its lists, if any, as tuples.
        selection_bias: [E], of has_selection_bias. expert_scale: [E]. global_scale: [1].
        token_ids: [T] integers and hash_table: [vocab, k] int32, of router "hash".
        tensors: other tensors of a router's own, by name: float32, or int32 for ids.
        banned_experts, expert_budget: limits of the call, on the CPU, as in `Layer.forward`. Slots
            that they leave empty have id -1 and weight 0.
        stream: of CUDA; by default torch's current one.

    Returns:
        topk_weights [T, k] float32 and topk_ids [T, k] int32, of gating_output's library.

    Raises:
        Error: naming the argument or field; also for one that requires gradients while torch
        records, since none are computed here. On CUDA up to 1024 experts, and no recorded ids:
        ConclaveUnsupportedError otherwise. There a token id that the hash table lacks chooses
        nothing, -1.
    """
    _check_pair(None, gating_output)
    _limits.instance("router", router, RouterSpec, "a RouterSpec")
    if tensors is not None:
        _limits.instance("tensors", tensors, Mapping, "arrays by name")  # type: ignore[type-abstract]
    _gradients.refuse(
        {
            "gating_output": gating_output,
            "selection_bias": selection_bias,
            "expert_scale": expert_scale,
            "global_scale": global_scale,
            **(tensors or {}),
        }
    )
    own = dict(tensors or {})
    if hash_table is not None:
        own["hash_table"] = hash_table
    tokens, num_experts = (int(n) for n in gating_output.shape)
    topk = _limits.integer("topk", topk, 1, num_experts)
    if expert_budget is not None:
        expert_budget = _limits.integer("expert_budget", expert_budget, topk, num_experts)
    device = _frameworks.device_of(gating_output)
    ids = _frameworks.empty_like(gating_output, (tokens, topk), "int32", "topk_ids")
    weights = _frameworks.empty_like(gating_output, (tokens, topk), "float32", "topk_weights")
    if device != "cpu":
        _limits.refuse(banned_experts, expert_budget)
    if device == "cpu":
        _runtime.follow_threads()
    _router(device, num_experts, topk, router).route(
        gating_output,
        ids,
        weights,
        token_ids,
        selection_bias,
        expert_scale,
        global_scale,
        own,
        None,
        _frameworks.stream_of(gating_output, stream),
        _limits.flags_of(banned_experts, lambda: num_experts),
        expert_budget or 0,
    )
    return weights, ids


def _cast_ids(ids: Array, indices_type: Any) -> Array:
    if indices_type is None:
        return ids
    if _frameworks.is_torch(ids):
        return ids.to(indices_type)
    return ids.astype(indices_type)


def _token_expert_indices(ids: Array) -> Array:
    """[T, k] int32: j * T + i."""
    tokens, topk = (int(n) for n in ids.shape)
    if _frameworks.is_torch(ids):
        torch = _frameworks.torch()
        flat = torch.arange(tokens * topk, dtype=torch.int32, device=ids.device)
    else:
        import numpy

        flat = numpy.arange(tokens * topk, dtype="int32")
    return flat.reshape(topk, tokens).T


def fused_topk(
    hidden_states: Array | None,
    gating_output: Array,
    topk: int,
    renormalize: bool,
    indices_type: Any = None,
    scoring_func: str = "softmax",
) -> tuple[Array, Array, Array]:
    """The k best experts of each token by softmax or sigmoid of the logits.

    Args:
        hidden_states: [T, H]; only its number of rows is looked at, and it may be None.
        gating_output: logits [T, E] float32, float16 or bfloat16.
        renormalize: divide the weights by their sum.
        indices_type: dtype of the ids; int32 by default.
        scoring_func: "softmax", "sigmoid" or "sqrtsoftplus".

    Returns:
        topk_weights [T, k] float32, topk_ids [T, k], token_expert_indices [T, k] int32 with
        j * T + i at [i, j].
    """
    _check_pair(hidden_states, gating_output)
    _check_score(scoring_func)
    weights, ids = route(
        gating_output,
        topk,
        _rule(score=scoring_func, renormalize="sum" if renormalize else "none"),
    )
    return weights, _cast_ids(ids, indices_type), _token_expert_indices(ids)


def fused_topk_bias(
    hidden_states: Array | None,
    gating_output: Array,
    e_score_correction_bias: Array | None,
    topk: int,
    renormalize: bool,
    scoring_func: str = "softmax",
    indices_type: Any = None,
    input_tokens: Array | None = None,
    hash_indices_table: Array | None = None,
    routed_scaling_factor: float = 1.0,
) -> tuple[Array, Array]:
    """As `fused_topk`, with a bias that chooses and never weighs, or with ids from a hash table.

    Args:
        e_score_correction_bias: [E], added to the scores for choosing; or None.
        input_tokens: [T] token ids and hash_indices_table: [vocab, k] int32 or int64: ids are
            the table's rows, weights the scores at them.
        routed_scaling_factor: times the weights, after renormalising.

    Returns:
        topk_weights [T, k] float32 and topk_ids [T, k].
    """
    _check_pair(hidden_states, gating_output)
    _check_score(scoring_func)
    _refuse_gradients(gating_output, e_score_correction_bias)
    hashed = hash_indices_table is not None
    rows = 0
    if hash_indices_table is not None:
        rows, _ = _limits.matrix_shape("hash_indices_table", hash_indices_table, "shape [vocab, k]")
    biased = e_score_correction_bias is not None and not hashed
    router = _rule(
        name="hash" if hashed else "topk",
        score=scoring_func,
        has_selection_bias=biased,
        renormalize="sum" if renormalize else "none",
        epsilon=_PUBLISHED_EPSILON if renormalize else 0.0,
        scale=_limits.real("routed_scaling_factor", routed_scaling_factor),
        vocab_size=rows,
    )
    bias = _float_vector(e_score_correction_bias, "e_score_correction_bias") if biased else None
    if hashed and _frameworks.dtype_name(hash_indices_table) == "int64":
        hash_indices_table, input_tokens = _rows_of_tokens(hash_indices_table, input_tokens)
        router = dataclasses.replace(router, vocab_size=int(hash_indices_table.shape[0]))
    weights, ids = route(
        gating_output,
        topk,
        router,
        selection_bias=bias,
        token_ids=input_tokens if hashed else None,
        hash_table=hash_indices_table,
    )
    return weights, _cast_ids(ids, indices_type)


def _rows_of_tokens(table: Array, tokens: Array | None) -> tuple[Array, Array]:
    """What these tokens read of a table of 64-bit ids, as the int32 table of their rows, and the
    numbers of these. The whole table is not copied: it is large, and may change between calls."""
    size = int(table.shape[0])
    if tokens is None or len(_frameworks.shape_of(tokens, "input_tokens")) != 1:
        raise ConclaveValueError("input_tokens: expected token ids [T] for the hash table")
    tokens = tokens.to(table.device) if _frameworks.is_torch(table) else tokens
    known = (tokens >= 0) & (tokens < size)
    if _frameworks.device_of(table) == "cpu" and not bool(known.all()):
        at = known.tolist().index(False)
        raise ConclaveValueError(
            f"input_tokens: a token id is out of range at token {at}; found {int(tokens[at])}; "
            f"limit 0 to {size - 1}"
        )
    read = tokens * known if len(tokens) else [0]  # a table has a row at least
    found = table[read].clip(-(2**31), 2**31 - 1)
    if _frameworks.is_torch(table):
        torch = _frameworks.torch()
        return found.to(torch.int32), torch.where(known, torch.arange(len(tokens)).to(tokens), -1)
    numpy = sys.modules["numpy"]
    return found.astype("int32"), numpy.where(known, numpy.arange(len(tokens)), -1)


def grouped_topk(
    hidden_states: Array | None,
    gating_output: Array,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 0,
    topk_group: int = 0,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: Array | None = None,
) -> tuple[Array, Array]:
    """The k best experts out of the best groups of experts (DeepSeek).

    Without a bias a group is as good as its best expert, with one as the sum of its two best. The
    scale is applied whatever the number of groups; 0 or 1 group is plain top-k.

    Args:
        num_expert_group: E must divide by it. topk_group: groups that stay.
        e_score_correction_bias: [E], added to the scores for choosing.

    Returns:
        topk_weights [T, k] float32 and topk_ids [T, k] int32.

    Raises:
        ConclaveValueError: for groups that do not divide the experts, and for fewer experts in the
        kept groups than k.
    """
    _check_pair(hidden_states, gating_output)
    _check_score(scoring_func)
    _refuse_gradients(gating_output, e_score_correction_bias)
    biased = e_score_correction_bias is not None
    num_expert_group = _limits.integer("num_expert_group", num_expert_group, 0, _MOST_GROUPS)
    grouped = num_expert_group > 1
    router = _rule(
        score=scoring_func,
        has_selection_bias=biased,
        num_groups=num_expert_group if grouped else 1,
        topk_groups=topk_group if grouped else 1,
        group_score="top2_sum" if biased or not grouped else "max",
        renormalize="sum" if renormalize else "none",
        epsilon=_PUBLISHED_EPSILON if renormalize else 0.0,
        scale=_limits.real("routed_scaling_factor", routed_scaling_factor),
    )
    bias = _float_vector(e_score_correction_bias, "e_score_correction_bias") if biased else None
    return route(gating_output, topk, router, selection_bias=bias)
