"""Newest vLLM's interfaces of the modular kernel: experts that know their layer, kernels that route
themselves, and sums that are left to the caller.

`FusedMoEKernel` runs both kinds. Classes of the older interface (`modular.py`) go with these where
arguments allow: `MoEPrepareAndFinalizeNoEP` prepares rows for experts of either.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import torch

from conclave.errors import ConclaveTypeError, ConclaveValueError
from conclave.vllm._activate import ApplyMoEActivationConfig, activate
from conclave.vllm.activation import MoEActivation, parse_activation
from conclave.vllm.modular import (
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEPermuteExpertsUnpermute,
    FusedMoEPrepareAndFinalize,
    moe_problem_size,
)
from conclave.vllm.modular_kernel import FusedMoEModularKernel
from conclave.vllm.parallel import FusedMoEConfig
from conclave.vllm.quant import FusedMoEQuantConfig

_FORMATS = FusedMoEActivationFormat

FusedMoEPrepareAndFinalizeModular = FusedMoEPrepareAndFinalize


@dataclasses.dataclass
class UnfinalizedMoEOutput:
    """Rows of choices that are neither weighed nor summed yet."""

    gemm2_permuted: torch.Tensor  # [rows, H]
    expert_weights: torch.Tensor  # [T, k]
    expanded_idx_to_permuted_idx: torch.Tensor  # [T, k] int32: the row of a choice, -1: none here
    route_major: bool = False  # row t k + j is choice j of token t

    def finalize(self) -> torch.Tensor:
        """The weighed sums [T, H], in float32 and rounded once to the rows' type."""
        places = self.expanded_idx_to_permuted_idx.long()
        if places.shape != self.expert_weights.shape or places.ndim != 2:
            raise ConclaveValueError(
                "expanded_idx_to_permuted_idx: expected the shape [T, k] of expert_weights "
                f"{list(self.expert_weights.shape)}, found {list(places.shape)}"
            )
        count = self.gemm2_permuted.shape[0]
        if places.numel() and not -1 <= int(places.min()) <= int(places.max()) < count:
            raise ConclaveValueError(
                f"expanded_idx_to_permuted_idx: expected -1 to {count - 1}, found "
                f"{int(places.min())} to {int(places.max())}"
            )
        held = (places >= 0).unsqueeze(-1)
        rows = self.gemm2_permuted.float()[places.clamp(min=0)] if count else held.float()
        weighed = torch.where(held, rows * self.expert_weights.float().unsqueeze(-1), 0.0)
        return weighed.sum(dim=1).to(self.gemm2_permuted.dtype)


