"""Which name of vLLM stands for what of this package, by module.

A row is a source and names in it: "theirs=ours" where they differ. A source that begins with "!"
is a key of REASONS: those names are known, and raise when they are used. Modules are those of vLLM
0.33, and of older layouts where code still imports from them.
"""

from __future__ import annotations

Rows = tuple[tuple[str, str], ...]

REASONS = {
    "kernel": "a kernel of vLLM's, which is not here; conclave.vllm.fused_experts and "
    "ConclaveExperts run every format that conclave has",
    "router": "a class of parameters of vLLM's, which is not here; create_fused_moe_router takes "
    "them as arguments",
    "engine": "belongs to vLLM's engine, which is not here",
    "triton": "no code here is written in Triton",
}

_V = "conclave.vllm"
_E = "conclave.vllm.engine"
_MOE = "vllm.model_executor.layers.fused_moe"

_ACTIVATION: Rows = (
    (_V, "MoEActivation"),
    (f"{_E}.calls", "ApplyMoEActivationConfig activation_without_mul apply_moe_activation"),
)
_CONFIGS: Rows = (
    (
        _V,
        "FUSED_MOE_UNQUANTIZED_CONFIG FusedMoEConfig FusedMoEParallelConfig FusedMoEQuantConfig "
        "FusedMoEQuantDesc GroupShape RoutingMethodType biased_moe_quant_config "
        "fp8_w8a8_moe_quant_config fp8_w8a16_moe_quant_config gptq_marlin_moe_quant_config "
        "int4_w4a16_moe_quant_config int4_w4afp8_moe_quant_config int8_w8a8_moe_quant_config "
        "int8_w8a16_moe_quant_config mxfp4_moe_quant_config mxfp4_mxfp8_moe_quant_config "
        "mxfp4_w4a8_moe_quant_config "
        "mxfp4_w4a16_moe_quant_config nvfp4_moe_quant_config nvfp4_w4a16_moe_quant_config "
        "ocp_mx_moe_quant_config",
    ),
    ("conclave.routing", "get_routing_method_type"),
)
_MAPS: Rows = (
    (
        _V,
        "ExpertMapManager determine_expert_map determine_expert_placement_strategy "
        "get_compressed_expert_map ensure_round_robin_expert_routing_tables",
    ),
)
_KERNEL: Rows = (
    (
        _V,
        "ExpertTokensMetadata FusedMoEActivationFormat FusedMoEModularKernel "
        "FusedMoEPermuteExpertsUnpermute FusedMoEPrepareAndFinalize SharedResizableBuffer "
        "TopKWeightAndReduce FusedMoEExperts FusedMoEExpertsModular FusedMoEExpertsMonolithic "
        "FusedMoEKernel FusedMoEPrepareAndFinalizeModular FusedMoEPrepareAndFinalizeMonolithic",
    ),
    ("conclave.vllm.modular", "PrepareResultType ReceiverType _moe_problem_size=moe_problem_size"),
)
_REDUCE: Rows = (
    (
        _V,
        "TopKWeightAndReduceContiguous TopKWeightAndReduceDelegate "
        "TopKWeightAndReduceNaiveBatched TopKWeightAndReduceNoOP",
    ),
)
_PREPARE: Rows = (
    (
        _V,
        "MoEPrepareAndFinalizeNoEP MoEPrepareAndFinalizeNoDPEPModular=MoEPrepareAndFinalizeNoEP",
    ),
    (f"{_E}.experts", "make_moe_prepare_and_finalize_no_dp_ep"),
)
_BATCHED: Rows = ((_V, "BatchedPrepareAndFinalize"),)
_ALIGN: Rows = ((f"{_E}.calls", "moe_align_block_size"),)
_PERMUTE: Rows = (
    (f"{_E}.calls", "moe_permute moe_permute_unpermute_supported"),
    ("conclave", "moe_unpermute"),
)
_EXPERTS_CALL: Rows = ((f"{_E}.calls", "fused_experts"),)
_TOPK: Rows = (("conclave", "fused_topk"),)
_TOPK_BIAS: Rows = ((f"{_E}.calls", "fused_topk_bias"),)
_GROUPED: Rows = (("conclave", "grouped_topk"),)
_LAYER: Rows = (
    (_V, "FusedMoE"),
    (f"{_E}.runner", "FusedMoEFactory"),
    (f"{_E}.calls", "fused_moe_make_expert_params_mapping"),
)
_OWNER: Rows = ((f"{_E}.routed_experts", "RoutedExperts"), (_V, "FusedMoeWeightScaleSupported"))
_RUNNER: Rows = ((f"{_E}.runner", "MoERunner"),)
_GATE: Rows = ((f"{_E}.gate", "GateLinear"),)
_METHODS: Rows = ((f"{_V}.quant_method", "FusedMoEMethodBase UnquantizedFusedMoEMethod"),)
_KERNELS: Rows = (
    (
        f"{_E}.experts",
        "TritonExperts=ConclaveExpertsModular BatchedTritonExperts=BatchedConclaveExpertsModular "
        "NaiveBatchedExperts=BatchedConclaveExpertsModular",
    ),
    (
        "!kernel",
        "TritonWNA16Experts DeepGemmExperts "
        "BatchedDeepGemmExperts TritonOrDeepGemmExperts CutlassExpertsFp8 CutlassBatchedExpertsFp8 "
        "CutlassExpertsW4A8Fp8 MarlinExperts BatchedMarlinExperts "
        "fused_marlin_moe get_config_file_name",
    ),
)
_EPLB: Rows = (
    (_V, "EplbLayerState"),
    (_V, "EplbModelState EplbState"),
)
_GROUPS: Rows = (
    (
        f"{_E}.groups",
        "GroupCoordinator get_tp_group get_dp_group get_pcp_group get_pp_group get_ep_group "
        "get_tensor_model_parallel_rank get_tensor_model_parallel_world_size "
        "tensor_model_parallel_all_reduce tensor_model_parallel_all_gather "
        "tensor_model_parallel_reduce_scatter model_parallel_is_initialized "
        "initialize_model_parallel",
    ),
)
_ENGINE_CONFIG: Rows = (
    (
        f"{_E}.config",
        "VllmConfig ParallelConfig CompilationConfig SchedulerConfig KernelConfig DeviceConfig "
        "ModelConfig ExpertPlacementStrategy set_current_vllm_config get_current_vllm_config "
        "get_current_vllm_config_or_none",
    ),
    (_V, "EPLBConfig"),
)
_MATHS: Rows = ((f"{_E}.helpers", "cdiv round_up round_down next_power_of_2"),)
_PACKAGES: Rows = (
    (
        f"{_E}.helpers",
        "has_deep_ep=has_no_package has_deep_gemm=has_no_package has_mori=has_no_package "
        "has_nixl_ep=has_no_package has_pplx=has_no_package has_aiter=has_no_package "
        "has_triton_kernels=has_no_package",
    ),
)

