"""Linear modules of quantisers, whose codes the library reads as their checkpoints have them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from conclave.transformers._traits import NotOurs

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class PackedLinear:
    """One matrix: the tensors behind its name, and the method that reads them."""

    method: dict[str, Any]
    tensors: Tensors
    in_features: int
    out_features: int


def _number(module: Any, *names: str) -> int:
    for name in names:
        value = getattr(module, name, None)
        if value is not None:
            return int(value)
    raise NotOurs(f"{type(module).__name__} has no {' or '.join(names)}")


def _four_bits(module: Any) -> PackedLinear | None:
    """bitsandbytes' nf4 and fp4."""
    state = getattr(getattr(module, "weight", None), "quant_state", None)
    if state is None or not hasattr(state, "as_dict"):
        return None
    aids = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    method = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": state.quant_type,
        "bnb_4bit_use_double_quant": bool(state.nested),
    }
    codes = module.weight.data.view(torch.uint8).reshape(-1, 1)
    return PackedLinear(method, {"weight": codes, **aids}, *state.shape[::-1])


def _eight_bits(module: Any) -> PackedLinear | None:
    """bitsandbytes' int8."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dtype != torch.int8:
        return None
    steps = getattr(weight, "SCB", None)
    if steps is None:
        steps = getattr(getattr(module, "state", None), "SCB", None)
    if steps is None:
        return None
    method = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return PackedLinear(method, {"weight": weight.data, "SCB": steps}, *weight.shape[::-1])


def _words(module: Any, names: tuple[str, ...]) -> Tensors | None:
    found = {name: getattr(module, name, None) for name in names}
    if any(not isinstance(tensor, torch.Tensor) for tensor in found.values()):
        return None
    return found  # type: ignore[return-value]


def _gptq(module: Any) -> PackedLinear | None:
    tensors = _words(module, ("qweight", "qzeros", "scales", "g_idx"))
    if tensors is None:
        return None
    version = getattr(module, "qzero_format", None)
    second = version() == 2 if callable(version) else False
    method = {
        "quant_method": "gptq",
        "bits": _number(module, "bits"),
        "group_size": _number(module, "group_size"),
        "sym": bool(getattr(module, "sym", False)),
        "desc_act": bool(getattr(module, "desc_act", False)),
        "checkpoint_format": "gptq_v2" if second else "gptq",
    }
    sizes = _number(module, "in_features", "infeatures"), tensors["qweight"].shape[1]
    return PackedLinear(method, tensors, *sizes)


def _awq(module: Any) -> PackedLinear | None:
    tensors = _words(module, ("qweight", "qzeros", "scales"))
    if tensors is None or getattr(module, "g_idx", None) is not None:
        return None
    if tensors["qweight"].shape[0] != _number(module, "in_features"):
        return None  # of another kernel's order
    method = {
        "quant_method": "awq",
        "bits": _number(module, "w_bit", "bits"),
        "group_size": _number(module, "group_size"),
        "zero_point": True,
        "version": "gemm",
    }
    return PackedLinear(method, tensors, _number(module, "in_features"), tensors["scales"].shape[1])


_READERS: tuple[Callable[[Any], PackedLinear | None], ...] = (_four_bits, _eight_bits, _gptq, _awq)


def read_packed(module: torch.nn.Module) -> PackedLinear | None:
    """The codes of a linear module; None for one that holds values, and for other modules."""
    for read in _READERS:
        found = read(module)
        if found is not None:
            return found
    return None


def is_opaque(module: torch.nn.Module) -> bool:
    """Whether a matrix's values show in what it does alone: a module of another quantiser, or a
    linear module whose weight is a tensor of its own kind, as torchao's are."""
    if not (hasattr(module, "in_features") and hasattr(module, "out_features")):
        return False
    if type(module) is not torch.nn.Linear:
        return read_packed(module) is None
    return type(module.weight) not in (torch.Tensor, torch.nn.Parameter)


