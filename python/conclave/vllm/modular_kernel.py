"""Preparation, experts and combination in one module, as vLLM's modular kernel."""

from __future__ import annotations

import math
from typing import Any

import torch

from conclave.errors import ConclaveRuntimeError, ConclaveValueError
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
        self._buffers_of = _Buffers()

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
        keep = not inplace or self.shared_experts is not None
        output = torch.empty_like(hidden_states) if keep else hidden_states
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
        shared = self._finalize(
            hidden_states,
            output,
            fused,
            weights,
            ids,
            apply_router_weight_on_input,
            self.fused_experts.finalize_weight_and_reduce_impl(),
        )
        return output if self.shared_experts is None else (shared, output)

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
        arguments = (*given, self.fused_experts.quant_config)
        if not self.prepare_finalize.supports_async():
            return self.prepare_finalize.prepare(*arguments)
        return _complete(self.prepare_finalize.prepare_async(*arguments))

    def _finalize(self, hidden: torch.Tensor, *given: Any) -> torch.Tensor | None:
        """Combines, and runs the shared experts meanwhile where that can be."""
        if not self.prepare_finalize.supports_async():
            self.prepare_finalize.finalize(*given)
            return None if self.shared_experts is None else self.shared_experts(hidden)
        pending = self.prepare_finalize.finalize_async(*given)
        shared = None if self.shared_experts is None else self.shared_experts(hidden)
        _complete(pending)
        return shared

    def _run(
        self,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        counts: ExpertTokensMetadata | None,
        matrices: tuple[torch.Tensor, torch.Tensor],
        routing: tuple[torch.Tensor, torch.Tensor],
        **rest: Any,
    ) -> torch.Tensor:
        experts, (weights, ids) = self.fused_experts, routing
        local, tokens, n, k, top_k = moe_problem_size(rows, *matrices, ids)
        sizes = {
            "N": n,
            "K": k,
            "topk": top_k,
            "global_num_experts": rest["global_num_experts"],
            "local_num_experts": local,
        }
        *_, shape, dtype = experts.workspace_shapes(
            hidden, rows, tokens, expert_tokens_meta=counts, **sizes
        )
        fused: Any = self._buffers_of.fused_out.get(shape, rows.device, dtype)
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
            self._run_part(
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
        return fused

    def _run_part(
        self,
        fused: torch.Tensor,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        matrices: tuple[torch.Tensor, torch.Tensor],
        routing: tuple[torch.Tensor, torch.Tensor],
        sizes: dict[str, int],
        **rest: Any,
    ) -> None:
        tokens = rows.shape[0] if rows.ndim == 2 else rows.shape[1]
        counts = rest["expert_tokens_meta"]
        shape13, shape2, shape, dtype = self.fused_experts.workspace_shapes(
            hidden, rows, tokens, expert_tokens_meta=counts, **sizes
        )
        if tuple(fused.shape) != tuple(shape):
            raise ConclaveRuntimeError(
                f"fused_out: expected shape {list(shape)}, found {list(fused.shape)}"
            )
        buffers = self._buffers_of
        self.fused_experts.apply(
            fused,
            rows,
            *matrices,
            *routing,
            workspace13=buffers.workspace13.get(shape13, rows.device, dtype),
            workspace2=buffers.workspace2.get(shape2, rows.device, dtype),
            **rest,
        )


def _complete(pending: Any) -> Any:
    """The second half of an asynchronous call, after its hook."""
    hook, receive = pending if isinstance(pending, tuple) else (None, pending)
    if hook is not None:
        hook()
    return receive()


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
