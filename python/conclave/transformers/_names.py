"""A model's tensors under the names of its published checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import torch

from conclave.transformers._coded_traits import published_codes
from conclave.transformers._split import whole

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def config_text(model: Any) -> str:
    """config.json of a model, with the fields that it would leave out, and the type that its values
    have now: `model.float()` leaves the configuration as it was loaded."""
    text = model.config.to_json_string(use_diff=False)
    dtype = next((p.dtype for p in model.parameters() if p.dtype in _TYPES), None)
    if dtype is None:
        return text
    fields = json.loads(text)
    _set_types(fields, str(dtype).removeprefix("torch."))
    return json.dumps(fields)


def _set_types(fields: dict[str, Any], name: str) -> None:
    fields.pop("torch_dtype", None)
    fields["dtype"] = name
    for part, value in fields.items():
        if part.endswith("_config") and isinstance(value, dict) and "model_type" in value:
            _set_types(value, name)


def layer_number(path: str) -> int | None:
    """N of "model.layers.N.mlp": the last number in a module's path."""
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", path)
    return int(numbers[-1]) if numbers else None


def tensors_below(model: torch.nn.Module, path: str) -> dict[str, torch.Tensor]:
    """Parameters, buffers and codes of a module by their full names, DTensors whole. Raises
    NotOurs."""
    module = model.get_submodule(path)
    state = ((n, t) for n, t in module.state_dict().items() if isinstance(t, torch.Tensor))
    found = {f"{path}.{name}": whole(tensor.detach()) for name, tensor in state}
    for below, part in module.named_modules(prefix=path):
        found |= {f"{below}.{name}": tensor for name, tensor in published_codes(part).items()}
    return found


def published(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as `save_pretrained` would name and shape them."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # a version that keeps the published names in memory
        return dict(tensors)
    try:
        return revert_weight_conversion(model, dict(tensors))
    except NotImplementedError:  # a step of loading that this version cannot take back
        return dict(tensors)


def in_memory(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by the names that they have here, which some families are published with."""
    return dict(tensors)
