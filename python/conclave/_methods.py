"""Layers of experts that a method of checkpoints packs, from arrays in its layout.

The library's reader of the method unpacks them, so that Python need not know what bits mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from conclave import _conclave, _frameworks
from conclave._devices import traits_of
from conclave.checkpoint import Feed
from conclave.errors import Error
from conclave.layer import Layer
from conclave.spec import LayerOptions, MoeSpec, ParallelSpec, to_dict

_PREFIX = "model.layers.0.mlp.experts."


@contextlib.contextmanager
def _names_below_experts() -> Iterator[None]:
    """Errors name tensors as the caller did."""
    try:
        yield
    except Error as error:
        error.args = (str(error).replace(_PREFIX, ""),)
        error.tensor = error.tensor.replace(_PREFIX, "")
        raise


def _fed(
    spec: MoeSpec,
    quantization: Mapping[str, Any] | str,
    tensors: Mapping[str, Any],
    interleaved: bool,
    modules: Sequence[str],
) -> tuple[Feed, list[Any]]:
    """A feed that has all tensors, and those that must live as long as it."""
    # Both families call stacks the same; rows of gate and up alternate in gpt-oss alone.
    family = "gpt_oss" if interleaved else "qwen3_moe"
    feed = Feed(
        spec=spec, model_type=family, layers=[0], quantization=quantization, modules=modules
    )
    kept = []
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        kept.append(_frameworks.on_the_host(tensor))
        feed._core.put_in_place(_PREFIX + name, kept[-1])
    return feed, kept


def needs_plain_rows(spec: MoeSpec, device: str) -> bool:
    """Whether layers of modules leave rows as they are on a device, since it makes no codes of
    them: on a GPU, of groups of other widths than 128 whose scales are no powers of two."""
    if traits_of(device).makes_all_rows:
        return False
    return _conclave.gpu_rows_reason(to_dict(spec)) != ""


def layer_of_method(
    spec: MoeSpec,
    quantization: Mapping[str, Any] | str,
    tensors: Mapping[str, Any],
    *,
    device: str = "cpu",
    interleaved: bool = False,
    modules: Sequence[str] = (),
    options: LayerOptions | None = None,
    parallel: ParallelSpec | None = None,
) -> Layer:
    """A layer without a router.

    Args:
        spec: with all sizes, what the layer would be of weights that hold values.
        quantization: the method's quantization_config, or its text.
        tensors: by name below the experts: "gate_up_proj.qweight" for stacks [E, ...],
            "3.gate_proj.weight" for experts one by one.
        interleaved: rows of gate and up alternate.
        modules: what the quantization_config's rules for modules call the experts, as for a Feed.
        parallel: which part of it a rank has; tensors are whole and of no other part read.

    Raises:
        Error: naming the tensor.
    """
    with _names_below_experts():
        feed, kept = _fed(spec, quantization, tensors, interleaved, modules)
        plain_rows = needs_plain_rows(feed.layer(0).spec, device)
        layer = Layer.from_checkpoint(
            feed, 0, device=device, options=options, parallel=parallel, plain_rows=plain_rows
        )
    del feed, kept
    return layer


def reload_of_method(
    layer: Layer,
    spec: MoeSpec,
    quantization: Mapping[str, Any] | str,
    tensors: Mapping[str, Any],
    *,
    interleaved: bool = False,
    modules: Sequence[str] = (),
) -> None:
    """New weights of the same shapes."""
    with _names_below_experts():
        feed, kept = _fed(spec, quantization, tensors, interleaved, modules)
        layer.reload(feed, 0, mode=traits_of(layer.device).reload_mode)
    del feed, kept
