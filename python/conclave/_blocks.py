"""Layers of blocks as GGUF files store them, from arrays that hold such blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from conclave import _conclave, _frameworks, _runtime
from conclave._devices import traits_of
from conclave.layer import Layer
from conclave.spec import LayerOptions, MoeSpec, to_dict


class Blocks(NamedTuple):
    """Rows of one weight of a layer."""

    name: str  # "gate", "up", "down", or one of their biases
    expert: int
    type: str  # as GGUF files call it: "Q4_K"
    rows: Any  # [rows, row bytes]


def type_name(number: int) -> str:
    """The name of a type by its number in files. Raises Error for a number that has none."""
    return _conclave.gguf_type_name(number)


def row_bytes(type: str, elements: int) -> int:
    """The bytes of a row. Raises Error unless it has whole blocks."""
    return _conclave.gguf_row_bytes(type, elements)


@contextlib.contextmanager
def _put(spec: MoeSpec, blocks: Iterable[Blocks]) -> Iterator[_conclave.GgufBlocks]:
    found = _conclave.GgufBlocks(to_dict(spec))
    for name, expert, type, rows in blocks:
        found.put(name, expert, type, _frameworks.on_the_host(rows))
    yield found


def layer_of_blocks(
    spec: MoeSpec,
    blocks: Iterable[Blocks],
    *,
    device: str = "cpu",
    options: LayerOptions | None = None,
) -> Layer:
    """A layer whose codes are those that a `Checkpoint` makes of a file with these blocks.

    Args:
        spec: with all sizes, what the layer would be of weights that hold values.
        blocks: every weight of the layer once.

    Raises:
        Error: naming the weight.
    """
    context = _runtime.context(device, None)
    with _put(spec, blocks) as found:
        return Layer(
            _conclave.Layer.from_blocks(
                context, found, to_dict(options or {}), {}, traits_of(context.device).counts
            )
        )


def reload_of_blocks(layer: Layer, spec: MoeSpec, blocks: Iterable[Blocks]) -> None:
    """New blocks of the same types."""
    with _put(spec, blocks) as found:
        layer._core.reload_from_blocks(found, traits_of(layer.device).reload_mode)
