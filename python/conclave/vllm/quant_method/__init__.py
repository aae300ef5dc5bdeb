"""What owns a layer's parameters and computes with them: the library's methods, and your own."""

from __future__ import annotations

from conclave.vllm.quant_method.base import (
    FusedMoEMethodBase,
    QuantizationConfig,
    QuantizeMethodBase,
    process_weights_after_loading,
    set_weight_attrs,
)
from conclave.vllm.quant_method.modular import FusedMoEModularMethod
from conclave.vllm.quant_method.own import SchemeFusedMoEMethod, UnquantizedFusedMoEMethod

__all__ = [
    "FusedMoEMethodBase",
    "FusedMoEModularMethod",
    "QuantizationConfig",
    "QuantizeMethodBase",
    "SchemeFusedMoEMethod",
    "UnquantizedFusedMoEMethod",
    "process_weights_after_loading",
    "set_weight_attrs",
]