class FusedMoEPrepareAndFinalizeMonolithic(abc.ABC):
    """Brings rows to kernels that route themselves, and back."""

    @property
    @abc.abstractmethod
    def activation_format(self) -> FusedMoEActivationFormat:
        """Of what `prepare` returns."""

    @abc.abstractmethod
    def prepare(
        self,
        a1: torch.Tensor,
        router_logits: torch.Tensor,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Rows, their scales and logits."""

    @abc.abstractmethod
    def finalize(self, fused_expert_output: torch.Tensor) -> torch.Tensor:
        """The sums [T, H] of this rank's tokens."""

    @abc.abstractmethod
    def output_is_reduced(self) -> bool:
        """Whether the sums are those of all ranks."""

    def supports_deferred_moe_finalize(self) -> bool:
        """Whether `finalize` may be left to the caller."""
        return False

    def post_init_setup(self, fused_experts: Any) -> None:
        """Called once with the experts that rows are prepared for."""
        del fused_experts


class FusedMoEExperts(abc.ABC):
    """What experts of both kinds have."""

    def _keep(
        self,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig,
        max_num_tokens: int | None,
        num_dispatchers: int | None,
    ) -> None:
        batched = self.activation_format() == _FORMATS.BatchedExperts
        if batched != (max_num_tokens is not None) or batched != (num_dispatchers is not None):
            raise ConclaveValueError(
                "max_num_tokens, num_dispatchers: expected both for experts of batches, and none "
                f"for others; found {max_num_tokens}, {num_dispatchers}"
            )
        self.moe_config = moe_config
        self.quant_config = quant_config
        self.max_num_tokens = max_num_tokens
        self.num_dispatchers = num_dispatchers

    @staticmethod
    @abc.abstractmethod
    def activation_format() -> FusedMoEActivationFormat:
        """Of rows in and out."""

    @staticmethod
    def is_monolithic() -> bool:
        """Whether the experts route too."""
        raise NotImplementedError

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Whether `prepare` is to leave rows as they are."""
        return False

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Called once when weights are there."""
        del layer


class FusedMoEExpertsModular(FusedMoEExperts, FusedMoEPermuteExpertsUnpermute):
    """Runs experts on rows whose ids and weights are known."""

    def __init__(
        self,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig,
        max_num_tokens: int | None = None,
        num_dispatchers: int | None = None,
    ) -> None:
        self._keep(moe_config, quant_config, max_num_tokens, num_dispatchers)

    @staticmethod
    def is_monolithic() -> bool:
        return False

    @property
    def activation_formats(self) -> tuple[FusedMoEActivationFormat, FusedMoEActivationFormat]:
        return self.activation_format(), self.activation_format()

    def supports_chunking(self) -> bool:
        return False

    def supports_expert_map(self) -> bool:
        return True

    def moe_problem_size(self, *tensors: torch.Tensor) -> tuple[int, int, int, int, int]:
        """E, M, N, K, k of a1, w1, w2 and topk_ids."""
        return moe_problem_size(*tensors)

    def workspace_dtype(self, act_dtype: torch.dtype) -> torch.dtype:
        """The type of the workspaces and of the output."""
        return act_dtype

    def activation(  # type: ignore[override]
        self,
        activation: MoEActivation | str,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        topk_ids: torch.Tensor | None = None,
        expert_map: torch.Tensor | None = None,
        valid_token_counts: torch.Tensor | None = None,
    ) -> None:
        """Writes the activation of input to output, with the parameters of the layer and of its
        quantisation. Rows that do not count are computed too."""
        kind = parse_activation(activation)
        given = ApplyMoEActivationConfig.from_configs(self.moe_config, self.quant_config)
        activate(kind, output, input, given.spec(kind))

    @staticmethod
    def adjust_N_for_activation(N: int, activation: MoEActivation) -> int:
        """Columns behind the activation, of N rows of w1."""
        return N // 2 if activation.is_gated else N

    @abc.abstractmethod
    def workspace_shapes(  # type: ignore[override]
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of workspace13, of workspace2 and of the output."""

    def _shapes(self, a: torch.Tensor, aq: torch.Tensor, activation: Any, *sizes: Any) -> Any:
        del aq
        shapes: Any = self.workspace_shapes
        found = shapes(*sizes, activation)
        return (*found, self.workspace_dtype(a.dtype))


class FusedMoEExpertsMonolithic(FusedMoEExperts):
    """Routes rows by logits, and runs their experts."""

    def __init__(
        self,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig,
        max_num_tokens: int | None = None,
        num_dispatchers: int | None = None,
    ) -> None:
        self._keep(moe_config, quant_config, max_num_tokens, num_dispatchers)

    @staticmethod
    def is_monolithic() -> bool:
        return True

    @abc.abstractmethod
    def apply(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        router_logits: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        **routing: Any,
    ) -> torch.Tensor | UnfinalizedMoEOutput:
        """What `finalize` takes, or what the caller is to sum."""


class FusedMoEKernel:
    """One layer's kernel out of two parts, which must be of one kind."""

    def __init__(self, prepare_finalize: Any, fused_experts: Any) -> None:
        self.prepare_finalize, self.fused_experts = prepare_finalize, fused_experts
        alone = isinstance(prepare_finalize, FusedMoEPrepareAndFinalizeMonolithic)
        if alone != isinstance(fused_experts, FusedMoEExpertsMonolithic):
            raise ConclaveValueError(
                "prepare_finalize and fused_experts must both be either monolithic or not, found "
                f"{type(prepare_finalize).__name__} and {type(fused_experts).__name__}"
            )
        self.is_monolithic = alone
        prepare_finalize.post_init_setup(fused_experts)
        self._modular = None if alone else FusedMoEModularKernel(prepare_finalize, fused_experts)

    def output_is_reduced(self) -> bool:
        """Whether sums are those of all ranks."""
        return bool(self.prepare_finalize.output_is_reduced())

    def supports_deferred_moe_finalize(self) -> bool:
        """Whether an `UnfinalizedMoEOutput` may be returned."""
        return bool(self.prepare_finalize.supports_deferred_moe_finalize())

    def apply(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation | str = MoEActivation.SILU,
        global_num_experts: int = -1,
        expert_map: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> Any:
        """The weighed sums [T, H], in new memory; with shared_experts, a module or function that
        runs meanwhile, (shared, sums)."""
        if self._modular is None:
            raise ConclaveTypeError("apply: these experts route; call apply_monolithic")
        if shared_experts_input is None:
            shared_experts_input = hidden_states
        return self._modular.run(
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            activation=activation,
            global_num_experts=global_num_experts,
            expert_map=expert_map,
            apply_router_weight_on_input=apply_router_weight_on_input,
            shared=None if shared_experts is None else lambda: shared_experts(shared_experts_input),
        )

    def apply_monolithic(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        router_logits: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int = -1,
        expert_map: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        **routing: Any,
    ) -> Any:
        """As `apply`, for experts that route by logits."""
        if not self.is_monolithic:
            raise ConclaveTypeError("apply_monolithic: these experts take ids; call apply")
        prepare, experts = self.prepare_finalize, self.fused_experts
        rows, scales, logits = prepare.prepare(
            hidden_states,
            router_logits,
            experts.quant_config,
            defer_input_quant=experts.expects_unquantized_inputs,
        )
        found = experts.apply(
            hidden_states=rows,
            w1=w1,
            w2=w2,
            router_logits=logits,
            activation=activation,
            global_num_experts=int(w1.shape[0]) if global_num_experts == -1 else global_num_experts,
            expert_map=expert_map,
            a1q_scale=scales,
            apply_router_weight_on_input=apply_router_weight_on_input,
            **routing,
        )
        if isinstance(found, UnfinalizedMoEOutput):
            return self._left_to_the_caller(found)
        return prepare.finalize(found)

    def _left_to_the_caller(self, found: UnfinalizedMoEOutput) -> UnfinalizedMoEOutput:
        if not self.supports_deferred_moe_finalize():
            raise ConclaveTypeError(
                f"prepare_finalize: {type(self.prepare_finalize).__name__} does not leave sums to "
                "the caller, but the experts did"
            )
        return found
