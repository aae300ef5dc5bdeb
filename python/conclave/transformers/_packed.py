"""Packed layers of modules.

A layer is made from a module's weights at its first call and kept as long as the module lives. At
every call `conclave._watched` says whether the weights are still those: contents that changed are
packed again into the same memory, other tensors make a new layer.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch

from conclave._devices import traits_of
from conclave._growing import growing
from conclave._locks import ForkSafeLock
from conclave._watched import Watched, is_countable
from conclave.layer import Layer
from conclave.spec import LayerOptions, MoeSpec, QuantSpec
from conclave.transformers._coded_traits import is_coded, read_coded
from conclave.transformers._release import free, require_weights
from conclave.transformers._traits import ExpertsTraits, NotOurs, read_traits


def max_tokens(device: torch.device) -> int:
    """Tokens planned for at first: `conclave._growing` has what longer prompts are planned for."""
    return traits_of(device.type).module_tokens


_packed: weakref.WeakKeyDictionary[torch.nn.Module, PackedExperts] = weakref.WeakKeyDictionary()
_releasing: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_lock = ForkSafeLock()


def require_countable(tensors: list[torch.Tensor]) -> None:
    """Raises NotOurs for weights that may change unseen."""
    if not is_countable(tensors):
        raise NotOurs(
            "the weights were made in torch.inference_mode(), where writes to them cannot be seen; "
            "load the model outside of it"
        )


def _read(module: torch.nn.Module, hidden_size: int) -> ExpertsTraits:
    return read_coded(module) if is_coded(module) else read_traits(module, hidden_size)


@dataclasses.dataclass(frozen=True)
class _Packed:
    """A layer and what it was packed from, which threads read as one."""

    layer: Layer
    top_k: int
    watched: Watched


class PackedExperts:
    """The layer of one experts module."""

    def __init__(self, module: torch.nn.Module, hidden_size: int) -> None:
        self._hidden_size = hidden_size
        self.traits: ExpertsTraits = _read(module, hidden_size)
        self.layer: Layer | None = None
        self._packed: _Packed | None = None  # None: nothing is packed, or not completely
        self._lock = ForkSafeLock()

    def adopt(self, module: torch.nn.Module, layer: Layer) -> int:
        """Takes a layer that was packed elsewhere, and frees the module's copy; its bytes."""
        count = free(module, self.traits.weights.values())
        self.layer = layer
        self._packed = _Packed(layer, layer.spec.top_k, Watched(self.traits.tensors(module)))
        return count

    def layer_for(self, module: torch.nn.Module, top_k: int) -> Layer:
        """The layer of the module's weights, packed again if they are others than before."""
        packed = self._packed
        if packed is not None and self._serves(packed, module, top_k):
            return packed.layer
        del packed  # its memory goes before the new layer's comes
        with self._lock.now:
            if self._packed is None or not self._serves(self._packed, module, top_k):
                self._pack(module, top_k)
            return self._packed.layer  # type: ignore[union-attr]

    def pack_again(self, module: torch.nn.Module) -> None:
        """Now, if something is packed and the weights have changed since."""
        packed = self._packed
        if packed is not None:
            self.layer_for(module, packed.top_k)

    def _serves(self, packed: _Packed, module: torch.nn.Module, top_k: int) -> bool:
        return packed.top_k == top_k and packed.watched.is_current(self.traits.tensors(module))

    def _arrays(self, module: torch.nn.Module, tensors: list[torch.Tensor]) -> dict[str, Any]:
        arrays = self.traits.arrays(module, tensors)
        on_device = tensors[0].is_cuda
        if on_device and self.traits.transposed:
            # Kernels on a GPU read weights in place, rows first.
            arrays["gate_up"] = arrays["gate_up"].transpose(1, 2).contiguous()
            arrays["down"] = arrays["down"].transpose(1, 2).contiguous()
        return arrays

    def _layout(self, tensors: list[torch.Tensor]) -> dict[str, Any]:
        transposed = self.traits.transposed and not tensors[0].is_cuda
        return {"gate_up_order": self.traits.order, "transposed": transposed}

    def _pack(self, module: torch.nn.Module, top_k: int) -> None:
        require_weights(module)
        tensors = self.traits.tensors(module)
        wanted = module in _releasing and self.traits.can_release
        releases = wanted and self._is_copied(tensors[0])
        if not releases:
            require_countable(tensors)
        is_known = self._is_known(tensors, top_k)
        self._packed = None
        watched = Watched(tensors)
        if is_known:
            self._reload(module, tensors)
        else:
            self._make(module, top_k)
        if releases:
            free(module, self.traits.weights.values())
            watched = Watched(self.traits.tensors(module))
        self._packed = _Packed(self.layer, top_k, watched)  # type: ignore[arg-type]

    def _is_known(self, tensors: list[torch.Tensor], top_k: int) -> bool:
        """Whether the layer was packed from this memory, whatever that holds now."""
        packed = self._packed
        return packed is not None and packed.top_k == top_k and packed.watched.same_place(tensors)

    def _is_copied(self, weights: torch.Tensor) -> bool:
        """Whether packed weights are other memory than the module's."""
        return not weights.is_cuda or self.traits.transposed or self.traits.order == "interleaved"

    def _reload(self, module: torch.nn.Module, tensors: list[torch.Tensor]) -> None:
        # Transposed weights reach a GPU as a new copy, which a layer in place cannot move to.
        copies = self.traits.transposed or self.traits.makes_copies
        mode = "staged" if tensors[0].is_cuda and copies else "in_place"
        self.layer.reload(mode=mode, **self._layout(tensors), **self._arrays(module, tensors))  # type: ignore[union-attr]

    def _make(self, module: torch.nn.Module, top_k: int) -> None:
        self.layer = None  # its memory goes before the new layer's comes
        self.traits = _read(module, self._hidden_size)
        tensors = self.traits.tensors(module)
        spec = MoeSpec(
            top_k=top_k,
            activation=self.traits.activation,
            has_bias=self.traits.has_bias,
            has_gate=False,
            quant=self.traits.quant or QuantSpec(),
            weight_dtype=self.traits.weight_dtype,
        )
        options = LayerOptions(max_tokens=max_tokens(tensors[0].device), id_policy="skip")
        self.layer = growing(
            Layer.from_tensors(
                spec, options=options, **self._layout(tensors), **self._arrays(module, tensors)
            )
        )


def packed_experts(module: torch.nn.Module, hidden_size: int) -> PackedExperts:
    """The module's packed layer, made at the first call. Raises NotOurs."""
    found = _packed.get(module)
    if found is None:
        with _lock.now:
            found = _packed.get(module)
            if found is None:
                require_weights(module)
                found = PackedExperts(module, hidden_size)
                _packed[module] = found
    return found


def release_when_packed(module: torch.nn.Module, releases: bool) -> None:
    """Whether the module's own copy is freed as soon as its weights are packed."""
    if releases:
        _releasing.add(module)
    else:
        _releasing.discard(module)


def forget(module: torch.nn.Module) -> None:
    """Frees the packed layer of a module; its next call makes another.

    Raises ConclaveRuntimeError if it is all there is of the weights.
    """
    require_weights(module)
    _packed.pop(module, None)
