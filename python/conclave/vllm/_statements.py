"""What a configuration of quantised weights states, by the keys of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conclave.errors import ConclaveTypeError

# Attributes under which vLLM's objects keep the whole configuration that they were made of.
_WHOLE = ("full_config", "quant_config", "config")
# Attributes that are called otherwise than the key.
_KEYS = {"weight_bits": "bits", "is_sym": "sym"}
# Algorithms of ModelOpt's objects that do not say theirs.
_ALGORITHMS = {
    "modelopt": "FP8",
    "modelopt_fp4": "NVFP4",
    "modelopt_mxfp8": "MXFP8",
    "modelopt_mixed": "MIXED_PRECISION",
}


def stated_by(config: Any) -> dict[str, Any]:
    """What a mapping, or an object of vLLM's `QuantizationConfig` kind, states; always with
    quant_method.

    Raises ConclaveTypeError for what is neither.
    """
    if isinstance(config, Mapping):
        stated = dict(config)
        if not stated.get("quant_method"):
            raise _no_method(config)
        return stated
    found = _attributes(config)
    get_name = getattr(config, "get_name", None)
    name = get_name() if get_name is not None else found.get("quant_method")
    if not name:
        raise _no_method(config)
    if name in _ALGORITHMS:
        # Newer objects call an algorithm their quant_method.
        method = found.get("quant_method")
        algorithm = method if method and method != name else _ALGORITHMS[name]
        found.setdefault("quant_algo", algorithm)
    return {**found, "quant_method": name}


def _no_method(config: Any) -> ConclaveTypeError:
    return ConclaveTypeError(
        "quant_config: expected a FusedMoEQuantConfig, a mapping with quant_method, or an object "
        f"with get_name, found {type(config).__name__}"
    )


def _attributes(config: Any) -> dict[str, Any]:
    """The attributes of an object, which are called after keys, and what it was made of."""
    kinds = (bool, int, float, str, list, tuple, Mapping)
    names = (name for name in dir(config) if not name.startswith("_"))
    values = {name: getattr(config, name, None) for name in names}
    found: dict[str, Any] = {
        name: value for name, value in values.items() if isinstance(value, kinds)
    }
    for attribute, key in _KEYS.items():
        if attribute in found:
            found.setdefault(key, found[attribute])
    for attribute in _WHOLE:
        whole = found.get(attribute)
        if isinstance(whole, Mapping):
            found |= whole
    return found
