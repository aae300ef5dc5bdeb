"""Conclave's experts behind newest vLLM's interface: in the places of vLLM's own kernels."""

from __future__ import annotations

from typing import Any

import torch

from conclave.errors import ConclaveUnsupportedError, ConclaveValueError
from conclave.vllm.activation import MoEActivation
from conclave.vllm.modular import (
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEPrepareAndFinalize,
    TopKWeightAndReduce,
)
from conclave.vllm.modular_experts import BatchedConclaveExperts, ConclaveExperts
from conclave.vllm.newer import FusedMoEExpertsModular
from conclave.vllm.parallel import FusedMoEConfig
from conclave.vllm.prepare import MoEPrepareAndFinalizeNoEP
from conclave.vllm.quant import FusedMoEQuantConfig


class ConclaveExpertsModular(FusedMoEExpertsModular):
    """Rows [T, H] to weighed sums [T, H], in any format that `fused_experts` takes."""

    _inner_class: type[Any] = ConclaveExperts

    def __init__(
        self,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig,
        max_num_tokens: int | None = None,
        num_dispatchers: int | None = None,
    ) -> None:
        super().__init__(moe_config, quant_config, max_num_tokens, num_dispatchers)
        self._inner = self._inner_class(quant_config)

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        """Every formula runs in every format."""
        return isinstance(activation, MoEActivation)

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

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
        """No workspace; output [M, K]."""
        return (), (), (M, K)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        found: TopKWeightAndReduce = self._inner.finalize_weight_and_reduce_impl()
        return found

    def apply(self, *args: Any, **named: Any) -> None:
        """As `ConclaveExperts.apply`."""
        self._inner.apply(*args, **named)


class BatchedConclaveExpertsModular(ConclaveExpertsModular):
    """Rows [E, tokens, H] sorted by expert to unweighed rows of the same shape."""

    _inner_class = BatchedConclaveExperts

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.BatchedExperts

    def supports_expert_map(self) -> bool:
        return False

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
        """No workspace; output [E, M, K]."""
        return (), (), (local_num_experts, M, K)


def make_moe_prepare_and_finalize_no_dp_ep(use_monolithic: bool) -> FusedMoEPrepareAndFinalize:
    """Rows stay where they are. Raises ConclaveUnsupportedError for experts that route."""
    if use_monolithic:
        raise ConclaveUnsupportedError(
            "use_monolithic: experts here take ids; a FusedMoEPrepareAndFinalizeMonolithic of your "
            "own goes with experts that route"
        )
    return MoEPrepareAndFinalizeNoEP()


def maybe_make_prepare_finalize(
    moe: FusedMoEConfig,
    quant_config: FusedMoEQuantConfig | None,
    routing_tables: Any = None,
    allow_new_interface: bool = False,
    use_monolithic: bool = False,
    **_: Any,
) -> FusedMoEPrepareAndFinalize | None:
    """What brings rows to the experts of one rank; None without allow_new_interface, as in vLLM.

    Raises ConclaveUnsupportedError for rows that change ranks: FusedMoE over groups moves them.
    """
    del quant_config, routing_tables
    split = moe.moe_parallel_config
    if split.use_all2all_kernels or split.dp_size > 1:
        raise ConclaveUnsupportedError(
            "moe_parallel_config: rows that change ranks are moved by FusedMoE over its groups, or "
            "by a FusedMoEPrepareAndFinalize of your own"
        )
    return make_moe_prepare_and_finalize_no_dp_ep(use_monolithic) if allow_new_interface else None


_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def moe_kernel_quantize_input(
    A: torch.Tensor,
    A_scale: torch.Tensor | None,
    quant_dtype: torch.dtype | str | None,
    per_act_token_quant: bool,
    block_shape: list[int] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes of rows [..., H] and their float32 scales: [1] static or dynamic, [..., 1] by token,
    [..., G] in groups as wide as a block. None as quant_dtype leaves rows as they are."""
    if quant_dtype is None:
        return A, A_scale
    if not isinstance(quant_dtype, torch.dtype) or quant_dtype not in _LARGEST:
        raise ConclaveUnsupportedError(
            f"quant_dtype: {quant_dtype} rows are quantised by the experts; float8_e4m3fn and int8 "
            "can be had apart"
        )
    if options.get("quantization_emulation"):
        raise ConclaveUnsupportedError("quantization_emulation: codes are returned, not values")
    largest = _LARGEST[quant_dtype]
    rows = A.float()
    if block_shape is not None or per_act_token_quant:
        wide = A.shape[-1] if block_shape is None else block_shape[1]
        if wide < 1:
            raise ConclaveValueError(
                f"block_shape: expected blocks of 1 column or more, found {wide}"
            )
        pad = -A.shape[-1] % wide
        rows = torch.nn.functional.pad(rows, (0, pad)).unflatten(-1, (-1, wide))
        scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-10) / largest
    else:
        amax = rows.abs().amax() if rows.numel() else rows.new_zeros(())
        scale = amax.clamp(min=1e-10) / largest if A_scale is None else A_scale.float()
    codes = (rows / scale).clamp(-largest, largest)
    codes = codes.round().to(quant_dtype) if quant_dtype == torch.int8 else codes.to(quant_dtype)
    if block_shape is not None or per_act_token_quant:
        return codes.flatten(-2)[..., : A.shape[-1]].contiguous(), scale.squeeze(-1)
    return codes, scale.reshape(1) if scale.numel() == 1 else scale
