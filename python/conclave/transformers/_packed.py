"""Packed layers of modules, and when they are no longer what the module holds.

A layer is made from a module's weights at its first call and kept as long as the module lives.
Every call compares where the weights lie, their version counters, shapes and types with what was
packed: an update in place, `load_state_dict` and an optimiser's step count the version up and are
packed again into the same memory; `.to()` and a new parameter change the rest and make a new layer.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from conclave.layer import Layer
from conclave.spec import LayerOptions, MoeSpec, QuantSpec
from conclave.transformers._traits import ExpertsTraits, local_part, read_traits

MAX_TOKENS = 2048  # planned for; longer prompts run in chunks of this size

_packed: weakref.WeakKeyDictionary[torch.nn.Module, PackedExperts] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _state_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    version = 0 if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class PackedExperts:
    """The layer of one experts module."""

    def __init__(self, module: torch.nn.Module, hidden_size: int) -> None:
        self._hidden_size = hidden_size
        self.traits: ExpertsTraits = read_traits(module, hidden_size)
        self.layer: Layer | None = None
        self._top_k = 0
        self._state: list[tuple[Any, ...]] = []
        self._lock = threading.Lock()

    def layer_for(self, module: torch.nn.Module, top_k: int) -> Layer:
        """The layer of the module's weights, packed again if they are others than before."""
        tensors = self.traits.tensors(module)
        state = [_state_of(tensor) for tensor in tensors]
        layer = self.layer
        if layer is not None and state == self._state and top_k == self._top_k:
            return layer
        with self._lock:
            if self.layer is None or state != self._state or top_k != self._top_k:
                self._pack(module, state, top_k)
            return self.layer  # type: ignore[return-value]

    def _arrays(self, tensors: list[torch.Tensor]) -> dict[str, Any]:
        arrays = dict(zip(self.traits.weights, (t.detach() for t in tensors), strict=True))
        on_device = tensors[0].is_cuda
        if on_device and self.traits.transposed:
            # Kernels on a GPU read weights in place, rows first.
            arrays["gate_up"] = arrays["gate_up"].transpose(1, 2).contiguous()
            arrays["down"] = arrays["down"].transpose(1, 2).contiguous()
        return arrays

    def _layout(self, tensors: list[torch.Tensor]) -> dict[str, Any]:
        transposed = self.traits.transposed and not tensors[0].is_cuda
        return {"gate_up_order": self.traits.order, "transposed": transposed}

    def _pack(self, module: torch.nn.Module, state: list[Any], top_k: int) -> None:
        same_place = [s[2:4] for s in state] == [s[2:4] for s in self._state]
        if self.layer is not None and same_place and top_k == self._top_k:
            tensors = self.traits.tensors(module)
            self._state = []  # until the reload is complete
            # Transposed weights reach a GPU as a new copy, which a layer in place cannot move to.
            mode = "staged" if tensors[0].is_cuda and self.traits.transposed else "in_place"
            self.layer.reload(mode=mode, **self._layout(tensors), **self._arrays(tensors))
        else:
            self.layer = None  # its memory goes before the new layer's comes
            self.traits = read_traits(module, self._hidden_size)
            tensors = self.traits.tensors(module)
            spec = MoeSpec(
                top_k=top_k,
                activation=self.traits.activation,
                has_bias=self.traits.has_bias,
                has_gate=False,
                quant=self.traits.quant or QuantSpec(),
                weight_dtype=self.traits.weight_dtype,
            )
            options = LayerOptions(max_tokens=MAX_TOKENS, id_policy="skip")
            self.layer = Layer.from_tensors(
                spec, options=options, **self._layout(tensors), **self._arrays(tensors)
            )
        self._top_k = top_k
        self._state = state


def packed_experts(module: torch.nn.Module, hidden_size: int) -> PackedExperts:
    """The module's packed layer, made at the first call. Raises NotOurs."""
    found = _packed.get(module)
    if found is None:
        with _lock:
            found = _packed.get(module)
            if found is None:
                found = PackedExperts(module, hidden_size)
                _packed[module] = found
    return found


def forget(module: torch.nn.Module) -> None:
    """Frees the packed layer of a module; its next call makes another."""
    _packed.pop(module, None)


__all__ = ["MAX_TOKENS", "PackedExperts", "forget", "local_part", "packed_experts"]