def opaque_linears_of(expert: torch.nn.Module) -> dict[str, Any]:
    """By their paths in the expert, the outermost of each."""
    found: dict[str, Any] = {}
    for name, module in expert.named_modules():
        if is_opaque(module) and not any(name.startswith(f"{above}.") for above in found):
            found[name] = module
    return found


def values_of(module: Any) -> torch.nn.Linear:
    """A linear module with the values that an opaque one multiplies by, of the type of rows that it
    takes. Raises NotOurs."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        unit = torch.eye(module.in_features, device=_place_of(module), dtype=dtype)
        try:
            return _evaluated(module, unit, module.out_features).to(dtype)
        except Exception as error:
            reason = f"{type(module).__name__} cannot be unpacked: {error}"
    raise NotOurs(reason)


def _place_of(module: torch.nn.Module) -> torch.device:
    tensors = (*module.parameters(), *module.buffers())
    return tensors[0].device if tensors else torch.device("cpu")


def packed_linears_of(expert: torch.nn.Module) -> dict[str, PackedLinear]:
    """By their paths in the expert."""
    found = ((name, read_packed(module)) for name, module in expert.named_modules())
    return {name: packed for name, packed in found if packed is not None}


def with_values(expert: torch.nn.Module) -> torch.nn.Module:
    """A copy of an expert whose packed matrices hold values: what each makes of unit rows."""
    twins: dict[int, Any] = {}
    try:
        for name, linear in packed_linears_of(expert).items():
            module = expert.get_submodule(name)
            twins[id(module)] = _values_of(module, linear)
        for module in opaque_linears_of(expert).values():
            twins[id(module)] = values_of(module)
        return copy.deepcopy(expert, twins)
    except Exception as error:
        raise NotOurs(f"{type(expert).__name__} cannot be unpacked: {error}") from error


def _values_of(module: Any, packed: PackedLinear) -> torch.nn.Linear:
    device = next(iter(packed.tensors.values())).device
    return _evaluated(module, torch.eye(packed.in_features, device=device), packed.out_features)


def _evaluated(module: Any, unit: torch.Tensor, rows: int) -> torch.nn.Linear:
    """What a module makes of unit rows, in float32."""
    bias = getattr(module, "bias", None)
    bias = bias() if callable(bias) else bias  # of torch's own quantised modules
    with torch.no_grad():
        weight = module(unit).float()
        if bias is not None:
            weight = weight - bias.float()
        linear = torch.nn.Linear(len(unit), rows, bias=bias is not None, device=unit.device)
        linear.weight.copy_(weight.T)
        if bias is not None:
            linear.bias.copy_(bias)
    return linear


_NAMES = {1: ("gate_up_proj",), 2: ("gate_proj", "up_proj")}


def method_tensors(
    each: list[torch.nn.Module], first: tuple[str, ...], down: str, gated: bool
) -> tuple[dict[str, Any], Iterator[tuple[str, torch.Tensor]]]:
    """The method of all experts' matrices, and their tensors by the names of its checkpoints."""
    names = (*(_NAMES[len(first)] if gated else ("up_proj",)), "down_proj")
    paths = (*first, down)
    found = [[read_packed(e.get_submodule(path)) for path in paths] for e in each]
    methods = [p.method for expert in found for p in expert if p is not None]
    if len(methods) != len(each) * len(paths):
        raise NotOurs("some matrices of the experts are packed, and others are not")
    if any(method != methods[0] for method in methods):
        raise NotOurs("the experts' matrices are packed in several ways")

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (expert, packed) in enumerate(zip(each, found, strict=True)):
            for name, path, linear in zip(names, paths, packed, strict=True):
                for suffix, tensor in linear.tensors.items():  # type: ignore[union-attr]
                    yield f"{number}.{name}.{suffix}", tensor
                bias = getattr(expert.get_submodule(path), "bias", None)
                if bias is not None:
                    yield f"{number}.{name}.bias", bias

    return methods[0], tensors()
