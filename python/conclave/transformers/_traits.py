"""What an experts module of transformers computes and how its weights lie.

Read from the module's attributes as they are there, since the set of attributes has grown with the
versions: 5.0 has no has_gate and no is_concatenated.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from conclave.spec import ActivationSpec, QuantSpec
from conclave.transformers import _activation

_FP4 = "float4_e2m1fn_x2"
_FP4_GROUP = 32  # columns of such weights that share a scale
_GPU_GROUP = 128  # columns of a row that share a scale on a GPU, which has no other groups


class NotOurs(Exception):
    """A module that the library does not compute; the text says why."""


@dataclasses.dataclass(frozen=True)
class ExpertsTraits:
    """One module's computation. `weights` maps the library's argument names to attributes."""

    weights: dict[str, str]
    activation: ActivationSpec
    order: str
    transposed: bool
    has_bias: bool
    quant: QuantSpec | None
    weight_dtype: str

    can_release: ClassVar[bool] = True
    # Whether `arrays` makes other memory than the module's, which no layer on a GPU can keep to.
    makes_copies: ClassVar[bool] = False

    def arrays(self, module: torch.nn.Module, tensors: list[torch.Tensor]) -> dict[str, Any]:
        """The arguments of `Layer.from_tensors`, from what `tensors` returned."""
        del module
        found = dict(zip(self.weights, (t.detach() for t in tensors), strict=True))
        if self.weight_dtype == _FP4:
            found |= {name: found[name].view(torch.uint8) for name in ("gate_up", "down")}
        return found

    def tensors(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """The weights in the order of `weights`, each the part that this process holds."""
        return [local_part(getattr(module, name)) for name in self.weights.values()]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's shard; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


def _first_name(module: torch.nn.Module, *names: str) -> str | None:
    for name in names:
        if getattr(module, name, None) is not None:
            return name
    return None


def _needed(module: torch.nn.Module, *names: str) -> str:
    name = _first_name(module, *names)
    if name is None:
        raise NotOurs(f"{type(module).__name__} has no {' or '.join(names)}")
    return name


def _is_transposed(module: torch.nn.Module, down: torch.Tensor, hidden_size: int) -> bool:
    """Whether down is [E, I, H]; the shape tells, unless I equals H."""
    rows, cols = down.shape[-2:]
    if rows != cols:
        return bool(cols == hidden_size)
    for name in ("is_transposed", "experts_are_transposed"):
        if hasattr(module, name):
            return bool(getattr(module, name))
    return False


def _activation_of(module: torch.nn.Module, has_gate: bool, device: torch.device) -> Any:
    act_fn = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    if has_gate:
        apply = getattr(module, "_apply_gate", None)
        if apply is None and act_fn is not None:

            def apply(both: torch.Tensor) -> torch.Tensor:
                gate, up = both.chunk(2, dim=-1)
                return act_fn(gate) * up

        config = getattr(module, "config", None)
        found = apply and _activation.identify_gated(apply, device, module, act_fn, config)
    else:
        found = act_fn and _activation.identify_plain(act_fn, device)
    if not found:
        raise NotOurs(f"the activation of {type(module).__name__} is none of the library's")
    return found


def _scale_weights(module: torch.nn.Module, gate_up: str, down: str) -> dict[str, str]:
    weights = {
        "gate_up_scale": _needed(module, f"{gate_up}_scale_inv"),
        "down_scale": _needed(module, f"{down}_scale_inv"),
    }
    if getattr(module, "activation_scheme", "dynamic") == "static":
        weights["gate_up_input_scale"] = _needed(module, f"{gate_up}_activation_scale")
        weights["down_input_scale"] = _needed(module, f"{down}_activation_scale")
    return weights


def _quant_of(module: torch.nn.Module, scale: torch.Tensor, is_fp4: bool = False) -> QuantSpec:
    """How float8 and fp4 weights and the rows that they multiply are scaled."""
    static = getattr(module, "activation_scheme", "dynamic") == "static"
    block = getattr(module, "block_size", None)
    powers = scale.dtype != torch.float32 and "e8m0" in str(scale.dtype)
    if is_fp4:
        if static:
            raise NotOurs("fp4 experts with static scales of rows")
        return QuantSpec(
            weights="block",
            block_rows=1,
            block_cols=_FP4_GROUP,
            activations="group",
            power_of_two_scales=powers,
        )
    if block is None:
        return QuantSpec(weights="tensor", activations="tensor_static" if static else "token")
    if not static and scale.is_cuda and block[1] != _GPU_GROUP:
        raise NotOurs(f"rows are quantised in groups of {block[1]} columns, not {_GPU_GROUP}")
    return QuantSpec(
        weights="block",
        block_rows=int(block[0]),
        block_cols=int(block[1]),
        activations="tensor_static" if static else "group",
        activation_group=_GPU_GROUP if static else int(block[1]),
        power_of_two_scales=powers,
    )


def read_traits(module: torch.nn.Module, hidden_size: int) -> ExpertsTraits:
    """Raises NotOurs, with the reason."""
    if getattr(module, "has_post_expert_norm", False):
        raise NotOurs(f"{type(module).__name__} normalises the output of each expert")
    gated = _first_name(module, "gate_up_proj")
    gate_up = gated or _needed(module, "up_proj")
    down = _needed(module, "down_proj")
    tensor, down_tensor = local_part(getattr(module, gate_up)), local_part(getattr(module, down))
    if tensor.dim() != 3 or down_tensor.dim() != 3:
        raise NotOurs(f"{type(module).__name__}.{gate_up} has {tensor.dim()} dimensions, not 3")
    found = _activation_of(module, gated is not None, tensor.device)
    weights = {"gate_up": gate_up, "down": down}
    has_bias = bool(getattr(module, "has_bias", False)) or _has_bias(module, gate_up, down)
    if has_bias:
        weights["gate_up_bias"] = _needed(module, f"{gate_up}_bias")
        weights["down_bias"] = _needed(module, f"{down}_bias")
    quant, dtype = None, str(tensor.dtype).removeprefix("torch.")
    is_fp4 = tensor.dtype == torch.int8 and _first_name(module, f"{gate_up}_scale_inv") is not None
    if tensor.dtype == torch.float8_e4m3fn or is_fp4:
        weights |= _scale_weights(module, gate_up, down)
        quant = _quant_of(module, getattr(module, weights["gate_up_scale"]), is_fp4)
    elif tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotOurs(f"weights are {str(tensor.dtype).removeprefix('torch.')}")
    _require_nothing_else(module, weights)
    return ExpertsTraits(
        weights=weights,
        activation=found.activation,
        order=found.order,
        transposed=not is_fp4 and _is_transposed(module, down_tensor, hidden_size),
        has_bias=has_bias,
        quant=quant,
        weight_dtype=_FP4 if is_fp4 else dtype,
    )


def _require_nothing_else(module: torch.nn.Module, weights: dict[str, str]) -> None:
    """Raises NotOurs for a module that computes with more than the weights that were read."""
    known = set(weights.values())
    for name, _ in (*module.named_parameters(), *module.named_buffers()):
        if name not in known:
            raise NotOurs(f"{type(module).__name__} has {name} besides its matrices")


def _has_bias(module: torch.nn.Module, gate_up: str, down: str) -> bool:
    return all(getattr(module, f"{name}_bias", None) is not None for name in (gate_up, down))
