"""The interfaces of vLLM's modular kernel: what prepares rows, runs experts, weighs and sums.

Router, then prepare (dispatch), experts, finalize (combine). Conclave's experts quantise rows
inside their kernels, so that `prepare` hands rows on as they are.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import torch

from conclave.errors import ConclaveValueError
from conclave.vllm._activate import activate
from conclave.vllm.quant import FusedMoEQuantConfig


class FusedMoEActivationFormat(enum.Enum):
    """How rows lie."""

    Standard = "standard"  # [tokens, H]
    BatchedExperts = "batched_experts"  # [experts, most tokens of one, H]


@dataclasses.dataclass
class ExpertTokensMetadata:
    """Rows of each local expert."""

    expert_num_tokens: torch.Tensor  # [E] int32, on the device
    expert_num_tokens_cpu: torch.Tensor | None = None

    @staticmethod
    def make_from_list(
        expert_num_tokens_list: list[int], device: str | torch.device
    ) -> ExpertTokensMetadata:
        """Counts [E] on the CPU, and a copy on the device that may still be under way."""
        counts = torch.tensor(expert_num_tokens_list, dtype=torch.int32, device="cpu")
        return ExpertTokensMetadata(counts.to(device, non_blocking=True), counts)


# Rows, their scales, counts, and ids and weights where those came from other ranks.
PrepareResultType = tuple[
    torch.Tensor,
    torch.Tensor | None,
    ExpertTokensMetadata | None,
    torch.Tensor | None,
    torch.Tensor | None,
]
ReceiverType = Callable[[], PrepareResultType]


def moe_problem_size(
    a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
) -> tuple[int, int, int, int, int]:
    """E, M, N, K, k: experts of w1; rows (the most of one expert, where sorted by it); rows of w1;
    the hidden size; choices per token."""
    for argument, array in (("w1", w1), ("w2", w2)):
        if array.ndim != 3:
            raise ConclaveValueError(f"{argument}: expected 3 axes, found {list(array.shape)}")
    if topk_ids.ndim != 2:
        raise ConclaveValueError(f"topk_ids: expected shape [T, k], found {list(topk_ids.shape)}")
    experts, rows = int(w1.shape[0]), int(w1.shape[1])
    if a1.ndim == 2:
        if a1.shape[0] != topk_ids.shape[0]:
            raise ConclaveValueError(
                f"topk_ids: expected {a1.shape[0]} rows as in a1, found {topk_ids.shape[0]}"
            )
        tokens = int(a1.shape[0])
    elif a1.ndim == 3 and a1.shape[0] == experts:
        tokens = int(a1.shape[1])
    else:
        raise ConclaveValueError(
            f"a1: expected [T, H], or [{experts}, tokens, H], found {list(a1.shape)}"
        )
    return experts, tokens, rows, int(a1.shape[-1]), int(topk_ids.shape[1])


def count_expert_num_tokens(
    topk_ids: torch.Tensor, num_local_experts: int, expert_map: torch.Tensor | None
) -> torch.Tensor:
    """Slots of each local expert [E] int32. Ids of no local expert are not counted."""
    size = num_local_experts if expert_map is None else int(expert_map.shape[0])
    known = (topk_ids >= 0) & (topk_ids < size)
    local = torch.where(known, topk_ids, 0).long()
    if expert_map is not None:
        local = expert_map.to(local.device).long()[local]
    local = torch.where(known & (local >= 0), local, num_local_experts)
    counts = torch.bincount(local.flatten(), minlength=num_local_experts + 1)
    return counts[:num_local_experts].to(torch.int32)


class TopKWeightAndReduce(abc.ABC):
    """Weighs and sums what experts wrote, where they did not."""

    @abc.abstractmethod
    def apply(
        self,
        output: torch.Tensor | None,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> torch.Tensor:
        """Writes [T, H] to output, made here if None, and returns it."""


class FusedMoEPrepareAndFinalize(abc.ABC):
    """Moves rows to the experts and back. One class, because both must agree on how."""

    @abc.abstractmethod
    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
    ) -> PrepareResultType:
        """Rows a1 [T, H] for the experts of this rank."""

    def supports_async(self) -> bool:
        """Whether prepare_async and finalize_async are there."""
        return False

    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
    ) -> tuple[Callable[[], None], ReceiverType] | ReceiverType:
        """Starts `prepare`. Returns its second half, maybe with a hook to be called before it."""
        raise NotImplementedError

    @abc.abstractmethod
    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> None:
        """Writes [T, H] to output."""

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> tuple[Callable[[], None], Callable[[], None]] | Callable[[], None]:
        """Starts `finalize`. Returns its second half, maybe with a hook to be called before it."""
        raise NotImplementedError

    @property
    @abc.abstractmethod
    def activation_format(self) -> FusedMoEActivationFormat:
        """Of what `prepare` returns."""

    @abc.abstractmethod
    def topk_indices_dtype(self) -> torch.dtype | None:
        """The type that ids must have; None: any."""

    @abc.abstractmethod
    def max_num_tokens_per_rank(self) -> int | None:
        """The most tokens of a call; None: any number."""

    @abc.abstractmethod
    def num_dispatchers(self) -> int:
        """Ranks that send rows."""

    def output_is_reduced(self) -> bool:
        """Whether `finalize` gives the sums of all ranks; else of this one."""
        return False

    def supports_dbo(self) -> bool:
        """Whether the halves of a batch may take turns around it."""
        return self.supports_async()

    def supports_deferred_moe_finalize(self) -> bool:
        """Whether `finalize` may be left to the caller."""
        return False

    def post_init_setup(self, fused_experts: Any) -> None:
        """Called once with the experts that rows are prepared for."""
        del fused_experts


def _of_config(name: str) -> Any:
    return property(lambda self: getattr(self.quant_config, name))


class FusedMoEPermuteExpertsUnpermute(abc.ABC):
    """Runs the experts on rows that are here."""

    def __init__(self, quant_config: FusedMoEQuantConfig) -> None:
        self.quant_config = quant_config

    quant_dtype = _of_config("quant_dtype")
    block_shape = _of_config("block_shape")
    per_act_token_quant = _of_config("per_act_token_quant")
    per_out_ch_quant = _of_config("per_out_ch_quant")
    a1_scale = _of_config("a1_scale")
    a2_scale = _of_config("a2_scale")
    a1_gscale = _of_config("a1_gscale")
    a2_gscale = _of_config("a2_gscale")
    w1_scale = _of_config("w1_scale")
    w2_scale = _of_config("w2_scale")
    w1_zp = _of_config("w1_zp")
    w2_zp = _of_config("w2_zp")
    w1_bias = _of_config("w1_bias")
    w2_bias = _of_config("w2_bias")
    g1_alphas = _of_config("g1_alphas")
    g2_alphas = _of_config("g2_alphas")

    def activation(self, activation: str, output: torch.Tensor, input: torch.Tensor) -> None:
        """Writes the activation of input to output, for experts that make their products
        themselves: by any name of `MoEActivation`, with its published parameters.

        Args:
            output: [..., N]. input: [..., 2N], [..., N] for activations without a gate.
        """
        activate(activation, output, input)

    def enable_chunking(self) -> bool:
        """Whether tokens are cut: wherever the kernel supports it."""
        return self.supports_chunking()

    @property
    @abc.abstractmethod
    def activation_formats(self) -> tuple[FusedMoEActivationFormat, FusedMoEActivationFormat]:
        """Of rows in and of rows out."""

    @abc.abstractmethod
    def supports_chunking(self) -> bool:
        """Whether the kernel may cut the tokens."""

    @abc.abstractmethod
    def supports_expert_map(self) -> bool:
        """Whether `apply` takes an expert_map."""

    @abc.abstractmethod
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
        """Shapes of workspace13, of workspace2 and of the output, and their type; () is none."""

    def _shapes(self, a: torch.Tensor, aq: torch.Tensor, activation: Any, *sizes: Any) -> Any:
        """`workspace_shapes` as a kernel asks for them, whatever the version of the interface: by
        position, since names of their parameters are the subclass's."""
        del activation
        return self.workspace_shapes(a, aq, *sizes)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        """What is left to be done to the output. Raises NotImplementedError unless overridden."""
        raise NotImplementedError

    @abc.abstractmethod
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
        """Writes to output."""
