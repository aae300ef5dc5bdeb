"""Layers made of vLLM's weights, and made again from what was written to them."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from conclave import _frameworks
from conclave._blocks import Blocks, layer_of_blocks, reload_of_blocks
from conclave._devices import traits_of
from conclave._growing import growing
from conclave._methods import layer_of_method, reload_of_method
from conclave.errors import Error
from conclave.layer import Layer
from conclave.spec import MoeSpec, ParallelSpec, QuantSpec
from conclave.vllm._arithmetic import weight_arguments
from conclave.vllm._checks import Sizes
from conclave.vllm._formats import QUARKS_ROWS, WeightFormat
from conclave.vllm._packed import readable
from conclave.vllm.quant import FusedMoEQuantConfig, dtype_text

Array = Any

_NAMES = {
    "gate_up": "w1",
    "down": "w2",
    "gate_up_scale": "w1_scale",
    "down_scale": "w2_scale",
    "gate_up_bias": "w1_bias",
    "down_bias": "w2_bias",
    "gate_up_input_scale": "a1_scale",
    "down_input_scale": "a2_scale",
    "gate_up_zero": "w1_zp",
    "down_zero": "w2_zp",
    "gate_up_global_scale": "g1_alphas",
    "down_global_scale": "g2_alphas",
    "gate_up_proj": "w1",
    "down_proj": "w2",
    "gate_up_proj_scale": "w1_scale",
    "down_proj_scale": "w2_scale",
    "gate_up_proj_bias": "w1_bias",
    "down_proj_bias": "w2_bias",
}
_OTHER_IDS = (
    "write -1 for a slot of no expert, as torch.where(topk_ids < num_experts, topk_ids, -1) does"
)


@dataclasses.dataclass(frozen=True)
class RankExperts:
    """A layer, and the index in it of each expert where it knows its own experts alone."""

    layer: Layer
    local_of: tuple[int, ...] | None = None

    def ids_of(self, topk_ids: Array) -> Array:
        """The layer's own ids, -1 for experts that are not in it."""
        if self.local_of is None:
            return topk_ids
        return _frameworks.looked_up(topk_ids, self.local_of)

    def run(
        self,
        hidden: Array,
        ids: Array,
        weights: Array,
        out: Array | None,
        stream: Any = None,
        workspace: Array | None = None,
    ) -> Any:
        """The weighted sum [T, H] of the experts of this rank."""
        with _without_options():
            return self.layer.forward(
                hidden,
                topk_ids=self.ids_of(ids),
                topk_weights=weights,
                out=out,
                stream=stream,
                workspace=workspace,
            )


class Packer(Protocol):
    """Makes a layer of arrays that are the caller's."""

    def make(self) -> Layer:
        """A layer that is packed anew."""

    def reload(self, layer: Layer) -> None:
        """Packs what the arrays hold now."""


class ArrayExperts:
    """Experts whose arrays hold codes, or values, as layers take them."""

    def __init__(
        self,
        config: FusedMoEQuantConfig,
        spec: MoeSpec,
        w1: Array,
        w2: Array,
        local_of: tuple[int, ...] | None,
        interleaved: bool,
    ) -> None:
        self._config, self._spec = config, spec
        self._w1, self._w2 = w1, w2
        self._layout: dict[str, Any] = {
            "gate_up_order": "interleaved" if interleaved else "concatenated",
            "expert_map": local_of,
        }

    def _arrays(self) -> dict[str, Any]:
        local_of = self._layout["expert_map"]
        given = weight_arguments(self._config, self._spec.quant, self._w1, self._w2, local_of)
        given |= {"gate_up": self._w1, "down": self._w2}
        return {name: readable(array, _NAMES[name]) for name, array in given.items()}

    def make(self) -> Layer:
        """A layer that is packed anew."""
        with _names_of_vllm():
            parallel = _parallel(self._layout["expert_map"])
            layer = Layer.from_tensors(
                self._spec, parallel=parallel, **self._layout, **self._arrays()
            )
            return growing(layer)

    def reload(self, layer: Layer) -> None:
        """Packs what the arrays hold now."""
        with _names_of_vllm():
            mode = traits_of(layer.device).reload_mode
            layer.reload(mode=mode, **self._layout, **self._arrays())


