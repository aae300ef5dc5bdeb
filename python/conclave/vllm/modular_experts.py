"""Conclave's experts behind vLLM's interface of experts."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from conclave import _gradients
from conclave.errors import ConclaveValueError
from conclave.layer import Layer
from conclave.vllm._arithmetic import scales_and_biases
from conclave.vllm._checks import check_tokens
from conclave.vllm._quantised_rows import values_of_rows
from conclave.vllm.experts import experts_layer
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
_ALIGNMENT = 64  # of a layer's workspace


def _ones(ids: torch.Tensor) -> torch.Tensor:
    return torch.ones(ids.shape, dtype=torch.float32, device=ids.device)


class _Experts(FusedMoEPermuteExpertsUnpermute):
    """Runs the packed layer of the weights. From the second call on workspace13 is its scratch
    memory, where it is large enough; before, the layer and its needs are not known."""

    _layer: weakref.ref[Layer] | None = None

    def _scratch(self, tokens: int, dtype: torch.dtype) -> tuple[int, ...]:
        """The shape of workspace13 for so many rows of the layer."""
        layer = None if self._layer is None else self._layer()
        if layer is None:
            return ()
        return (-(-(layer.workspace_bytes(tokens) + _ALIGNMENT) // dtype.itemsize),)

    def _run(
        self,
        rows: torch.Tensor,
        matrices: tuple[torch.Tensor, torch.Tensor],
        routing: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        workspace: torch.Tensor | None,
        **options: Any,
    ) -> None:
        weights, ids = routing
        check_tokens(rows, weights, ids)
        _gradients.refuse(
            {
                "hidden_states": rows,
                "w1": matrices[0],
                "w2": matrices[1],
                "topk_weights": weights,
                **scales_and_biases(self.quant_config),
            }
        )
        experts = experts_layer(
            *matrices, int(ids.shape[1]), quant_config=self.quant_config, **options
        )
        self._layer = weakref.ref(experts.layer)
        needed = experts.layer.workspace_bytes(int(rows.shape[0]))
        scratch = _aligned(workspace, needed, rows.device)
        experts.run(rows, ids, weights, output, workspace=scratch)


def _aligned(
    workspace: torch.Tensor | None, needed: int, device: torch.device
) -> torch.Tensor | None:
    """Bytes of a workspace from the first aligned one on; None where they are too few."""
    if workspace is None or workspace.device != device or not workspace.is_contiguous():
        return None
    start = -workspace.data_ptr() % _ALIGNMENT
    held = workspace.view(-1).view(torch.uint8)[start:]
    return held if needed <= held.numel() and held.numel() else None


class ConclaveExperts(_Experts):
    """Rows [T, H] to weighed sums [T, H], in one pass."""

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
        return self._scratch(M, a.dtype), (), (M, K), a.dtype

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
        self._run(
            values_of_rows(hidden_states, a1q_scale, self.block_shape),
            (w1, w2),
            (_ones(topk_ids) if apply_router_weight_on_input else topk_weights, topk_ids),
            output,
            workspace13,
            activation=activation,
            global_num_experts=global_num_experts,
            expert_map=expert_map,
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
        """Output [M, topk, K]."""
        return self._scratch(M * topk, a.dtype), (), (M, topk, K), a.dtype

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
        a2_scale: torch.Tensor | None = None,
        workspace13: torch.Tensor | None = None,
        *rest: Any,
        **more: Any,
    ) -> None:
        top_k = topk_ids.shape[1]
        ids = topk_ids.reshape(-1, 1)
        rows = values_of_rows(hidden_states, a1q_scale, self.block_shape)
        self._run(
            rows.repeat_interleave(top_k, dim=0),
            (w1, w2),
            (_ones(ids), ids),
            output.view(-1, hidden_states.shape[1]),
            workspace13,
            activation=activation,
            global_num_experts=global_num_experts,
            expert_map=expert_map,
        )


class BatchedConclaveExperts(_Experts):
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
        scratch = self._scratch(local_num_experts * M, a.dtype)
        return scratch, (), (local_num_experts, M, K), a.dtype

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
        if expert_tokens_meta is None:
            raise ConclaveValueError("expert_tokens_meta: rows by expert need their counts")
        experts, tokens, hidden = hidden_states.shape
        position = torch.arange(tokens, device=hidden_states.device).unsqueeze(0)
        expert = torch.arange(experts, device=hidden_states.device).unsqueeze(1)
        held = position < expert_tokens_meta.expert_num_tokens.unsqueeze(1)
        ids = torch.where(held, expert, -1).to(torch.int32).reshape(-1, 1)
        rows = values_of_rows(hidden_states, a1q_scale, self.block_shape)
        self._run(
            rows.reshape(-1, hidden),
            (w1, w2),
            (_ones(ids), ids),
            output.view(-1, hidden),
            workspace13,
            activation=activation,
        )