# The rest of vLLM keeps these modules where it is imported itself (`install(overlay=True)`).
_FUSED_MOE: dict[str, Rows] = {
    _MOE: (
        *_ACTIVATION,
        *_CONFIGS,
        *_KERNEL,
        *_MAPS,
        *_LAYER,
        *_OWNER,
        *_RUNNER,
        *_GATE,
        *_EXPERTS_CALL,
        *_TOPK,
        *_GROUPED,
        *_METHODS,
        *_KERNELS,
        (f"{_V}.router", "FusedMoERouter"),
        ("!router", "GroupedTopk"),
        ("!kernel", "SharedExperts override_config get_config"),
    ),
    f"{_MOE}.activation": _ACTIVATION,
    f"{_MOE}.config": _CONFIGS,
    f"{_MOE}.expert_map_manager": _MAPS,
    f"{_MOE}.layer": (*_LAYER, *_OWNER, *_MAPS, (_V, "maybe_roundup_hidden_size")),
    f"{_MOE}.routed_experts": _OWNER,
    f"{_MOE}.modular_kernel": _KERNEL,
    f"{_MOE}.moe_output": ((_V, "UnfinalizedMoEOutput"),),
    f"{_MOE}.topk_weight_and_reduce": _REDUCE,
    f"{_MOE}.prepare_finalize": (*_PREPARE, *_BATCHED),
    f"{_MOE}.prepare_finalize.no_dp_ep": _PREPARE,
    f"{_MOE}.prepare_finalize.batched": _BATCHED,
    f"{_MOE}.fused_batched_moe": (*_BATCHED, *_KERNELS),
    f"{_MOE}.fused_moe": (*_EXPERTS_CALL, *_TOPK, *_GROUPED, *_ALIGN, *_KERNELS),
    f"{_MOE}.moe_align_block_size": _ALIGN,
    f"{_MOE}.moe_permute_unpermute": _PERMUTE,
    f"{_MOE}.utils": (
        (_V, "count_expert_num_tokens"),
        (
            f"{_E}.calls",
            "is_model_fused_shared_expert_compatible=fuses_no_shared_experts "
            "resolve_layer_fused_shared_expert=fuses_no_shared_experts",
        ),
        (f"{_E}.experts", "moe_kernel_quantize_input"),
    ),
    f"{_MOE}.all2all_utils": ((f"{_E}.experts", "maybe_make_prepare_finalize"),),
    f"{_MOE}.fused_moe_method_base": _METHODS,
    f"{_MOE}.unquantized_fused_moe_method": _METHODS,
    f"{_MOE}.runner": (),
    f"{_MOE}.runner.moe_runner": _RUNNER,
    f"{_MOE}.router": (),
    f"{_MOE}.router.gate_linear": _GATE,
    f"{_MOE}.router.fused_moe_router": ((f"{_V}.router", "FusedMoERouter"),),
    f"{_MOE}.router.base_router": (
        (f"{_E}.eplb", "eplb_map_to_physical_and_record"),
        (f"{_V}.router", "BaseRouter"),
    ),
    f"{_MOE}.router.router_factory": ((f"{_V}.router", "create_fused_moe_router"),),
    f"{_MOE}.router.fused_topk_router": (*_TOPK, (f"{_V}.router", "FusedTopKRouter")),
    f"{_MOE}.router.fused_topk_bias_router": (*_TOPK_BIAS, (f"{_V}.router", "FusedTopKBiasRouter")),
    f"{_MOE}.router.grouped_topk_router": (
        *_GROUPED,
        (f"{_E}.calls", "fused_grouped_topk"),
        (f"{_V}.router", "GroupedTopKRouter"),
        ("!router", "GroupedTopk"),
    ),
    f"{_MOE}.router.custom_routing_router": ((f"{_V}.router", "CustomRoutingRouter"),),
    f"{_MOE}.router.zero_expert_router": ((f"{_V}.router", "ZeroExpertRouter"),),
    f"{_MOE}.router.routing_simulator_router": (
        (
            f"{_V}.router",
            "RoutingSimulatorRouter RoutingSimulator RoutingStrategy DistributionBasedRouting",
        ),
    ),
    f"{_MOE}.experts": (),
    f"{_MOE}.experts.triton_moe": _KERNELS,
    f"{_MOE}.experts.fused_batched_moe": _KERNELS,
    f"{_MOE}.experts.marlin_moe": _KERNELS,
}

