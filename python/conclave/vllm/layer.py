"""`FusedMoE`: a layer of experts as a torch module, with the parameters of vLLM's."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import torch

from conclave.errors import ConclaveUnsupportedError, ConclaveValueError
from conclave.vllm.activation import MoEActivation, parse_activation
from conclave.vllm.eplb import EplbLayerState, map_to_physical
from conclave.vllm.expert_maps import ExpertMapManager
from conclave.vllm.experts import fused_experts
from conclave.vllm.mapping import Row
from conclave.vllm.parallel import FusedMoEConfig, FusedMoEParallelConfig
from conclave.vllm.parameters import ExpertParameters
from conclave.vllm.quant import FusedMoEQuantConfig
from conclave.vllm.scheme import read_scheme
from conclave.vllm.select import Routing, split_zero_experts

_named: weakref.WeakValueDictionary[str, FusedMoE] = weakref.WeakValueDictionary()


class FusedMoE(ExpertParameters):
    """Experts of one layer: w13_weight [E, 2N, H], gate rows first, and w2_weight [E, H, N], where
    E are this rank's experts and N this rank's columns.

    Args:
        num_experts: of the model. top_k: k. hidden_size: H. intermediate_size: of all ranks.
        params_dtype: of the weights; by default torch's.
        reduce_results: sum over ranks in `forward`, by torch.distributed; else it is the caller's.
        renormalize, use_grouped_topk, num_expert_group, topk_group, scoring_func,
        routed_scaling_factor, e_score_correction_bias, custom_routing_function, router,
        hash_indices_table, zero_expert_type: how tokens are routed.
        quant_config: None, a `FusedMoEQuantConfig`, or a configuration as in config.json.
        tp_size, dp_size, pcp_size: of the engine's groups. For more than one rank give
            moe_parallel_config, which knows this rank.
        ep_size: has no effect, as in vLLM.
        prefix: the layer's name; two living layers cannot share one.
        activation, swiglu_limit, is_act_and_mul, apply_router_weight_on_input, has_bias: of the
            experts.
        enable_eplb, num_redundant_experts: copies of experts; see `set_eplb_state`.
        expert_mapping: for `load_weights`.
        n_shared_experts: names a fusion of vLLM's on other GPUs; no effect, as there without it.
        router_logits_dtype: what `gate` returns is rounded to it.
        gate, shared_experts, shared_expert_gate, routed_input_transform, routed_output_transform:
            modules that forward calls.
        apply_routed_scale_to_output: scale the routed sum instead of the weights.
        runner_cls, runner_args, routed_experts_cls, routed_experts_args: replace classes of vLLM;
            refused.
        expert_placement_strategy: "linear" or "round_robin".
        return_shared_apart: forward returns (shared, routed), as older versions of vLLM, and not
            their sum.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = False,
        renormalize: bool = True,
        use_grouped_topk: bool = False,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        quant_config: Any = None,
        tp_size: int | None = None,
        ep_size: int | None = None,
        dp_size: int | None = None,
        pcp_size: int | None = None,
        prefix: str = "",
        custom_routing_function: Callable[..., Any] | None = None,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        activation: str | MoEActivation = "silu",
        is_act_and_mul: bool = True,
        enable_eplb: bool = False,
        num_redundant_experts: int = 0,
        has_bias: bool = False,
        is_sequence_parallel: bool = False,
        expert_mapping: list[Row] | None = None,
        n_shared_experts: int | None = None,
        router_logits_dtype: torch.dtype | None = None,
        gate: torch.nn.Module | None = None,
        shared_experts: torch.nn.Module | None = None,
        routed_input_transform: torch.nn.Module | None = None,
        *,
        router: Any = None,
        swiglu_limit: float | None = None,
        shared_expert_gate: torch.nn.Module | None = None,
        routed_output_transform: torch.nn.Module | None = None,
        apply_routed_scale_to_output: bool = False,
        zero_expert_type: str | None = None,
        hash_indices_table: torch.Tensor | None = None,
        runner_cls: Any = None,
        runner_args: dict[str, Any] | None = None,
        routed_experts_cls: Any = None,
        routed_experts_args: dict[str, Any] | None = None,
        moe_parallel_config: FusedMoEParallelConfig | None = None,
        expert_placement_strategy: str = "linear",
        return_shared_apart: bool = False,
    ) -> None:
        super().__init__()
        del ep_size, n_shared_experts
        _refuse_classes(
            runner_cls=runner_cls,
            runner_args=runner_args,
            routed_experts_cls=routed_experts_cls,
            routed_experts_args=routed_experts_args,
        )
        _check_name(prefix)
        kind = parse_activation(activation)
        self.activation = kind if is_act_and_mul or not kind.is_gated else kind.without_mul()
        self.moe_parallel_config = moe_parallel_config or _split_of(
            tp_size, dp_size, pcp_size, is_sequence_parallel
        )
        if self.moe_parallel_config.is_sequence_parallel != is_sequence_parallel:
            raise ConclaveValueError(
                f"is_sequence_parallel: expected as in moe_parallel_config, "
                f"found {is_sequence_parallel}"
            )
        self.layer_name = prefix
        self.logical_num_experts = num_experts
        self.global_num_experts = num_experts + num_redundant_experts
        self.top_k = top_k
        self.hidden_size = hidden_size
        self.intermediate_size_per_partition = self._columns(intermediate_size)
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.reduce_results = reduce_results
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.swiglu_limit = swiglu_limit
        self.has_bias = has_bias
        self.enable_eplb = enable_eplb
        self.expert_mapping = expert_mapping
        self.router_logits_dtype = router_logits_dtype
        self.return_shared_apart = return_shared_apart
        self.eplb_state = EplbLayerState()
        self._check_replicas(num_redundant_experts)
        self._experts = ExpertMapManager(
            self.global_num_experts,
            self.moe_parallel_config,
            expert_placement_strategy,
            num_expert_group,
            num_redundant_experts,
            enable_eplb,
        )
        self._place()
        self._routing = Routing(
            top_k=top_k,
            num_experts=num_experts,
            renormalize=renormalize,
            use_grouped_topk=use_grouped_topk,
            num_expert_group=num_expert_group,
            topk_group=topk_group,
            custom_routing_function=custom_routing_function,
            router=router,
            scoring_func=scoring_func,
            scale=1.0 if apply_routed_scale_to_output else routed_scaling_factor,
            bias=e_score_correction_bias,
            zero_expert_type=zero_expert_type,
            hash_indices_table=hash_indices_table,
        )
        self._output_scale = routed_scaling_factor if apply_routed_scale_to_output else 1.0
        self._gate, self._shared_experts = gate, shared_experts
        self._shared_expert_gate = shared_expert_gate
        self._input_transform = routed_input_transform
        self._output_transform = routed_output_transform
        self._scheme = read_scheme(quant_config, prefix, has_bias)
        self._create_weights()
        self.moe_config = FusedMoEConfig(
            num_experts=self.global_num_experts,
            experts_per_token=top_k,
            hidden_dim=hidden_size,
            num_local_experts=self.local_num_experts,
            moe_parallel_config=self.moe_parallel_config,
            in_dtype=self.params_dtype,
            has_bias=has_bias,
            intermediate_size=intermediate_size,
            num_logical_experts=num_experts,
            activation=self.activation,
            routing_method=self._routing.method,
            router_logits_dtype=router_logits_dtype,
            swiglu_limit=swiglu_limit,
            disable_inplace=shared_experts is not None,
        )
        if prefix:
            _named[prefix] = self

    def _columns(self, intermediate_size: int) -> int:
        ranks = self.moe_parallel_config.tp_size
        if intermediate_size % ranks != 0:
            raise ConclaveValueError(
                f"intermediate_size: expected a multiple of tp_size {ranks}, "
                f"found {intermediate_size}"
            )
        return intermediate_size // ranks

    def _check_replicas(self, redundant: int) -> None:
        split = self.moe_parallel_config
        if redundant and not self.enable_eplb:
            raise ConclaveValueError(
                f"num_redundant_experts: Redundant experts are only supported with EPLB, "
                f"found {redundant}"
            )
        if self.enable_eplb and split.use_ep and self.global_num_experts % split.ep_size != 0:
            raise ConclaveValueError(
                "num_experts: EPLB currently only supports even distribution of experts across "
                f"ranks. Got {self.global_num_experts} experts and {split.ep_size} EP ranks."
            )

    def _place(self) -> None:
        self.local_num_experts = self._experts.local_num_experts
        self.register_buffer("_expert_map", self._experts.expert_map, persistent=False)
        self.register_buffer("expert_mask", self._experts.expert_mask, persistent=False)

    # What the layer is.

    @property
    def tp_size(self) -> int:
        return self.moe_parallel_config.tp_size

    @property
    def tp_rank(self) -> int:
        return self.moe_parallel_config.tp_rank

    @property
    def ep_size(self) -> int:
        return self.moe_parallel_config.ep_size

    @property
    def ep_rank(self) -> int:
        return self.moe_parallel_config.ep_rank

    @property
    def use_ep(self) -> bool:
        return self.moe_parallel_config.use_ep

    @property
    def layer_id(self) -> int:
        """The number in the layer's name."""
        numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", self.layer_name)
        if len(numbers) != 1:
            raise ConclaveValueError(
                f"prefix: expected a name with one number, found {self.layer_name!r}"
            )
        return int(numbers[0])

    @property
    def gate(self) -> torch.nn.Module | None:
        return self._gate

    @property
    def shared_experts(self) -> torch.nn.Module | None:
        return self._shared_experts

    @property
    def is_internal_router(self) -> bool:
        return self._gate is not None

    @property
    def routed_experts(self) -> FusedMoE:
        """The owner of the experts' parameters, for code written for vLLM's runner: this."""
        return self

    @property
    def expert_map(self) -> torch.Tensor | None:
        """[num_experts + redundant] int32, -1 for other ranks' experts; None: all are here."""
        found: torch.Tensor | None = self._expert_map  # type: ignore[assignment]
        return found

    @property
    def moe_quant_config(self) -> FusedMoEQuantConfig:
        """Scales and biases as `fused_experts` takes them. Of several tensor-parallel ranks the
        first adds the bias of w2."""
        w2_bias = getattr(self, "w2_bias", None)
        return self._scheme.quant_config(self, w2_bias if self.tp_rank == 0 else None)

    def ensure_moe_quant_config_init(self) -> None:
        """Nothing: the configuration is read from the parameters."""

    def maybe_init_modular_kernel(self) -> None:
        """Nothing: a layer is whole when it is made."""

    def extra_repr(self) -> str:
        return (
            f"global_num_experts={self.global_num_experts}, "
            f"local_num_experts={self.local_num_experts}, top_k={self.top_k}, "
            f"intermediate_size_per_partition={self.intermediate_size_per_partition}, "
            f"tp_size={self.tp_size}, ep_size={self.ep_size}, "
            f"reduce_results={self.reduce_results}"
        )

    # Placement.

    def update_expert_map(self, moe_parallel_config: FusedMoEParallelConfig | None = None) -> None:
        """Computes the map again after the number of ranks changed. Where that changes the number
        of local experts, the caller gives parameters of the new size before the next forward."""
        if self._expert_map is None:
            raise ConclaveValueError("expert_map: there is none to update without EP")
        if moe_parallel_config is not None:
            self.moe_parallel_config = moe_parallel_config
        self._experts.update(self.moe_parallel_config)
        device = self._expert_map.device
        self._place()
        for name in ("_expert_map", "expert_mask"):
            buffer = getattr(self, name)
            setattr(self, name, None if buffer is None else buffer.to(device))

    def set_eplb_state(
        self,
        moe_layer_idx: int,
        expert_load_view: torch.Tensor,
        logical_to_physical_map: torch.Tensor,
        logical_replica_count: torch.Tensor,
    ) -> None:
        """Takes row moe_layer_idx of a balancer's tensors, as views: [layers, physical],
        [layers, logical, replicas], [layers, logical]."""
        self.eplb_state.expert_load_view = expert_load_view[moe_layer_idx]
        self.eplb_state.logical_to_physical_map = logical_to_physical_map[moe_layer_idx]
        self.eplb_state.logical_replica_count = logical_replica_count[moe_layer_idx]

    # Running.

    def select_experts(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, k] float32 and ids [T, k]: of physical experts with EPLB, else of experts."""
        weights, ids = self._routing.select(hidden_states, router_logits, input_ids)
        if self.enable_eplb:
            ids = map_to_physical(ids, self.eplb_state)
        return weights, ids

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Routes [T, H] by router_logits [T, num_experts], or by the gate, and runs the experts.

        Returns [T, H], or (shared, routed) with return_shared_apart and shared experts. Sums over
        ranks are the caller's without reduce_results.
        """
        shared = self._run_shared(hidden_states)
        if router_logits is None or self._gate is not None:
            router_logits = self._run_gate(hidden_states)
        routed = hidden_states
        if self._input_transform is not None:
            routed = _first(self._input_transform(hidden_states))
        weights, ids = self._routing.select(hidden_states, router_logits, input_ids)
        own_share = None
        if self._routing.zero_expert_type is not None:
            ids, own_share = split_zero_experts(weights, ids, self.logical_num_experts)
        if self.enable_eplb:
            ids = map_to_physical(ids, self.eplb_state)
        out = self._run_experts(routed, weights, ids)
        if self.reduce_results:
            out = self.maybe_all_reduce_tensor_model_parallel(out)
        if self._output_scale != 1.0:
            out = out * self._output_scale
        if self._output_transform is not None:
            out = _first(self._output_transform(out))
        if own_share is not None:
            out = (out + hidden_states.float() * own_share).to(out.dtype)
        if shared is None:
            return out
        return (shared, out) if self.return_shared_apart else shared + out

    forward_native = forward
    forward_cuda = forward

    def _run_experts(
        self, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        return fused_experts(
            hidden,
            self.w13_weight,
            self.w2_weight,
            weights,
            ids,
            activation=self.activation,
            apply_router_weight_on_input=self.apply_router_weight_on_input,
            global_num_experts=self.global_num_experts,
            expert_map=self._expert_map,
            quant_config=self.moe_quant_config,
            swiglu_limit=self.swiglu_limit,
        )

    def _run_gate(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._gate is None:
            raise ConclaveValueError("router_logits: expected them without a gate, found None")
        logits = _first(self._gate(hidden))
        return logits if self.router_logits_dtype is None else logits.to(self.router_logits_dtype)

    def _run_shared(self, hidden: torch.Tensor) -> torch.Tensor | None:
        if self._shared_experts is None:
            return None
        shared = _first(self._shared_experts(hidden))
        if self._shared_expert_gate is not None:
            shared = torch.sigmoid(_first(self._shared_expert_gate(hidden))) * shared
        return shared

    def must_reduce_shared_expert_outputs(self) -> bool:
        """Whether routed rows are whole on every rank already, so that shared ones must be."""
        return self.moe_parallel_config.use_all2all_kernels

    def maybe_all_reduce_tensor_model_parallel(self, hidden: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of the split, by the default group of torch.distributed."""
        ranks = self.tp_size * self.ep_size
        if ranks == 1:
            return hidden
        dist = torch.distributed
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() == ranks):
            raise ConclaveUnsupportedError(
                f"reduce_results: a sum over {ranks} ranks needs a default process group of that "
                "size; or sum what forward returns"
            )
        dist.all_reduce(hidden)
        return hidden


def _check_name(prefix: str) -> None:
    if not prefix or prefix not in _named:
        return
    # Parameters refer to their layer, so that one that is gone waits for the collector.
    gc.collect()
    if prefix in _named:
        raise ConclaveValueError(f"prefix: Duplicate layer name: {prefix}")


def _refuse_classes(**given: Any) -> None:
    for name, value in given.items():
        if value:
            raise ConclaveUnsupportedError(
                f"{name}: replaces a class of vLLM, which is not here; custom_routing_function and "
                "router are, and the modular pieces"
            )


def _split_of(
    tp_size: int | None, dp_size: int | None, pcp_size: int | None, sequence: bool
) -> FusedMoEParallelConfig:
    sizes = {"tp_size": tp_size, "dp_size": dp_size, "pcp_size": pcp_size}
    for name, size in sizes.items():
        if size not in (None, 1):
            raise ConclaveValueError(
                f"{name}: for {size} ranks give moe_parallel_config, which knows this rank "
                "(FusedMoEParallelConfig.make)"
            )
    if sequence:
        raise ConclaveValueError("is_sequence_parallel: give moe_parallel_config with sp_size")
    return FusedMoEParallelConfig()


def _first(output: Any) -> torch.Tensor:
    """The tensor of a module that returns it alone or, as vLLM's linear layers, with a bias."""
    return output[0] if isinstance(output, tuple) else output
