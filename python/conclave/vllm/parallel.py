"""Ranks and sizes of a layer in vLLM's words."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from conclave import _conclave
from conclave.errors import ConclaveUnsupportedError, ConclaveValueError
from conclave.routing import RoutingMethodType
from conclave.vllm._registry import log_once
from conclave.vllm.activation import MoEActivation, parse_activation

_LOW_LATENCY = ("deepep_low_latency", "nixl_ep")


@dataclasses.dataclass
class FusedMoEParallelConfig:
    """Which rank this is. TP, DP and PCP ranks are flattened into one group, which splits either
    the columns of every expert (TP) or the experts (EP). Fields can be assigned; who reads a
    configuration that was changed checks it first."""

    tp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    tp_rank: int = 0
    dp_rank: int = 0
    ep_rank: int = 0
    use_ep: bool = False
    pcp_size: int = 1
    pcp_rank: int = 0
    sp_size: int = 1
    all2all_backend: str = "allgather_reducescatter"
    enable_eplb: bool = False

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises ConclaveValueError for a size or a rank that cannot be."""
        for axis in ("tp", "dp", "ep", "pcp"):
            size, rank = getattr(self, f"{axis}_size"), getattr(self, f"{axis}_rank")
            if size < 1:
                raise ConclaveValueError(f"{axis}_size: expected 1 or more, found {size}")
            if not 0 <= rank < size:
                raise ConclaveValueError(f"{axis}_rank: expected 0 to {size - 1}, found {rank}")

    @property
    def is_sequence_parallel(self) -> bool:
        return self.sp_size > 1

    @property
    def use_all2all_kernels(self) -> bool:
        """Whether tokens have to change ranks; the caller's engine moves them."""
        return self.use_ep and (self.dp_size > 1 or self.pcp_size > 1 or self.sp_size > 1)

    def _uses(self, *backends: str) -> bool:
        return self.use_all2all_kernels and self.all2all_backend in backends

    @property
    def use_pplx_kernels(self) -> bool:
        return self._uses("pplx")

    @property
    def use_deepep_ht_kernels(self) -> bool:
        return self._uses("deepep_high_throughput")

    @property
    def use_deepep_ll_kernels(self) -> bool:
        return self._uses("deepep_low_latency")

    @property
    def use_fi_all2allv_kernels(self) -> bool:
        return self._uses("flashinfer_all2allv")

    @property
    def use_mori_kernels(self) -> bool:
        return self._uses("mori", "mori_high_throughput", "mori_low_latency")

    @property
    def use_fi_nvl_two_sided_kernels(self) -> bool:
        return self._uses("flashinfer_all2allv", "flashinfer_nvlink_two_sided")

    @property
    def use_fi_nvl_one_sided_kernels(self) -> bool:
        return self._uses("flashinfer_nvlink_one_sided")

    @property
    def use_ag_rs_all2all_kernels(self) -> bool:
        return self._uses("allgather_reducescatter")

    @property
    def use_nixl_ep_kernels(self) -> bool:
        return self._uses("nixl_ep")

    @property
    def use_deepep_v2_kernels(self) -> bool:
        return self._uses("deepep_v2")

    @property
    def use_batched_activation_format(self) -> bool:
        return self._uses(*_LOW_LATENCY)

    @property
    def needs_round_robin_routing_tables(self) -> bool:
        return self._uses(*_LOW_LATENCY)

    @property
    def permits_round_robin(self) -> bool:
        """Whether what moves the tokens addresses experts by position."""
        return not self.use_all2all_kernels or self._uses(*_LOW_LATENCY)

    @staticmethod
    def make(
        tp_size_: int = 1,
        dp_size_: int = 1,
        vllm_parallel_config: Any = None,
        *,
        pcp_size_: int = 1,
        sp_size_: int = 1,
        tp_rank: int = 0,
        dp_rank: int | None = None,
        pcp_rank: int = 0,
        enable_expert_parallel: bool | None = None,
    ) -> FusedMoEParallelConfig:
        """The split of MoE layers from an engine's groups.

        Args:
            tp_size_, dp_size_, pcp_size_: sizes of the engine's groups; sp_size_: tp_size_ if a
                sequence is split, else 1.
            vllm_parallel_config: read if given: enable_expert_parallel, all2all_backend,
                enable_eplb, data_parallel_rank.
            tp_rank, dp_rank, pcp_rank: of this process in its groups; vLLM asks its process groups.
        """
        read = vllm_parallel_config
        if enable_expert_parallel is None:
            enable_expert_parallel = bool(getattr(read, "enable_expert_parallel", False))
        if dp_rank is None:
            dp_rank = int(getattr(read, "data_parallel_rank", 0) or 0)
        world = tp_size_ * dp_size_ * pcp_size_
        use_ep = enable_expert_parallel and world > 1
        split = _conclave.flatten_groups(
            tp_size=tp_size_,
            tp_rank=tp_rank if tp_size_ > 1 else 0,
            pcp_size=pcp_size_,
            pcp_rank=pcp_rank if pcp_size_ > 1 else 0,
            dp_size=dp_size_,
            dp_rank=dp_rank if dp_size_ > 1 else 0,
            expert_parallel=use_ep,
            sequence_parallel=sp_size_ > 1,
        )
        return FusedMoEParallelConfig(
            tp_size=split["tp_size"],
            tp_rank=split["tp_rank"],
            ep_size=split["ep_size"],
            ep_rank=split["ep_rank"],
            dp_size=dp_size_,
            dp_rank=dp_rank if dp_size_ > 1 else 0,
            pcp_size=pcp_size_,
            pcp_rank=pcp_rank if pcp_size_ > 1 else 0,
            sp_size=sp_size_,
            use_ep=use_ep,
            all2all_backend=getattr(read, "all2all_backend", None) or "allgather_reducescatter",
            enable_eplb=bool(getattr(read, "enable_eplb", False)),
        )

    @staticmethod
    def flatten_tp_across_dp_and_pcp(
        tp_size: int,
        dp_size: int,
        dp_rank: int,
        pcp_size: int,
        pcp_rank: int,
        tp_rank: int | None = None,
    ) -> tuple[int, int]:
        """Number of ranks that columns are cut for without expert parallelism, and this one's.
        tp_rank: by default that of the groups of `conclave.vllm.install`."""
        if tp_rank is None:
            from conclave.vllm.engine.groups import get_tensor_model_parallel_rank

            tp_rank = get_tensor_model_parallel_rank() if tp_size > 1 else 0
        return dp_size * pcp_size * tp_size, (dp_rank * pcp_size + pcp_rank) * tp_size + tp_rank

    @staticmethod
    def make_no_parallel() -> FusedMoEParallelConfig:
        """One rank."""
        return FusedMoEParallelConfig()


