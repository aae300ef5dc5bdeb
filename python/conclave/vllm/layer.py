"""`FusedMoE`: a layer of experts as a torch module, with the parameters of vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from conclave import _gradients, _limits
from conclave.errors import ConclaveTypeError, ConclaveUnsupportedError, ConclaveValueError
from conclave.vllm._modules import LayerNames, members_of
from conclave.vllm._operator import routed_sum
from conclave.vllm._rank_groups import RankGroups
from conclave.vllm._rank_split import split_of
from conclave.vllm._registry import static_forward_context
from conclave.vllm.activation import ActivationParameters, MoEActivation, parse_activation
from conclave.vllm.eplb import EplbLayerState
from conclave.vllm.expert_maps import ExpertMapManager
from conclave.vllm.mapping import Row
from conclave.vllm.named import NamedLayer
from conclave.vllm.parallel import FusedMoEConfig, FusedMoEParallelConfig
from conclave.vllm.quant_method.choose import choose_method
from conclave.vllm.router.factory import create_fused_moe_router

_MOST = 2**31 - 1


class FusedMoE(NamedLayer):
    """Experts of one layer: w13_weight [E, 2N, H], gate rows first, and w2_weight [E, H, N], where
    E are this rank's experts and N this rank's columns.

    Args:
        num_experts: of the model. top_k: k. hidden_size: H. intermediate_size: of all ranks.
        params_dtype: of the weights; by default torch's.
        reduce_results: sum over ranks in `forward`: of routed and of shared experts, over the
            groups given here, else by torch.distributed. By default forward returns this rank's
            partial sum, as vLLM's class does; `FusedMoEFactory` sums.
        renormalize, use_grouped_topk, num_expert_group, topk_group, scoring_func,
        routed_scaling_factor, e_score_correction_bias, custom_routing_function, router,
        hash_indices_table, zero_expert_type: how tokens are routed.
        quant_config: None, a `FusedMoEQuantConfig`, or a configuration as in config.json.
        tp_size, dp_size, pcp_size: of the engine's groups. For more than one rank give the groups,
            or moe_parallel_config, which knows this rank.
        ep_size: has no effect, as in vLLM.
        prefix: the layer's name; two living layers cannot share one.
        activation, swiglu_limit, is_act_and_mul, apply_router_weight_on_input, has_bias: of the
            experts.
        enable_eplb, num_redundant_experts: copies of experts; see `set_eplb_state`.
        expert_mapping: for `load_weights`.
        n_shared_experts: names a fusion of vLLM's on other GPUs; no effect, as there without it.
        router_logits_dtype: what `gate` returns is rounded to it.
        gate, shared_experts, shared_expert_gate, routed_input_transform, routed_output_transform:
            modules that forward calls. With several tensor-parallel ranks shared_experts returns
            this rank's part of the sum, as a row-parallel layer that does not reduce; with
            sequence parallelism over groups the whole.
        apply_routed_scale_to_output: scale the routed sum instead of the weights, before it is
            rounded.
        runner_cls, runner_args, routed_experts_cls, routed_experts_args: replace classes of vLLM;
            refused.
        expert_placement_strategy: "linear" or "round_robin".
        return_shared_apart: forward returns (shared, routed), as older versions of vLLM, and not
            their sum.
        swiglu_alpha, swiglu_beta: of "swigluoai"; activation_situ_beta,
            activation_situ_linear_beta: of "situ"; by default the published ones. A
            `FusedMoEQuantConfig` that has gemm1_alpha or gemm1_beta says it first.
        shared_experts_stream_token_threshold: up to how many tokens vLLM runs shared experts on a
            second stream; no effect, as modules run in the current one.
        tp_group, dp_group, pcp_group, ep_group: the engine's groups, each a ProcessGroup of
            torch.distributed, vLLM's GroupCoordinator, or a `conclave.Communicator`. All ranks make
            the layer at the same time and call it. forward then moves tokens between dp and pcp
            ranks, and between all ranks with is_sequence_parallel, and sums in float32 in rank
            order. ep_group, of the ranks of all groups, splits the experts and not their columns.
            On the CPU.
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
        swiglu_alpha: float | None = None,
        swiglu_beta: float | None = None,
        activation_situ_beta: float | None = None,
        activation_situ_linear_beta: float | None = None,
        shared_experts_stream_token_threshold: int | None = None,
        tp_group: Any = None,
        dp_group: Any = None,
        pcp_group: Any = None,
        ep_group: Any = None,
    ) -> None:
        super().__init__()
        del ep_size, n_shared_experts
        _check_sizes(
            num_experts=num_experts, hidden_size=hidden_size, intermediate_size=intermediate_size
        )
        _limits.integer("top_k", top_k, -_MOST, _MOST)
        _check_integers(
            num_redundant_experts=num_redundant_experts,
            num_expert_group=num_expert_group,
            topk_group=topk_group,
            tp_size=tp_size,
            dp_size=dp_size,
            pcp_size=pcp_size,
            shared_experts_stream_token_threshold=shared_experts_stream_token_threshold,
        )
        _check_numbers(
            routed_scaling_factor=routed_scaling_factor,
            swiglu_limit=swiglu_limit,
            swiglu_alpha=swiglu_alpha,
            swiglu_beta=swiglu_beta,
            activation_situ_beta=activation_situ_beta,
            activation_situ_linear_beta=activation_situ_linear_beta,
        )
        prefix = _limits.text("prefix", prefix)
        scoring_func = _limits.text("scoring_func", scoring_func)
        _check_type(params_dtype)
        _refuse_classes(
            runner_cls=runner_cls,
            runner_args=runner_args,
            routed_experts_cls=routed_experts_cls,
            routed_experts_args=routed_experts_args,
        )
        static_forward_context.check(prefix)
        kind = parse_activation(activation)
        self.activation = kind if is_act_and_mul or not kind.is_gated else kind.without_mul()
        groups = {"tp": tp_group, "pcp": pcp_group, "dp": dp_group, "ep": ep_group}
        sizes = {"tp_size": tp_size, "dp_size": dp_size, "pcp_size": pcp_size}
        self.moe_parallel_config = split_of(
            moe_parallel_config, groups, sizes, is_sequence_parallel
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
        self.swiglu_alpha, self.swiglu_beta = swiglu_alpha, swiglu_beta
        self.activation_situ_beta = activation_situ_beta
        self.activation_situ_linear_beta = activation_situ_linear_beta
        self.activation_parameters = ActivationParameters.of(
            self.activation,
            swiglu_alpha=swiglu_alpha,
            swiglu_beta=swiglu_beta,
            swiglu_limit=swiglu_limit,
            activation_situ_beta=activation_situ_beta,
            activation_situ_linear_beta=activation_situ_linear_beta,
        )
        _check_threshold(shared_experts_stream_token_threshold)
        self.shared_experts_stream_token_threshold = shared_experts_stream_token_threshold
        self.has_bias = has_bias
        self.enable_eplb = enable_eplb
        self.expert_mapping = expert_mapping
        self.router_logits_dtype = router_logits_dtype
        self.return_shared_apart = return_shared_apart
        self.eplb_state = EplbLayerState()
        self.renormalize, self.scoring_func = renormalize, scoring_func
        self.use_grouped_topk = use_grouped_topk
        self.num_expert_group, self.topk_group = num_expert_group, topk_group
        self.custom_routing_function = custom_routing_function
        self.routed_scaling_factor = routed_scaling_factor
        self.apply_routed_scale_to_output = apply_routed_scale_to_output
        self.zero_expert_type = zero_expert_type
        # Not as an attribute of the module, which would make a parameter of the layer of it.
        self._of_router = {"bias": e_score_correction_bias, "table": hash_indices_table}
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
        if not 1 <= top_k <= num_experts:
            raise ConclaveValueError(f"top_k: expected 1 to {num_experts}, found {top_k}")
        if router is None:
            router = create_fused_moe_router(
                top_k,
                self.global_num_experts,
                renormalize,
                use_grouped_topk=use_grouped_topk,
                num_expert_group=num_expert_group,
                topk_group=topk_group,
                scoring_func=scoring_func,
                routed_scaling_factor=1.0
                if apply_routed_scale_to_output
                else routed_scaling_factor,
                e_score_correction_bias=e_score_correction_bias,
                custom_routing_function=custom_routing_function,
                eplb_state=self.eplb_state if enable_eplb else None,
                zero_expert_type=zero_expert_type,
                num_logical_experts=num_experts,
                hash_indices_table=hash_indices_table,
            )
        self._take_router(router)
        self._output_scale = routed_scaling_factor if apply_routed_scale_to_output else 1.0
        self._gate, self._shared_experts = gate, shared_experts
        self._shared_expert_gate = shared_expert_gate
        self._input_transform = routed_input_transform
        self._output_transform = routed_output_transform
        self._groups = RankGroups.make(self.moe_parallel_config, groups, reduce_results)
        self._check_shared_sum()
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
            routing_method=self.routing_method_type,
            router_logits_dtype=router_logits_dtype,
            swiglu_limit=swiglu_limit,
            swiglu_alpha=swiglu_alpha,
            swiglu_beta=swiglu_beta,
            activation_situ_beta=activation_situ_beta,
            activation_situ_linear_beta=activation_situ_linear_beta,
            disable_inplace=shared_experts is not None,
        )
        self.quant_config = quant_config
        names = LayerNames(prefix, num_experts, members_of(expert_mapping))
        self._take_method(choose_method(self, quant_config, names, self.moe_config))
        self._make_parameters(intermediate_size)
        self.moe_config.intermediate_size_per_partition = self.intermediate_size_per_partition
        self.moe_config.intermediate_size_per_partition_unpadded = (
            self.intermediate_size_per_partition
        )
        self._enter()

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
        *,
        num_tokens: int | torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
        rank_tokens: Sequence[int] | torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Routes [T, H] by router_logits [T, num_experts], or by the gate, and runs the experts.

        Args:
            input_ids: [T], for hash_indices_table.
            num_tokens: the tokens behind the first num_tokens are padding, which EPLB does not
                count; an int, or a tensor of one number on the device.
            padding_mask: [T] bool. Where it is False the token is padding: no expert computes it
                and its routed part is 0; EPLB does not count it.
            rank_tokens: how many tokens each rank that has tokens of its own brings, by dp_rank and
                within that by pcp_rank, or by ep_rank with sequence parallelism: the same list on
                all of them, or an int tensor of the CPU. Ranks then need not ask each other. By
                default what `set_forward_context` was given as num_tokens_across_dp, where dp ranks
                alone have tokens of their own.

        Returns:
            [T, H], or (shared, routed) with return_shared_apart and shared experts: without
            reduce_results this rank's part of a sum that is the caller's.

        Raises:
            Error: naming the argument, also for one that requires gradients while torch records.
                ConclaveCommError where ranks bring rows of another kind, or other rank_tokens.
        """
        if not torch.compiler.is_compiling():
            _gradients.refuse(self._parameters)
        shared = self._run_shared(hidden_states)
        if router_logits is None or self._gate is not None:
            router_logits = self._run_gate(hidden_states)
        routed = hidden_states
        if self._input_transform is not None:
            routed = _first(self._input_transform(hidden_states))
        out, share = self._run_routed(
            hidden_states,
            routed,
            router_logits,
            input_ids,
            num_tokens,
            padding_mask,
            rank_tokens,
            self._is_joined(shared),
        )
        own_rows = None if share is None else hidden_states * share
        return self._finish(out, routed.dtype, shared, own_rows)

    def _run_routed(self, *of_call: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        if torch.compiler.is_compiling():
            return routed_sum(self, *of_call)
        return self._routed_sum(*of_call)

    def _is_joined(self, shared: torch.Tensor | None) -> bool:
        """Whether something is to join the routed sum, which then stays float32."""
        joins = self._has_zero_experts or (shared is not None and not self.return_shared_apart)
        if joins and self._output_transform is None:
            return True
        return self._groups is not None and self._sums_up

    def _finish(
        self,
        out: torch.Tensor,
        dtype: torch.dtype,
        shared: torch.Tensor | None,
        own_rows: torch.Tensor | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """What joins the routed sum, in float32 and rounded once, and the sums over ranks: before
        an output transform, which need not be linear, else at the end."""
        apart = shared is not None and self.return_shared_apart
        is_whole = False
        if self._output_transform is not None:
            out = self._reduced(out, dtype)
            is_whole = self._sums_up
            out = _first(self._output_transform(out))
            dtype = out.dtype
        if shared is not None and (apart or is_whole):
            shared = self._reduced(shared.clone(), shared.dtype)  # it may be the caller's memory
        # Every rank has the token's own rows whole: one adds them to a sum that is to come.
        if own_rows is not None and (is_whole or self._leads_sum()):
            out = out + own_rows
        if shared is not None and not apart:
            out, dtype = out + shared, torch.promote_types(dtype, shared.dtype)
        out = out.to(dtype) if is_whole else self._reduced(out, dtype)
        return out if shared is None or not apart else (shared, out)

    forward_native = forward
    forward_cuda = forward

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


def _check_threshold(tokens: int | None) -> None:
    if tokens is not None and tokens < 0:
        raise ConclaveValueError(
            f"shared_experts_stream_token_threshold: expected 0 or more, found {tokens}"
        )


def _check_integers(**given: int | None) -> None:
    for name, value in given.items():
        if value is not None:
            _limits.integer(name, value, -_MOST, _MOST)


def _check_numbers(**given: float | None) -> None:
    for name, value in given.items():
        if value is not None:
            _limits.real(name, value)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if _limits.integer(name, size, -_MOST, _MOST) < 1:
            raise ConclaveValueError(f"{name}: expected 1 or more, found {size}")


def _check_type(params_dtype: torch.dtype | None) -> None:
    if params_dtype is not None and not getattr(params_dtype, "is_floating_point", False):
        raise ConclaveTypeError(
            f"params_dtype: expected a type of floating-point numbers, found {params_dtype}"
        )


def _refuse_classes(**given: Any) -> None:
    for name, value in given.items():
        if value:
            raise ConclaveUnsupportedError(
                f"{name}: replaces a class of vLLM, which is not here; custom_routing_function and "
                "router are, and the modular pieces"
            )


def _first(output: Any) -> torch.Tensor:
    """The tensor of a module that returns it alone or, as vLLM's linear layers, with a bias."""
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found