class MethodExperts:
    """Experts whose codes the reader of a checkpoint's method unpacks: those of a rank alone."""

    def __init__(
        self,
        spec: MoeSpec,
        sizes: Sizes,
        method: Mapping[str, Any] | str,
        tensors: Callable[[], Mapping[str, Array]],
        device: str,
        interleaved: bool = False,
        parallel: ParallelSpec | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        self._parallel, self._modules = parallel, modules
        self._method, self._tensors = method, tensors
        self._device, self._interleaved = device, interleaved
        self._spec = _own_experts(spec, sizes)

    def make(self) -> Layer:
        """A layer that is packed anew."""
        with _names_of_vllm():
            layer = layer_of_method(
                self._spec,
                self._method,
                self._tensors(),
                device=self._device,
                interleaved=self._interleaved,
                modules=self._modules,
                parallel=self._parallel,
            )
            return growing(layer)

    def reload(self, layer: Layer) -> None:
        """Packs what the arrays hold now."""
        with _names_of_vllm():
            reload_of_method(
                layer,
                self._spec,
                self._method,
                self._tensors(),
                interleaved=self._interleaved,
                modules=self._modules,
            )


def _own_experts(spec: MoeSpec, sizes: Sizes) -> MoeSpec:
    """The layer of a rank's own experts, as it would be of weights that hold values."""
    return dataclasses.replace(
        spec,
        num_experts=sizes.experts,
        # A token may have more choices than a rank has experts; no id names these.
        num_zero_experts=max(spec.top_k - sizes.experts, 0),
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        weight_dtype="bfloat16",
        quant=QuantSpec(),
    )


class BlockExperts:
    """Experts of blocks as GGUF files store them: those of a rank alone."""

    def __init__(
        self, spec: MoeSpec, sizes: Sizes, blocks: Callable[[], Iterable[Blocks]], device: str
    ) -> None:
        self._spec = _own_experts(spec, sizes)
        self._blocks, self._device = blocks, device

    def make(self) -> Layer:
        """A layer that is packed anew."""
        return growing(layer_of_blocks(self._spec, self._blocks(), device=self._device))

    def reload(self, layer: Layer) -> None:
        """Packs what the arrays hold now."""
        reload_of_blocks(layer, self._spec, self._blocks())


def six_bit_experts(
    config: FusedMoEQuantConfig,
    coded: WeightFormat,
    spec: MoeSpec,
    w1: Array,
    w2: Array,
    sizes: Sizes,
    interleaved: bool,
) -> MethodExperts:
    """Experts of codes that no array of a layer holds, as Quark packs them."""

    def tensors() -> dict[str, Array]:
        planes = weight_arguments(config, spec.quant, w1, w2)
        return {
            "gate_up_proj": w1,
            "down_proj": w2,
            "gate_up_proj_scale": planes["gate_up_scale"],
            "down_proj_scale": planes["down_scale"],
            "gate_up_proj_bias": planes["gate_up_bias"],
            "down_proj_bias": planes["down_bias"],
        }

    weight = {
        "dtype": coded.method,
        "qscheme": "per_group",
        "group_size": coded.group,
        "scale_format": "e8m0",
    }
    rows = QUARKS_ROWS.get(dtype_text(config.quant_dtype) or "")
    groups = {**weight, "dtype": rows, "is_dynamic": True} if rows is not None else None
    kinds = {"weight": weight, "input_tensors": groups}
    method = {"quant_method": "quark", "global_quant_config": kinds}
    device = _frameworks.device_of(w1)
    return MethodExperts(spec, sizes, method, tensors, device, interleaved)


@contextlib.contextmanager
def _names_of_vllm() -> Iterator[None]:
    """Errors of a layer's weights name the arguments that they came from."""
    try:
        yield
    except Error as error:
        ours = re.match(r"\w*", error.tensor)[0]  # type: ignore[index]
        if ours in _NAMES:
            error.args = (str(error).replace(ours, _NAMES[ours], 1),)
            error.tensor = error.tensor.replace(ours, _NAMES[ours], 1)
        raise


@contextlib.contextmanager
def _without_options() -> Iterator[None]:
    """Errors of a forward do not advise options of a layer, which callables of vLLM lack."""
    try:
        yield
    except Error as error:
        if "id_policy" in error.hint:
            error.args = (str(error).replace(error.hint, _OTHER_IDS),)
            error.hint = _OTHER_IDS
        raise


def _parallel(local_of: tuple[int, ...] | None) -> ParallelSpec | None:
    """A rank that holds what the map says, and sums no more than that."""
    if local_of is None:
        return None
    ranks = tuple(0 if index >= 0 else -1 for index in local_of)
    return ParallelSpec(placement="custom", rank_of=ranks, reduce="partial")
