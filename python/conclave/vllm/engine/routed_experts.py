"""The owner of the experts' parameters as newest vLLM has it, with what its loaders call."""

from __future__ import annotations

import torch

from conclave.errors import ConclaveValueError
from conclave.vllm._modules import members_of
from conclave.vllm.engine.mapped_loading import Tensors, load_by_mapping, published_mapping
from conclave.vllm.layer import FusedMoE
from conclave.vllm.mapping import Row


class RoutedExperts(FusedMoE):
    """A `FusedMoE` with the helpers of vLLM's loaders, for classes that derive from either. Weights
    of its own are not padded; parameters of a program's may be."""

    def get_expert_mapping(
        self,
        ckpt_gate_proj_name: str | None = None,
        ckpt_down_proj_name: str | None = None,
        ckpt_up_proj_name: str | None = None,
        include_fused: bool = False,
    ) -> list[Row]:
        """Rows for this layer's tensors; by default with the names that it was made with."""
        gate, down, up = (*members_of(self.expert_mapping), None, None, None)[:3]
        gated = self.activation.is_gated
        return published_mapping(
            ckpt_gate_proj_name or gate or "gate_proj",
            ckpt_down_proj_name or down or "down_proj",
            ckpt_up_proj_name or up or ("up_proj" if gated else None),
            self.logical_num_experts,
            self.global_num_experts - self.logical_num_experts,
            "",
            include_fused=include_fused,
            is_gated=gated,
        )

    def load_weights(self, weights: Tensors) -> list[str]:
        """As `FusedMoE.load_weights`. Called with a module of another class it loads by that
        module's `get_expert_mapping`, and its parameters' `weight_loader`."""
        if isinstance(self, FusedMoE):
            return super().load_weights(weights)
        return list(load_by_mapping(self, weights))

    build_expert_params_mapping = staticmethod(published_mapping)

    @staticmethod
    def _orient_fused_weight(
        fused_weight: torch.Tensor, is_fused_checkpoint_transposed: bool
    ) -> torch.Tensor:
        """A tensor of all experts as [E, out, in]."""
        return fused_weight.mT if is_fused_checkpoint_transposed else fused_weight

    @staticmethod
    def _get_hidden_dim(shard_dim: int, ndim: int) -> int:
        """The axis of hidden columns of a matrix, or of a stack of them, whose axis of the
        intermediate size is shard_dim. Vectors have one axis."""
        if ndim < 2:
            return 0
        axes = {ndim - 2, ndim - 1}
        if shard_dim not in axes:
            raise ConclaveValueError(
                f"shard_dim: {shard_dim} is not a valid data dimension of {ndim} axes, expected "
                f"{ndim - 2} or {ndim - 1}"
            )
        return (axes - {shard_dim}).pop()

    @staticmethod
    def _narrow_expert_data_for_padding(
        expert_data: torch.Tensor,
        loaded_weight: torch.Tensor,
        hidden_dim: int,
        shard_dim: int | None = None,
    ) -> torch.Tensor:
        """The part of a padded parameter that a tensor fills, as a view: axes hidden_dim and
        shard_dim are cut where the tensor is shorter."""
        sizes = dict(enumerate(loaded_weight.shape))
        for axis in (hidden_dim, shard_dim):
            if axis in sizes and axis < expert_data.ndim:  # type: ignore[operator]
                size = min(sizes[axis], expert_data.shape[axis])  # type: ignore[index]
                expert_data = expert_data.narrow(axis, 0, size)  # type: ignore[arg-type]
        return expert_data

    @staticmethod
    def _to_scalar(loaded_weight: torch.Tensor) -> torch.Tensor:
        """A scale of one number without axes. Raises RuntimeError for more numbers."""
        return loaded_weight.reshape(())
