"""Preparation of rows within one rank, in both formats."""

from __future__ import annotations

import torch

from conclave.errors import ConclaveValueError
from conclave.vllm.modular import (
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEPrepareAndFinalize,
    PrepareResultType,
    TopKWeightAndReduce,
)
from conclave.vllm.quant import FusedMoEQuantConfig
from conclave.vllm.reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNaiveBatched,
)


def weighed_rows(a1: torch.Tensor, topk_weights: torch.Tensor, on_input: bool) -> torch.Tensor:
    """Rows times their weight. One row serves all choices of a token, so that k must be 1."""
    if not on_input:
        return a1
    if topk_weights.shape[1] != 1:
        raise ConclaveValueError(
            f"apply_router_weight_on_input: expected 1 choice per token, "
            f"found {topk_weights.shape[1]}"
        )
    return a1 * topk_weights.to(a1.dtype)


class MoEPrepareAndFinalizeNoEP(FusedMoEPrepareAndFinalize):
    """Rows stay where they are."""

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> PrepareResultType:
        return weighed_rows(a1, topk_weights, apply_router_weight_on_input), None, None, None, None

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> None:
        if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            weight_and_reduce_impl = TopKWeightAndReduceContiguous()
        weight_and_reduce_impl.apply(
            output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
        )

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        return None

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    def num_dispatchers(self) -> int:
        return 1


class BatchedPrepareAndFinalize(FusedMoEPrepareAndFinalize):
    """Copies rows to [E, max_num_tokens, H], those of an expert in the order of tokens. A token
    that chooses an expert twice has one row there, which counts twice.

    Args:
        max_num_tokens: the most tokens of a call.
        num_local_experts: E of this rank. rank: whose experts are rank * E and on.
    """

    def __init__(
        self,
        max_num_tokens: int,
        num_local_experts: int,
        num_dispatchers: int = 1,
        rank: int = 0,
    ) -> None:
        self.max_num_tokens = max_num_tokens
        self.num_local_experts = num_local_experts
        self.rank = rank
        self._num_dispatchers = num_dispatchers

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> PrepareResultType:
        if a1.shape[0] > self.max_num_tokens:
            raise ConclaveValueError(
                f"a1: expected at most {self.max_num_tokens} tokens, found {a1.shape[0]}"
            )
        a1 = weighed_rows(a1, topk_weights, apply_router_weight_on_input)
        experts, first = self.num_local_experts, self.rank * self.num_local_experts
        rows = a1.new_zeros((experts, self.max_num_tokens, a1.shape[1]))
        counts = torch.zeros(experts, dtype=torch.int32, device=a1.device)
        for expert in range(experts):
            tokens = torch.nonzero((topk_ids == first + expert).any(dim=1), as_tuple=True)[0]
            rows[expert, : tokens.numel()] = a1[tokens]
            counts[expert] = tokens.numel()
        return rows, None, ExpertTokensMetadata(counts), None, None

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> None:
        if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            weight_and_reduce_impl = TopKWeightAndReduceNaiveBatched(self.rank)
        weight_and_reduce_impl.apply(
            output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
        )

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.BatchedExperts

    def topk_indices_dtype(self) -> torch.dtype | None:
        return None

    def max_num_tokens_per_rank(self) -> int | None:
        return self.max_num_tokens

    def num_dispatchers(self) -> int:
        return self._num_dispatchers
