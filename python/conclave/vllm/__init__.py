"""vLLM's fused-MoE names: calls, configurations, `FusedMoE` and the modular pieces.

docs/coming-from-vllm.md says what each does here and where it differs. `FusedMoE` and the modular
pieces are torch modules and import torch when they are first asked for; the rest does not need it.
"""

from __future__ import annotations

import importlib
from typing import Any

from conclave.permute import moe_align_block_size, moe_permute, moe_unpermute
from conclave.placement import determine_expert_map, get_compressed_expert_map
from conclave.routing import RoutingMethodType, fused_topk, fused_topk_bias, grouped_topk
from conclave.vllm._packed import forget_packed_layers, packed_layers
from conclave.vllm._registry import static_forward_context
from conclave.vllm.activation import MoEActivation
from conclave.vllm.experts import fused_experts
from conclave.vllm.mapping import (
    FusedMoeWeightScaleSupported,
    build_initial_global_physical_to_logical_map,
    determine_expert_placement_strategy,
    ensure_round_robin_expert_routing_tables,
    fused_moe_make_expert_params_mapping,
    maybe_roundup_hidden_size,
)
from conclave.vllm.parallel import FusedMoEConfig, FusedMoEParallelConfig
from conclave.vllm.quant import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEQuantConfig,
    FusedMoEQuantDesc,
    GroupShape,
)
from conclave.vllm.quant_builders import (
    biased_moe_quant_config,
    fp8_w8a8_moe_quant_config,
    fp8_w8a16_moe_quant_config,
    gptq_marlin_moe_quant_config,
    int4_w4a16_moe_quant_config,
    int4_w4afp8_moe_quant_config,
    int8_w8a8_moe_quant_config,
    int8_w8a16_moe_quant_config,
    mxfp4_moe_quant_config,
    mxfp4_mxfp8_moe_quant_config,
    mxfp4_w4a8_moe_quant_config,
    mxfp4_w4a16_moe_quant_config,
    nvfp4_moe_quant_config,
    nvfp4_w4a16_moe_quant_config,
    ocp_mx_moe_quant_config,
)

_TORCH_NAMES = {
    "FusedMoEMethodBase": "quant_method",
    "FusedMoEModularMethod": "quant_method",
    "QuantizationConfig": "quant_method",
    "QuantizeMethodBase": "quant_method",
    "SchemeFusedMoEMethod": "quant_method",
    "UnquantizedFusedMoEMethod": "quant_method",
    "process_weights_after_loading": "quant_method",
    "set_weight_attrs": "quant_method",
    "MoERunner": "runner",
    "BaseRouter": "router",
    "CustomRoutingRouter": "router",
    "DistributionBasedRouting": "router",
    "FusedMoERouter": "router",
    "FusedTopKBiasRouter": "router",
    "FusedTopKRouter": "router",
    "GroupedTopKRouter": "router",
    "RoutingSimulator": "router",
    "RoutingSimulatorRouter": "router",
    "RoutingStrategy": "router",
    "ZeroExpertRouter": "router",
    "create_fused_moe_router": "router",
    "AllToAllPrepareAndFinalize": "exchange",
    "FusedMoE": "layer",
    "FusedMoEFactory": "factory",
    "ExpertMapManager": "expert_maps",
    "EPLBConfig": "eplb",
    "EplbLayerState": "eplb",
    "EplbModelState": "eplb_state",
    "EplbState": "eplb_state",
    "map_to_physical": "eplb",
    "rebalance_experts": "eplb",
    "BatchedConclaveExperts": "modular_experts",
    "BatchedPrepareAndFinalize": "prepare",
    "ConclaveExperts": "modular_experts",
    "ExpertTokensMetadata": "modular",
    "FusedMoEActivationFormat": "modular",
    "FusedMoEExperts": "newer",
    "FusedMoEExpertsModular": "newer",
    "FusedMoEExpertsMonolithic": "newer",
    "FusedMoEKernel": "newer",
    "FusedMoEModularKernel": "modular_kernel",
    "FusedMoEPermuteExpertsUnpermute": "modular",
    "FusedMoEPrepareAndFinalize": "modular",
    "FusedMoEPrepareAndFinalizeModular": "newer",
    "FusedMoEPrepareAndFinalizeMonolithic": "newer",
    "MoEPrepareAndFinalizeNoEP": "prepare",
    "SharedResizableBuffer": "modular_kernel",
    "TopKWeightAndReduce": "modular",
    "TopKWeightAndReduceContiguous": "reduce",
    "TopKWeightAndReduceDelegate": "reduce",
    "TopKWeightAndReduceNaiveBatched": "reduce",
    "TopKWeightAndReduceNoOP": "reduce",
    "UnfinalizedMoEOutput": "newer",
    "UnreducedConclaveExperts": "modular_experts",
    "install": "engine",
    "is_installed": "engine",
    "uninstall": "engine",
    "count_expert_num_tokens": "modular",
    "moe_problem_size": "modular",
}


def __getattr__(name: str) -> Any:
    module = _TORCH_NAMES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_TORCH_NAMES})


__all__ = [
    "FUSED_MOE_UNQUANTIZED_CONFIG",
    "FusedMoEConfig",
    "FusedMoEParallelConfig",
    "FusedMoEQuantConfig",
    "FusedMoEQuantDesc",
    "FusedMoeWeightScaleSupported",
    "GroupShape",
    "MoEActivation",
    "RoutingMethodType",
    "biased_moe_quant_config",
    "build_initial_global_physical_to_logical_map",
    "determine_expert_map",
    "determine_expert_placement_strategy",
    "ensure_round_robin_expert_routing_tables",
    "forget_packed_layers",
    "fp8_w8a8_moe_quant_config",
    "fp8_w8a16_moe_quant_config",
    "fused_experts",
    "fused_moe_make_expert_params_mapping",
    "fused_topk",
    "fused_topk_bias",
    "get_compressed_expert_map",
    "gptq_marlin_moe_quant_config",
    "grouped_topk",
    "int4_w4a16_moe_quant_config",
    "int4_w4afp8_moe_quant_config",
    "int8_w8a8_moe_quant_config",
    "int8_w8a16_moe_quant_config",
    "maybe_roundup_hidden_size",
    "moe_align_block_size",
    "moe_permute",
    "moe_unpermute",
    "mxfp4_moe_quant_config",
    "mxfp4_mxfp8_moe_quant_config",
    "mxfp4_w4a8_moe_quant_config",
    "mxfp4_w4a16_moe_quant_config",
    "nvfp4_moe_quant_config",
    "nvfp4_w4a16_moe_quant_config",
    "ocp_mx_moe_quant_config",
    "packed_layers",
    "static_forward_context",
]
