"""The operators by which compiled graphs run a `FusedMoE`: a graph sees tensors, and no more of the
layer than its number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from conclave.errors import ConclaveValueError
from conclave.vllm._registry import static_forward_context


def _layer(handle: torch.Tensor | None, number: int) -> Any:
    return static_forward_context.numbered(number if handle is None else int(handle))


def _routed(
    hidden_states: torch.Tensor,
    routed: torch.Tensor,
    router_logits: torch.Tensor,
    input_ids: torch.Tensor | None,
    token_count: int | None,
    token_count_tensor: torch.Tensor | None,
    padding_mask: torch.Tensor | None,
    rank_tokens: torch.Tensor | None,
    handle: torch.Tensor | None,
    number: int,
    is_wide: bool,
    has_share: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    count = token_count if token_count_tensor is None else token_count_tensor
    layer = _layer(handle, number)
    with torch.no_grad():
        out, share = layer._routed_sum(
            hidden_states,
            routed,
            router_logits,
            input_ids,
            count,
            padding_mask,
            rank_tokens,
            is_wide,
        )
    if out.untyped_storage().data_ptr() in {
        tensor.untyped_storage().data_ptr() for tensor in (hidden_states, routed)
    }:
        out = out.clone()  # results of an operator are memory of their own
    if not has_share:
        share = torch.empty(0, dtype=torch.float32, device=out.device)
    return out.contiguous(), share.contiguous()


def _routed_fake(
    hidden_states: torch.Tensor,
    routed: torch.Tensor,
    router_logits: torch.Tensor,
    input_ids: torch.Tensor | None,
    token_count: int | None,
    token_count_tensor: torch.Tensor | None,
    padding_mask: torch.Tensor | None,
    rank_tokens: torch.Tensor | None,
    handle: torch.Tensor | None,
    number: int,
    is_wide: bool,
    has_share: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = routed.new_empty(routed.shape, dtype=torch.float32 if is_wide else routed.dtype)
    return out, routed.new_empty((len(routed), 1) if has_share else (0,), dtype=torch.float32)


def _summed(rows: torch.Tensor, handle: torch.Tensor | None, number: int) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = _layer(handle, number)._sum_over_ranks(rows.clone())
    return found.contiguous()


def _summed_fake(rows: torch.Tensor, handle: torch.Tensor | None, number: int) -> torch.Tensor:
    return rows.new_empty(rows.shape)


def _refuse_backward(*_: Any) -> Any:
    raise ConclaveValueError(
        "hidden_states: they or the logits require gradients, which are not computed here; use "
        "torch.no_grad()"
    )


def _counted(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The same where EPLB counts. A graph may give a copy of the counts, which it writes back: what
    is new goes there, and the layer's own stay as they were."""
    load, (handle, number) = given[-1], given[8:10]
    own = _layer(handle, number).eplb_state.expert_load_view
    if own.data_ptr() == load.data_ptr():
        return _routed(*given[:-1])
    before = own.clone()
    found = _routed(*given[:-1])
    load += own - before
    own.copy_(before)
    return found


def _counted_fake(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _routed_fake(*given[:-1])


_ROUTED = (
    "Tensor hidden_states, Tensor routed, Tensor router_logits, Tensor? input_ids, "
    "SymInt? token_count, Tensor? token_count_tensor, Tensor? padding_mask, "
    "Tensor? rank_tokens, Tensor? handle, int number, bool is_wide, bool has_share"
)


def _define(
    name: str,
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    changed: tuple[str, ...] = (),
) -> None:
    name = f"conclave::{name}"
    torch.library.custom_op(name, function, mutates_args=changed, schema=schema)
    torch.library.register_fake(name, fake)
    if not changed:  # torch has its own words for those that change an argument
        torch.library.register_autograd(name, _refuse_backward)


_define("fused_moe", f"({_ROUTED}) -> (Tensor, Tensor)", _routed, _routed_fake)
_define(
    "fused_moe_counted",
    f"({_ROUTED}, Tensor(a!) expert_load) -> (Tensor, Tensor)",
    _counted,
    _counted_fake,
    ("expert_load",),
)
_define(
    "sum_over_ranks",
    "(Tensor rows, Tensor? handle, int number) -> Tensor",
    _summed,
    _summed_fake,
)


def routed_sum(
    layer: Any,
    hidden: torch.Tensor,
    routed: torch.Tensor,
    logits: torch.Tensor,
    input_ids: torch.Tensor | None,
    num_tokens: int | torch.Tensor | None,
    mask: torch.Tensor | None,
    rank_tokens: Sequence[int] | torch.Tensor | None,
    wide: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`_routed_sum` of a layer as one node of a graph."""
    is_tensor = isinstance(num_tokens, torch.Tensor)
    has_share = layer._has_zero_experts
    given = (
        hidden,
        routed,
        logits,
        input_ids,
        None if is_tensor else num_tokens,
        num_tokens if is_tensor else None,
        mask,
        _as_vector(rank_tokens),
        *_of(layer, routed),
        wide,
        has_share,
    )
    if layer.enable_eplb:
        layer.eplb_state.check()
        load = layer.eplb_state.expert_load_view
        out, share = torch.ops.conclave.fused_moe_counted(*given, load)
    else:
        out, share = torch.ops.conclave.fused_moe(*given)
    return out, share if has_share else None


def _as_vector(counts: Sequence[int] | torch.Tensor | None) -> torch.Tensor | None:
    if counts is None or isinstance(counts, torch.Tensor):
        return counts
    return torch.tensor(counts, dtype=torch.int64)


def sum_over_ranks(layer: Any, rows: torch.Tensor) -> torch.Tensor:
    """`_sum_over_ranks` of a layer as one node of a graph."""
    found: torch.Tensor = torch.ops.conclave.sum_over_ranks(rows, *_of(layer, rows))
    return found


def _of(layer: Any, rows: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """What a graph finds the layer by. On the CPU a tensor, which is read when the graph runs, so
    that equal layers share a graph; on a GPU a number of the graph, as nothing waits for it."""
    if rows.device.type == "cpu":
        return layer._handle, 0
    return None, layer._number
