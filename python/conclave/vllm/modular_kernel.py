"""Preparation, experts and combination in one module, as vLLM's modular kernel."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from conclave.errors import ConclaveRuntimeError, ConclaveValueError
from conclave.vllm import ubatching
from conclave.vllm.modular import (
    ExpertTokensMetadata,
    FusedMoEPermuteExpertsUnpermute,
    FusedMoEPrepareAndFinalize,
    count_expert_num_tokens,
    moe_problem_size,
)


class SharedResizableBuffer:
    """Memory that grows and is never given back."""

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None

    def get(
        self, shape: tuple[int, ...] | None, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """A view of this shape; None for the shape ()."""
        if not shape:
            return None
        count, held, device = math.prod(shape), self.buffer, torch.device(device)
        if held is None or held.numel() < count or held.device != device or held.dtype != dtype:
            held = self.buffer = torch.empty(count, device=device, dtype=dtype)
        return held[:count].view(*shape)


class _Buffers:
    def __init__(self) -> None:
        self.fused_out = SharedResizableBuffer()
        self.workspace13 = SharedResizableBuffer()
        self.workspace2 = SharedResizableBuffer()


def _chunk_scales(scales: torch.Tensor | None, start: int, end: int) -> torch.Tensor | None:
    """Rows of scales; one for all stays whole."""
    if scales is None or scales.numel() == 1:
        return scales
    return scales[start:end]


class FusedMoEModularKernel(torch.nn.Module):
    """One layer's kernel out of parts.

    Every instance has workspaces of its own: instances may run at once. Calls of one instance are
    to follow one another.

    Args:
        prepare_finalize, fused_experts: of one activation format.
        shared_experts: called with the rows of `forward`, which then returns (shared, routed).
        chunk_size: tokens that experts are given at once, where they can be cut.
    """

    def __init__(
        self,
        prepare_finalize: FusedMoEPrepareAndFinalize,
        fused_experts: FusedMoEPermuteExpertsUnpermute,
        shared_experts: torch.nn.Module | None = None,
        chunk_size: int = 32768,
    ) -> None:
        super().__init__()
        given = prepare_finalize.activation_format
        taken = fused_experts.activation_formats[0]
        if given != taken:
            raise ConclaveValueError(
                f"prepare_finalize: {type(prepare_finalize).__name__} gives {given}, "
                f"{type(fused_experts).__name__} takes {taken}"
            )
        if chunk_size < 1:
            raise ConclaveValueError(f"chunk_size: expected 1 or more, found {chunk_size}")
        self.prepare_finalize = prepare_finalize
        self.fused_experts = fused_experts
        self.shared_experts = shared_experts
        self.chunk_size = chunk_size
        # One set for each half of a batch that takes turns, for their rows are there at once.
        self._buffers_of: dict[int, _Buffers] = {}

    @property
    def _buffers_now(self) -> _Buffers:
        return self._buffers_of.setdefault(ubatching.dbo_current_ubatch_id(), _Buffers())

    def forward(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        inplace: bool = False,
        activation: str = "silu",
        global_num_experts: int = -1,
        expert_map: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
    ) -> Any:
        """The weighed sum of each token's experts [T, H]; arguments as of `fused_experts`.

        With shared experts inplace has no effect, since they read hidden_states afterwards.
        """
        module = self.shared_experts
        return self.run(
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            inplace=inplace and module is None,
            activation=activation,
            global_num_experts=global_num_experts,
            expert_map=expert_map,
            apply_router_weight_on_input=apply_router_weight_on_input,
            shared=None if module is None else lambda: module(hidden_states),
        )

    def run(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        inplace: bool = False,
        activation: Any = "silu",
        global_num_experts: int = -1,
        expert_map: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        shared: Callable[[], Any] | None = None,
    ) -> Any:
        """As `forward`; shared is called while results travel, and then (its value, sums) is
        returned. What experts leave to the caller is returned as it is."""
        if global_num_experts == -1:
            global_num_experts = int(w1.shape[0])
        if expert_map is not None and not self.fused_experts.supports_expert_map():
            raise ConclaveValueError(f"expert_map: {type(self.fused_experts).__name__} takes none")
        self._check_tokens(hidden_states, topk_ids)
        rows, scales, counts, ids, weights = self._prepare(
            hidden_states,
            topk_weights,
            topk_ids,
            global_num_experts,
            expert_map,
            apply_router_weight_on_input,
        )
        ids = topk_ids if ids is None else ids
        weights = topk_weights if weights is None else weights
        if rows.numel() == 0:  # no token reached this rank
            fused = torch.empty_like(rows, dtype=hidden_states.dtype)
        else:
            fused = self._run(
                hidden_states,
                rows,
                scales,
                counts,
                (w1, w2),
                (weights, ids),
                activation=activation,
                global_num_experts=global_num_experts,
                expert_map=expert_map,
                apply_router_weight_on_input=apply_router_weight_on_input,
            )
        if not isinstance(fused, torch.Tensor):
            if not self.prepare_finalize.supports_deferred_moe_finalize():
                raise ConclaveRuntimeError(
                    f"prepare_finalize: {type(self.prepare_finalize).__name__} does not leave sums "
                    f"to the caller, but {type(self.fused_experts).__name__} did"
                )
            return fused if shared is None else (shared(), fused)
        impl = self.fused_experts.finalize_weight_and_reduce_impl()
        output = hidden_states if inplace else self._new_output(hidden_states, impl)
        value = self._finalize(
            shared, output, fused, weights, ids, apply_router_weight_on_input, impl
        )
        return output if shared is None else (value, output)

    def _new_output(self, rows: torch.Tensor, impl: Any) -> torch.Tensor:
        """Memory of sums: zeros where something that is not ours may add to it."""
        finalize = "finalize_async" if self.prepare_finalize.supports_async() else "finalize"
        if _is_ours(self.prepare_finalize, finalize) and _is_ours(impl, "apply"):
            return torch.empty_like(rows)
        return torch.zeros_like(rows)

    def _check_tokens(self, hidden: torch.Tensor, ids: torch.Tensor) -> None:
        most = self.prepare_finalize.max_num_tokens_per_rank()
        if most is not None and hidden.shape[0] > most:
            raise ConclaveValueError(
                f"hidden_states: expected at most {most} tokens, found {hidden.shape[0]}"
            )
        dtype = self.prepare_finalize.topk_indices_dtype()
        if dtype is not None and ids.dtype != dtype:
            raise ConclaveValueError(f"topk_ids: expected {dtype}, found {ids.dtype}")

    def _prepare(self, *given: Any) -> Any:
        prepare: Any = self.prepare_finalize
        experts = self.fused_experts
        arguments = (*given, experts.quant_config)
        asynchronous = prepare.supports_async()
        call = prepare.prepare_async if asynchronous else prepare.prepare
        more = {}
        if _takes_defer(getattr(call, "__func__", call)):
            more["defer_input_quant"] = getattr(experts, "expects_unquantized_inputs", False)
        if not asynchronous:
            self._check_turns()
            return call(*arguments, **more)
        ubatching.dbo_maybe_run_recv_hook()
        return _complete(call(*arguments, **more))

    def _check_turns(self) -> None:
        if ubatching.dbo_enabled() and not self.prepare_finalize.supports_dbo():
            raise ConclaveRuntimeError(
                f"prepare_finalize: {type(self.prepare_finalize).__name__} is not asynchronous, so "
                "that halves of a batch cannot take turns around it"
            )

    def _finalize(self, shared: Callable[[], Any] | None, *given: Any) -> Any:
        """Combines, and runs the shared experts meanwhile where that can be."""
        if not self.prepare_finalize.supports_async():
            self._check_turns()
            self.prepare_finalize.finalize(*given)
            return None if shared is None else shared()
        pending = self.prepare_finalize.finalize_async(*given)
        value = None if shared is None else shared()
        _complete(pending)
        return value

    def _run(
        self,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        counts: ExpertTokensMetadata | None,
        matrices: tuple[torch.Tensor, torch.Tensor],
        routing: tuple[torch.Tensor, torch.Tensor],
        **rest: Any,
    ) -> Any:
        experts, (weights, ids) = self.fused_experts, routing
        local, tokens, n, k, top_k = moe_problem_size(rows, *matrices, ids)
        sizes = (n, k, top_k, rest["global_num_experts"], local)
        *_, shape, dtype = experts._shapes(hidden, rows, rest["activation"], tokens, *sizes, counts)
        fused: Any = self._buffers_now.fused_out.get(shape, rows.device, dtype)
        step = self.chunk_size if experts.supports_chunking() else max(tokens, 1)
        if step < tokens and shape[0] % tokens != 0:
            raise ConclaveRuntimeError(
                f"chunk_size: an output of {shape[0]} rows cannot be cut as {tokens} tokens"
            )
        for start in range(0, tokens, step):
            end = min(start + step, tokens)
            whole = end - start == tokens
            factor = shape[0] // tokens
            part = slice(start, end)
            left = self._run_part(
                fused if whole else fused[start * factor : end * factor],
                hidden,
                rows if whole else rows[part],
                matrices,
                (weights, ids) if whole else (weights[part], ids[part]),
                sizes,
                a1q_scale=_chunk_scales(scales, start, end),
                a2_scale=_chunk_scales(experts.a2_scale, start, end),
                expert_tokens_meta=counts
                if whole or counts is None
                else _counted_again(counts, ids[part], local, rest["expert_map"]),
                **rest,
            )
            if left is not None and not isinstance(left, torch.Tensor):
                return self._left_whole(left, whole)
        return fused

    def _left_whole(self, left: Any, whole: bool) -> Any:
        if not whole:
            raise ConclaveRuntimeError(
                f"chunk_size: {type(self.fused_experts).__name__} leaves sums to the caller, which "
                "parts of the tokens cannot"
            )
        return left

    def _run_part(
        self,
        fused: torch.Tensor,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        matrices: tuple[torch.Tensor, torch.Tensor],
        routing: tuple[torch.Tensor, torch.Tensor],
        sizes: tuple[int, ...],
        **rest: Any,
    ) -> Any:
        tokens = rows.shape[0] if rows.ndim == 2 else rows.shape[1]
        counts = rest["expert_tokens_meta"]
        shape13, shape2, shape, dtype = self.fused_experts._shapes(
            hidden, rows, rest["activation"], tokens, *sizes, counts
        )
        if tuple(fused.shape) != tuple(shape):
            raise ConclaveRuntimeError(
                f"fused_out: expected shape {list(shape)}, found {list(fused.shape)}"
            )
        buffers = self._buffers_now
        return self.fused_experts.apply(
            fused,
            rows,
            *matrices,
            topk_weights=routing[0],
            topk_ids=routing[1],
            workspace13=buffers.workspace13.get(shape13, rows.device, dtype),
            workspace2=buffers.workspace2.get(shape2, rows.device, dtype),
            **rest,
        )


def _complete(pending: Any) -> Any:
    """The second half of an asynchronous call, after its hook: which the other half of a batch runs
    where there is one, before it waits for rows of its own."""
    hook, receive = pending if isinstance(pending, tuple) else (None, pending)
    if hook is not None and ubatching.dbo_enabled():
        ubatching.dbo_register_recv_hook(hook)
        ubatching.dbo_yield()
    elif hook is not None:
        hook()
    return receive()


def _is_ours(piece: Any, method: str) -> bool:
    """Whether the package wrote a method, which then leaves no element of its output as it was."""
    module = getattr(getattr(type(piece), method, None), "__module__", None) or ""
    replaced = method in getattr(piece, "__dict__", {})
    return not replaced and module.startswith(f"{__package__}.")


@functools.cache
def _takes_defer(function: Callable[..., Any]) -> bool:
    """Whether a class's `prepare` has newest vLLM's last argument."""
    return "defer_input_quant" in inspect.signature(function).parameters


def _counted_again(
    counts: ExpertTokensMetadata,
    ids: torch.Tensor,
    local: int,
    expert_map: torch.Tensor | None,
) -> ExpertTokensMetadata:
    """Rows of each expert among these tokens."""
    rows = count_expert_num_tokens(ids, local, expert_map)
    return ExpertTokensMetadata(
        rows, rows.cpu() if counts.expert_num_tokens_cpu is not None else None
    )