@dataclasses.dataclass
class FusedMoEConfig:
    """Sizes and types of a layer. hidden_dim is H, experts_per_token is k.

    intermediate_size is that of all tensor-parallel ranks, intermediate_size_per_partition this
    rank's share: each follows from the other. is_act_and_mul follows from the activation, and False
    takes its gate away. Nothing is padded, so that the unpadded sizes are the sizes.

    Two fields may be assigned later: skip_final_all_reduce, by which `FusedMoE.forward` leaves the
    last sum over ranks to its caller, and defer_moe_finalize, for experts of your own that leave
    sums to the caller; those of the library finish them.
    """

    num_experts: int
    experts_per_token: int
    hidden_dim: int
    num_local_experts: int
    moe_parallel_config: FusedMoEParallelConfig
    in_dtype: Any
    max_num_tokens: int = 256
    has_bias: bool = False
    intermediate_size: int | None = None
    num_logical_experts: int | None = None
    activation: MoEActivation = MoEActivation.SILU
    routing_method: RoutingMethodType = RoutingMethodType.Unspecified
    router_logits_dtype: Any = None
    swiglu_limit: float | None = None
    moe_backend: str = "auto"
    device: Any = None
    is_lora_enabled: bool = False
    disable_inplace: bool = False
    max_capture_size: int = 0
    intermediate_size_per_partition: int | None = None
    is_act_and_mul: bool | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None
    activation_situ_beta: float | None = None
    activation_situ_linear_beta: float | None = None
    hidden_dim_unpadded: int | None = None
    intermediate_size_per_partition_unpadded: int | None = None
    intermediate_pad: int | None = None
    shared_expert_prefix: str | None = None
    skip_final_all_reduce: bool = False
    defer_moe_finalize: bool = False
    defer_moe_finalize_max_num_tokens: int = -1

    def __post_init__(self) -> None:
        if self.max_num_tokens < 1:
            raise ConclaveValueError(
                f"max_num_tokens: expected 1 or more, found {self.max_num_tokens}"
            )
        if self.dp_size > 1:  # type: ignore[attr-defined]
            log_once(logging.DEBUG, f"Using FusedMoEConfig::max_num_tokens={self.max_num_tokens}")
        if self.is_lora_enabled:
            raise ConclaveUnsupportedError("is_lora_enabled: adapters on experts do not run")
        if self.moe_backend != "auto":
            raise ConclaveUnsupportedError(
                f"moe_backend: {self.moe_backend!r} names a kernel of vLLM; "
                "LayerOptions.kernel names ours"
            )
        if self.router_logits_dtype is None:
            self.router_logits_dtype = self.in_dtype
        self._join_sizes()
        self._join_activation()
        self._check_unpadded()

    def _check_unpadded(self) -> None:
        if self.intermediate_pad:
            raise ConclaveUnsupportedError(
                f"intermediate_pad: nothing is padded here, found {self.intermediate_pad}"
            )
        sizes = {
            "hidden_dim_unpadded": self.hidden_dim,
            "intermediate_size_per_partition_unpadded": self.intermediate_size_per_partition,
        }
        for name, size in sizes.items():
            if getattr(self, name) not in (None, size):
                raise ConclaveUnsupportedError(
                    f"{name}: nothing is padded here; expected {size}, found {getattr(self, name)}"
                )
            setattr(self, name, size)

    def _join_sizes(self) -> None:
        ranks, part = self.moe_parallel_config.tp_size, self.intermediate_size_per_partition
        if self.intermediate_size is None:
            self.intermediate_size = None if part is None else part * ranks
        elif part is None:
            self.intermediate_size_per_partition = -(-self.intermediate_size // ranks)
        elif part not in (self.intermediate_size // ranks, -(-self.intermediate_size // ranks)):
            raise ConclaveValueError(
                f"intermediate_size_per_partition: expected {self.intermediate_size} over "
                f"tp_size {ranks}, found {part}"
            )

    def _join_activation(self) -> None:
        self.activation = parse_activation(self.activation)
        if self.is_act_and_mul is False:
            self.activation = self.activation.without_mul()
        elif self.is_act_and_mul and not self.activation.is_gated:
            raise ConclaveValueError(
                f"is_act_and_mul: expected False for {self.activation.value}, found True"
            )
        self.is_act_and_mul = self.activation.is_gated

    @property
    def w13_num_shards(self) -> int:
        """Matrices in w13: gate and up, or up alone."""
        return 2 if self.activation.is_gated else 1

    @property
    def use_deferred_moe_finalize(self) -> bool:
        """Whether experts may leave sums to the caller, which adds up over tensor-parallel ranks
        and over no others."""
        split = self.moe_parallel_config
        others = max(split.dp_size, split.ep_size, split.pcp_size, split.sp_size)
        return self.defer_moe_finalize and split.tp_size > 1 and others == 1

    def should_defer_moe_finalize(self, num_tokens: int) -> bool:
        """The same of a call with so many tokens."""
        most = self.defer_moe_finalize_max_num_tokens
        return self.use_deferred_moe_finalize and num_tokens > 0 and not 0 <= most < num_tokens

    @property
    def use_flashinfer_cutlass_kernels(self) -> bool:
        """Never: they are kernels of FlashInfer."""
        return False


def _of(name: str) -> Any:
    return property(lambda self: getattr(self.moe_parallel_config, name))


for _name in (
    *("tp_size", "dp_size", "ep_size", "pcp_size", "tp_rank", "dp_rank", "ep_rank", "pcp_rank"),
    *("use_ep", "sp_size", "is_sequence_parallel", "use_all2all_kernels", "use_pplx_kernels"),
    *("use_deepep_ht_kernels", "use_deepep_ll_kernels", "all2all_backend"),
    *("use_fi_all2allv_kernels", "use_mori_kernels", "use_fi_nvl_two_sided_kernels"),
    *("use_fi_nvl_one_sided_kernels", "use_ag_rs_all2all_kernels", "use_nixl_ep_kernels"),
    *("use_deepep_v2_kernels", "needs_round_robin_routing_tables"),
):
    setattr(FusedMoEConfig, _name, _of(_name))
