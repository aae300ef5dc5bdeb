"""Conclave's experts behind vLLM's interface of experts."""

from __future__ import annotations

from typing import Any

import torch

from conclave.errors import ConclaveUnsupportedError, ConclaveValueError
from conclave.vllm.experts import fused_experts
from conclave.vllm.modular import (
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEPermuteExpertsUnpermute,
    TopKWeightAndReduce,
)
from conclave.vllm.reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)

_FORMATS = FusedMoEActivationFormat


def _refuse_scales(a1q_scale: torch.Tensor | None) -> None:
    if a1q_scale is not None:
        raise ConclaveUnsupportedError(
            "a1q_scale: rows are quantised by the experts; prepare must leave them as they are"
        )


def _ones(ids: torch.Tensor) -> torch.Tensor:
    return torch.ones(ids.shape, dtype=torch.float32, device=ids.device)


class ConclaveExperts(FusedMoEPermuteExpertsUnpermute):
    """Rows [T, H] to weighed sums [T, H], in one pass without a workspace of the caller's."""

    @property
    def activation_formats(self) -> tuple[FusedMoEActivationFormat, FusedMoEActivationFormat]:
        return _FORMATS.Standard, _FORMATS.Standard

    def supports_chunking(self) -> bool:
        return True

    def supports_expert_map(self) -> bool:
        return True

    def workspace_shapes(
        self,
        a: torch.Tensor,
        aq: torch.Tensor,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: ExpertTokensMetadata | None,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.dtype]:
        return (), (), (M, K), a.dtype

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: str,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor | None,
        workspace2: torch.Tensor | None,
        expert_tokens_meta: ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        _refuse_scales(a1q_scale)
        fused_experts(
            hidden_states,
            w1,
            w2,
            _ones(topk_ids) if apply_router_weight_on_input else topk_weights,
            topk_ids,
            activation=activation,
            global_num_experts=global_num_experts,
            expert_map=expert_map,
            quant_config=self.quant_config,
            out=output,
        )


class UnreducedConclaveExperts(ConclaveExperts):
    """Rows [T, H] to the unweighed rows of all choices [T, k, H], 0 where no expert is local."""

    def workspace_shapes(
        self,
        a: torch.Tensor,
        aq: torch.Tensor,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: ExpertTokensMetadata | None,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.dtype]:
        """No workspace; output [M, topk, K]."""
        return (), (), (M, topk, K), a.dtype

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return TopKWeightAndReduceContiguous()

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: str,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        *rest: Any,
        **more: Any,
    ) -> None:
        _refuse_scales(a1q_scale)
        top_k = topk_ids.shape[1]
        ids = topk_ids.reshape(-1, 1)
        fused_experts(
            hidden_states.repeat_interleave(top_k, dim=0),
            w1,
            w2,
            _ones(ids),
            ids,
            activation=activation,
            global_num_experts=global_num_experts,
            expert_map=expert_map,
            quant_config=self.quant_config,
            out=output.view(-1, hidden_states.shape[1]),
        )


class BatchedConclaveExperts(FusedMoEPermuteExpertsUnpermute):
    """Rows [E, tokens, H] sorted by expert to unweighed rows of the same shape; rows behind an
    expert's count are 0."""

    @property
    def activation_formats(self) -> tuple[FusedMoEActivationFormat, FusedMoEActivationFormat]:
        return _FORMATS.BatchedExperts, _FORMATS.BatchedExperts

    def supports_chunking(self) -> bool:
        return False

    def supports_expert_map(self) -> bool:
        return False

    def workspace_shapes(
        self,
        a: torch.Tensor,
        aq: torch.Tensor,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: ExpertTokensMetadata | None,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.dtype]:
        return (), (), (local_num_experts, M, K), a.dtype

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return TopKWeightAndReduceDelegate()

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: str,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor | None,
        workspace2: torch.Tensor | None,
        expert_tokens_meta: ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        _refuse_scales(a1q_scale)
        if expert_tokens_meta is None:
            raise ConclaveValueError("expert_tokens_meta: rows by expert need their counts")
        experts, tokens, hidden = hidden_states.shape
        position = torch.arange(tokens, device=hidden_states.device).unsqueeze(0)
        expert = torch.arange(experts, device=hidden_states.device).unsqueeze(1)
        held = position < expert_tokens_meta.expert_num_tokens.unsqueeze(1)
        ids = torch.where(held, expert, -1).to(torch.int32).reshape(-1, 1)
        fused_experts(
            hidden_states.reshape(-1, hidden),
            w1,
            w2,
            _ones(ids),
            ids,
            activation=activation,
            quant_config=self.quant_config,
            out=output.view(-1, hidden),
        )
