"""Routers: which experts a token goes to, and with what weights."""

from __future__ import annotations

from conclave.vllm.router.base import BaseRouter, FusedMoERouter
from conclave.vllm.router.factory import create_fused_moe_router
from conclave.vllm.router.simulator import (
    DistributionBasedRouting,
    RoutingSimulator,
    RoutingSimulatorRouter,
    RoutingStrategy,
)
from conclave.vllm.router.topk import (
    CustomRoutingRouter,
    FusedTopKBiasRouter,
    FusedTopKRouter,
    GroupedTopKRouter,
)
from conclave.vllm.router.zero_experts import ZeroExpertRouter

__all__ = [
    "BaseRouter",
    "CustomRoutingRouter",
    "DistributionBasedRouting",
    "FusedMoERouter",
    "FusedTopKBiasRouter",
    "FusedTopKRouter",
    "GroupedTopKRouter",
    "RoutingSimulator",
    "RoutingSimulatorRouter",
    "RoutingStrategy",
    "ZeroExpertRouter",
    "create_fused_moe_router",
]
