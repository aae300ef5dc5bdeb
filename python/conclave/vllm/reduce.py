"""What is left to do after the experts: weigh and sum, or nothing."""

from __future__ import annotations

import torch

from conclave.errors import ConclaveRuntimeError, ConclaveValueError
from conclave.vllm.modular import TopKWeightAndReduce


def _output_like(
    output: torch.Tensor | None, rows: torch.Tensor, shape: tuple[int, ...]
) -> torch.Tensor:
    if output is None:
        return torch.empty(shape, dtype=rows.dtype, device=rows.device)
    if tuple(output.shape) != shape:
        raise ConclaveValueError(
            f"output: expected shape {list(shape)}, found {list(output.shape)}"
        )
    return output


class TopKWeightAndReduceDelegate(TopKWeightAndReduce):
    """Finalize does it. `apply` raises."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TopKWeightAndReduceDelegate)

    __hash__ = None  # type: ignore[assignment]

    def apply(
        self,
        output: torch.Tensor | None,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> torch.Tensor:
        raise ConclaveRuntimeError("weight_and_reduce_impl: finalize must weigh and sum itself")


class TopKWeightAndReduceNoOP(TopKWeightAndReduce):
    """The experts did it: [T, H] is copied, where it is not in its place."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TopKWeightAndReduceNoOP)

    __hash__ = None  # type: ignore[assignment]

    def apply(
        self,
        output: torch.Tensor | None,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> torch.Tensor:
        if output is None:
            return fused_expert_output
        output = _output_like(output, fused_expert_output, tuple(fused_expert_output.shape))
        if output.data_ptr() != fused_expert_output.data_ptr() or output.numel() == 0:
            output.copy_(fused_expert_output)
        return output


class TopKWeightAndReduceContiguous(TopKWeightAndReduce):
    """[T, k, H], or [T k, H], to [T, H]. The sum is float32, rounded once."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TopKWeightAndReduceContiguous)

    __hash__ = None  # type: ignore[assignment]

    def apply(
        self,
        output: torch.Tensor | None,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> torch.Tensor:
        tokens, top_k = topk_ids.shape
        hidden = fused_expert_output.shape[-1]
        if fused_expert_output.numel() != tokens * top_k * hidden:
            raise ConclaveValueError(
                f"fused_expert_output: expected {tokens * top_k} rows, {top_k} for each token, "
                f"found shape {list(fused_expert_output.shape)}"
            )
        rows = fused_expert_output.reshape(tokens, top_k, hidden)
        output = _output_like(output, rows, (tokens, hidden))
        wide = rows.float()
        if not apply_router_weight_on_input:
            wide = wide * topk_weights.float().unsqueeze(-1)
        output.copy_(wide.sum(dim=1))
        return output


class TopKWeightAndReduceNaiveBatched(TopKWeightAndReduce):
    """[E, tokens, H] of rank `rank`'s experts, rows of each in the order of tokens, to [T, H]."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TopKWeightAndReduceNaiveBatched) and other.rank == self.rank

    __hash__ = None  # type: ignore[assignment]

    def apply(
        self,
        output: torch.Tensor | None,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> torch.Tensor:
        experts, _, hidden = fused_expert_output.shape
        output = _output_like(output, fused_expert_output, (topk_ids.shape[0], hidden))
        total = torch.zeros(output.shape, dtype=torch.float32, device=output.device)
        first = self.rank * experts
        weights = 1.0 if apply_router_weight_on_input else topk_weights.float()
        for expert in range(experts):
            chosen = topk_ids == first + expert
            tokens = torch.nonzero(chosen.any(dim=1), as_tuple=True)[0]
            rows = fused_expert_output[expert, : tokens.numel()].float()
            counted = torch.where(chosen, weights, 0.0).sum(dim=1)[tokens]
            total.index_add_(0, tokens, rows * counted.unsqueeze(1))
        output.copy_(total)
        return output
