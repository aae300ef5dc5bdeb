"""Which method a layer's configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from conclave.errors import ConclaveTypeError, ConclaveUnsupportedError
from conclave.vllm._modules import LayerNames
from conclave.vllm.parallel import FusedMoEConfig
from conclave.vllm.quant import FusedMoEQuantConfig
from conclave.vllm.quant_method.base import FusedMoEMethodBase
from conclave.vllm.quant_method.own import SchemeFusedMoEMethod, UnquantizedFusedMoEMethod
from conclave.vllm.scheme import is_read, read_scheme


def choose_method(
    layer: torch.nn.Module, quant_config: Any, names: LayerNames, moe: FusedMoEConfig
) -> FusedMoEMethodBase:
    """The method that the configuration's get_quant_method returns, else the library's own.

    Where that is None and nothing of the name is read here, the layer is plain, as in vLLM.

    Raises:
        ConclaveTypeError: for a method of another kind. Else as `read_scheme`.
    """
    found = _of_configuration(layer, quant_config, names.prefix)
    if found is not None:
        return found
    if quant_config is None or (_asks(quant_config) and not is_read(quant_config)):
        return UnquantizedFusedMoEMethod(moe)
    return SchemeFusedMoEMethod(moe, read_scheme(quant_config, names, moe.has_bias))


def _of_configuration(
    layer: torch.nn.Module, quant_config: Any, prefix: str
) -> FusedMoEMethodBase | None:
    if not _asks(quant_config):
        return None
    return checked_method(quant_config.get_quant_method(layer, prefix), "get_quant_method")


def checked_method(found: Any, source: str) -> FusedMoEMethodBase | None:
    """None, or a method for experts."""
    if found is None or isinstance(found, FusedMoEMethodBase):
        return found
    raise ConclaveTypeError(
        f"quant_method: {source} gave a {type(found).__module__}.{type(found).__qualname__}, "
        "expected a conclave.vllm.FusedMoEMethodBase"
    )


def check_eplb(method: FusedMoEMethodBase, enable_eplb: bool) -> None:
    """Raises ConclaveUnsupportedError where a method takes no ids of physical experts."""
    if enable_eplb and not method.supports_eplb:
        raise ConclaveUnsupportedError(
            f"enable_eplb: EPLB is not supported {type(method).__name__}."
        )


def _asks(quant_config: Any) -> bool:
    """Whether a configuration has methods of its own. Those of vLLM's own objects are not for
    layers of this library: such objects are read."""
    return (
        not isinstance(quant_config, (Mapping, FusedMoEQuantConfig))
        and callable(getattr(quant_config, "get_quant_method", None))
        and not type(quant_config).__module__.startswith("vllm.")
    )
