"""Fused Mixture-of-Experts layers.

Arrays of numpy, torch and whatever else speaks DLPack are taken without copies, on the CPU and on
NVIDIA Hopper GPUs. See docs/python.md.
"""

from __future__ import annotations

from conclave import _conclave
from conclave._conclave import TuningTable
from conclave._runtime import get_num_threads, set_num_threads
from conclave.balance import (
    ExpertSlots,
    balance_experts,
    balance_rules,
    balancedness,
    moved_experts,
    spread_over,
)
from conclave.balancer import Balancer, BalancerStatus
from conclave.checkpoint import Checkpoint, CheckpointInfo, Feed, LayerInfo, inspect
from conclave.errors import (
    ConclaveCheckpointError,
    ConclaveCommError,
    ConclaveFileError,
    ConclaveFileNotFoundError,
    ConclaveMemoryError,
    ConclaveRuntimeError,
    ConclaveTypeError,
    ConclaveUnsupportedError,
    ConclaveValueError,
    Error,
)
from conclave.layer import Layer, LayerStats
from conclave.migration import Migration, MigrationStatus
from conclave.permute import moe_align_block_size, moe_permute, moe_unpermute
from conclave.placement import (
    determine_expert_map,
    determine_expert_placement_strategy,
    get_compressed_expert_map,
    round_robin_routing_tables,
)
from conclave.ranks import (
    Communicator,
    Survivors,
    Transport,
    connect,
    from_process_group,
    launch_command,
    local_group,
    survivors,
    transports,
)
from conclave.recording import (
    LayerDifferences,
    RecordedLayer,
    RoutingComparison,
    RoutingDifference,
    RoutingRecord,
    RoutingRecorder,
    RoutingReplay,
    compare_routing,
)
from conclave.refit import Refit, SharedWeights, SharedWeightsWriter
from conclave.routing import (
    RoutingMethodType,
    fused_topk,
    fused_topk_bias,
    get_routing_method_type,
    grouped_topk,
    route,
)
from conclave.spec import (
    ActivationSpec,
    LatentSpec,
    LayerOptions,
    MatrixCodes,
    MoeSpec,
    ParallelSpec,
    QuantSpec,
    ResidualMlpSpec,
    RouterInputNorm,
    RouterSpec,
    SharedExpertSpec,
    SimulatedRouting,
    WeightForm,
    weight_forms,
)
from conclave.tuning import tuning_candidates
from conclave.vllm import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    FusedMoEQuantDesc,
    GroupShape,
    biased_moe_quant_config,
    fp8_w8a8_moe_quant_config,
    fp8_w8a16_moe_quant_config,
    fused_experts,
    int4_w4a16_moe_quant_config,
    int8_w8a8_moe_quant_config,
    int8_w8a16_moe_quant_config,
    mxfp4_w4a16_moe_quant_config,
    nvfp4_moe_quant_config,
    ocp_mx_moe_quant_config,
)

# The name that pip and importlib.metadata know; `conclave` on PyPI is another package.
DISTRIBUTION = "conclave-moe"
__version__: str = _conclave.build_info()["version"]

__all__ = [
    "DISTRIBUTION",
    "ActivationSpec",
    "Balancer",
    "BalancerStatus",
    "Checkpoint",
    "CheckpointInfo",
    "Communicator",
    "ConclaveCheckpointError",
    "ConclaveCommError",
    "ConclaveFileError",
    "ConclaveFileNotFoundError",
    "ConclaveMemoryError",
    "ConclaveRuntimeError",
    "ConclaveTypeError",
    "ConclaveUnsupportedError",
    "ConclaveValueError",
    "Error",
    "ExpertSlots",
    "Feed",
    "FusedMoEConfig",
    "FusedMoEParallelConfig",
    "FusedMoEQuantConfig",
    "FusedMoEQuantDesc",
    "GroupShape",
    "LatentSpec",
    "Layer",
    "LayerDifferences",
    "LayerInfo",
    "LayerOptions",
    "LayerStats",
    "MatrixCodes",
    "Migration",
    "MigrationStatus",
    "MoeSpec",
    "ParallelSpec",
    "QuantSpec",
    "RecordedLayer",
    "Refit",
    "ResidualMlpSpec",
    "RouterInputNorm",
    "RouterSpec",
    "RoutingComparison",
    "RoutingDifference",
    "RoutingMethodType",
    "RoutingRecord",
    "RoutingRecorder",
    "RoutingReplay",
    "SharedExpertSpec",
    "SharedWeights",
    "SharedWeightsWriter",
    "SimulatedRouting",
    "Survivors",
    "Transport",
    "TuningTable",
    "WeightForm",
    "balance_experts",
    "balance_rules",
    "balancedness",
    "biased_moe_quant_config",
    "compare_routing",
    "connect",
    "determine_expert_map",
    "determine_expert_placement_strategy",
    "fp8_w8a8_moe_quant_config",
    "fp8_w8a16_moe_quant_config",
    "from_process_group",
    "fused_experts",
    "fused_topk",
    "fused_topk_bias",
    "get_compressed_expert_map",
    "get_num_threads",
    "get_routing_method_type",
    "grouped_topk",
    "inspect",
    "int4_w4a16_moe_quant_config",
    "int8_w8a8_moe_quant_config",
    "int8_w8a16_moe_quant_config",
    "launch_command",
    "local_group",
    "moe_align_block_size",
    "moe_permute",
    "moe_unpermute",
    "moved_experts",
    "mxfp4_w4a16_moe_quant_config",
    "nvfp4_moe_quant_config",
    "ocp_mx_moe_quant_config",
    "round_robin_routing_tables",
    "route",
    "set_num_threads",
    "spread_over",
    "survivors",
    "transports",
    "tuning_candidates",
    "weight_forms",
]