_BESIDE: dict[str, Rows] = {
    "vllm": (("conclave", "__version__"),),
    "vllm.logger": ((f"{_E}.helpers", "init_logger"),),
    "vllm.config": _ENGINE_CONFIG,
    "vllm.config.parallel": _ENGINE_CONFIG,
    "vllm.config.vllm": _ENGINE_CONFIG,
    "vllm.distributed": (*_GROUPS, *_EPLB),
    "vllm.distributed.parallel_state": _GROUPS,
    "vllm.distributed.communication_op": _GROUPS,
    "vllm.distributed.eplb": (),
    "vllm.distributed.eplb.eplb_state": _EPLB,
    "vllm.distributed.eplb.policy": (),
    "vllm.distributed.eplb.policy.default": ((f"{_E}.eplb", "DefaultEplbPolicy"),),
    "vllm.distributed.eplb.rebalance_execute": (
        (f"{_E}.eplb", "rearrange_expert_weights_inplace"),
    ),
    "vllm.forward_context": (
        (
            f"{_E}.context",
            "DPMetadata ForwardContext set_forward_context get_forward_context "
            "is_forward_context_available",
        ),
    ),
    "vllm.platforms": (
        (f"{_E}.platform", "current_platform Platform CpuArchEnum DeviceCapability"),
    ),
    "vllm.triton_utils": (("!triton", "tl triton"), (f"{_E}.helpers", "HAS_TRITON=HAS_NO_TRITON")),
    "vllm.utils": _MATHS,
    "vllm.utils.math_utils": _MATHS,
    "vllm.utils.import_utils": _PACKAGES,
    "vllm.utils.torch_utils": (
        (f"{_E}.helpers", "direct_register_custom_op is_torch_equal_or_newer"),
        (f"{_E}.platform", "set_random_seed"),
    ),
    "vllm.v1": (),
    "vllm.v1.worker": (),
    "vllm.v1.worker.ubatching": (
        (
            f"{_V}.ubatching",
            "UBatchContext dbo_current_ubatch_id dbo_current_ubatch_token_offset dbo_enabled "
            "dbo_maybe_run_recv_hook dbo_register_recv_hook dbo_yield make_ubatch_contexts",
        ),
    ),
    "vllm.model_executor": (),
    "vllm.model_executor.custom_op": ((f"{_E}.helpers", "CustomOp PluggableLayer"),),
    "vllm.model_executor.utils": (
        (f"{_V}.quant_method", "set_weight_attrs"),
        (f"{_E}.platform", "set_random_seed"),
    ),
    "vllm.model_executor.layers": (),
    "vllm.model_executor.layers.quantization": ((f"{_V}.quant_method", "QuantizationConfig"),),
    "vllm.model_executor.layers.quantization.base_config": (
        (f"{_V}.quant_method", "QuantizationConfig QuantizeMethodBase"),
    ),
}

TREE: dict[str, Rows] = {**_BESIDE, **_FUSED_MOE}
OVERLAID: tuple[str, ...] = tuple(_FUSED_MOE)
