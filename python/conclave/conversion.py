"""Models that are written anew with their experts in another form."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from conclave import _conclave, _limits, _runtime
from conclave.errors import ConclaveTypeError

_MOST_LAYERS = 2**31 - 1
_MOST = 2**63 - 1
_MOST_SEED = 2**64 - 1
_MOST_TOKENS = 1 << 20
_EVERY_LAYER = -1  # rows of layers that have none of their own
_ARRAYS = ("hidden", "router_input", "residual_input", "token_ids")

Array = Any  # numpy, torch, or anything with __dlpack__


@dataclasses.dataclass(frozen=True)
class ConversionFormat:
    """A form that conversions write. A name may stand once for each container."""

    name: str  # "int4-group128", "q4_k"
    options: str  # that may follow the name behind a colon: "group=N, asym"; or ""
    container: str  # "directory" or "gguf"


@dataclasses.dataclass(frozen=True)
class ConvertedMatrix:
    """A matrix that was converted, and how far its codes lie from its values."""

    name: str  # its linear layer's, and "[3]" for an expert of a stack
    layer: int
    kind: str  # "gate", "shared_down", "gate_up" for both in one
    rows: int
    cols: int
    format: str
    bytes_before: int
    bytes_after: int
    relative_error: float  # in L2
    worst_steps: float  # the largest difference, in distances between neighbouring codes


@dataclasses.dataclass(frozen=True)
class ConvertedLayer:
    """Outputs of a layer of both models in float64, on the same rows and routed by the same gate:
    the relative L2 error of each token."""

    layer: int
    median: float
    worst: float
    worst_token: int
    tokens: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """What a conversion wrote, and what that cost."""

    source: str
    destination: str
    model: str  # the result, as Checkpoint and Layer.from_checkpoint take it
    model_type: str
    format: str
    scales: str
    tokens: int  # rows of a layer that were compared, or of the one that has most
    seed: int
    bytes_before: int  # in all tensors
    bytes_after: int
    shards: int
    shards_kept: int  # finished by an earlier conversion
    relative_error: float  # all converted weights have it, in L2
    matrices: tuple[ConvertedMatrix, ...]
    layers: tuple[ConvertedLayer, ...]  # empty without tokens
    left_out: tuple[str, ...]  # files that were not copied
    incomplete: str  # why the result has MoE layers alone; "": it is a whole model
    no_tokenizer: str  # why a whole model in another container has none; "": it has one
    tensors_left_out: tuple[str, ...]


def conversion_formats() -> tuple[ConversionFormat, ...]:
    """The forms that `convert_model` writes."""
    return tuple(ConversionFormat(**row) for row in _conclave.conversion_formats())


def _rules(keep: Mapping[str, str] | Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """(pattern, format) of each rule, in order."""
    listed = keep.items() if isinstance(keep, Mapping) else keep
    if isinstance(listed, (str, bytes)) or not hasattr(listed, "__iter__"):
        raise ConclaveTypeError(f"keep: expected formats by pattern, found {type(keep).__name__}")
    rules = []
    for i, rule in enumerate(listed):
        if isinstance(rule, (str, bytes)) or not hasattr(rule, "__len__") or len(rule) != 2:
            raise ConclaveTypeError(f"keep[{i}]: expected (pattern, format), found {rule!r}")
        rules.append((_limits.text(f"keep[{i}]", rule[0]), _limits.text(f"keep[{i}]", rule[1])))
    return rules


def _arrays(name: str, given: Any) -> dict[str, Any]:
    """Arrays of one layer by name; an array alone is its hidden states."""
    if not isinstance(given, Mapping):
        return {"hidden": given}
    for key in given:
        if key not in _ARRAYS:
            raise ConclaveTypeError(f"{name}: expected some of {', '.join(_ARRAYS)}, found {key!r}")
    return {key: array for key, array in given.items() if array is not None}


def _rows(rows: Any) -> list[tuple[int, dict[str, Any]]]:
    """(layer, arrays) of each layer that has rows of its own, or of every layer."""
    if rows is None:
        return []
    if not isinstance(rows, Mapping) or "hidden" in rows:
        return [(_EVERY_LAYER, _arrays("rows", rows))]
    return [
        (_limits.integer("rows", layer, 0, _MOST_LAYERS), _arrays(f"rows[{layer}]", given))
        for layer, given in rows.items()
    ]


def convert_model(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    format: str,
    *,
    container: str | None = None,
    layers: Iterable[int] | None = None,
    keep: Mapping[str, str] | Iterable[tuple[str, str]] = (),
    scales: str = "amax",
    shard_bytes: int = 5_000_000_000,
    tokens: int = 32,
    seed: int = 0,
    rows: Array | Mapping[str, Array] | Mapping[int, Any] | None = None,
    replace: bool = False,
    keep_unfinished: bool = False,
    report: bool = True,
    progress: Callable[[str, int, int], object] | None = None,
) -> ConversionReport:
    """Writes a model with its routed and shared experts in another form; other tensors and files
    are copied. The model has its name only when all of it is there.

    Args:
        source: a model directory, or a GGUF file.
        destination: a directory to make, for a GGUF file too.
        format: a name of `conversion_formats()`, with options behind a colon:
            "gptq-int4:group=64,asym".
        container: "directory" or "gguf"; by default GGUF if the destination ends in ".gguf", else
            the only one that has the format, else that of the source.
        layers: numbers of the layers to convert; by default all MoE layers.
        keep: formats by pattern of linear layers that are left as they are, or get a form of their
            own: {"*.shared_expert.*": "source", "*.down_proj": "bf16"}; the first that matches
            counts. "*" stands for any text, "?" for one character.
        scales: "amax", the largest magnitude over the largest code, or "search", the scale of least
            squared error.
        shard_bytes: the largest shard, unless one linear layer is larger.
        tokens: random rows of each layer on which outputs of both models are compared; 0: none.
        seed: of these rows.
        rows: recorded rows in their place: [T, H] for all layers, or by layer's number; where a
            layer reads more, a mapping with hidden and router_input, residual_input or token_ids.
        replace: takes the place of a model of this name, and of an unfinished conversion.
        keep_unfinished: what fails or is stopped leaves what it has written in
            DESTINATION.partial, from which the next call with the same arguments goes on. Without
            it nothing is left, but what an earlier conversion had left there.
        report: writes conversion.json beside the model.
        progress: told on this thread that so many bytes of so many are "converting", then
            "measuring". What it raises ends the conversion and is raised here.

    Works with the threads of the process, without the GIL. Ctrl-C ends it.

    Raises:
        Error: as `Checkpoint` for the source; ConclaveValueError naming the argument;
            ConclaveUnsupportedError naming the tensor that no format of the result can say;
            ConclaveFileError for a destination that exists, is the source or holds it, cannot be
            made, or has too little room, and for a source that changes meanwhile;
            ConclaveCheckpointError naming the tensor of a weight that is not finite.
    """
    if progress is not None and not callable(progress):
        raise ConclaveTypeError(f"progress: expected a function, found {type(progress).__name__}")
    chosen = [] if layers is None else _limits.integers("layers", layers, 0, _MOST_LAYERS)
    values = _conclave.convert_model(
        _runtime.context("cpu"),
        _limits.path("source", source),
        _limits.path("destination", destination),
        _limits.text("format", format),
        container=None if container is None else _limits.text("container", container),
        layers=chosen if layers is None else _limits.some("layers", chosen),
        keep=_rules(keep),
        scales=_limits.text("scales", scales),
        shard_bytes=_limits.integer("shard_bytes", shard_bytes, 1, _MOST),
        tokens=_limits.integer("tokens", tokens, 0, _MOST_TOKENS),
        seed=_limits.integer("seed", seed, 0, _MOST_SEED),
        rows=_rows(rows),
        replace=_limits.flag("replace", replace),
        keep_unfinished=_limits.flag("keep_unfinished", keep_unfinished),
        report=_limits.flag("report", report),
        progress=progress,
    )
    return ConversionReport(
        **{
            **values,
            "matrices": tuple(ConvertedMatrix(**matrix) for matrix in values["matrices"]),
            "layers": tuple(ConvertedLayer(**layer) for layer in values["layers"]),
        }
    )
