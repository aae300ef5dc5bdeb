"""Recorded routing: which experts every token had in every layer, and with which weights.

A server records while its layers run, a trainer gives the same choices to its own forwards, in any
batch, and both can be compared. docs/routing.md has the rules and the file's format.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Protocol

from conclave import _conclave, _frameworks, _limits, _runtime
from conclave.errors import ConclaveTypeError, ConclaveValueError
from conclave.layer import Layer
from conclave.spec import MoeSpec, to_dict

Array = Any
Tokens = Any  # int64 [T, 2], [T], or sequences of pairs or positions
Path = str | os.PathLike[str]

_MOST_LAYERS = 65536
_MOST_TOKENS = 1 << 40
_MOST = (1 << 63) - 1


def _keys(tokens: Tokens, count: int | None = None) -> Any:
    """Tokens as int64 [T, 2] of sequence and position; positions alone are of sequence 0."""
    import numpy

    if _frameworks.is_torch(tokens):
        tokens = tokens.detach().cpu().numpy()
    try:
        keys = numpy.asarray(tokens)
        if keys.size == 0 and not hasattr(tokens, "dtype"):
            keys = keys.astype("int64").reshape(0, 2)
    except ValueError as error:
        raise ConclaveValueError(f"tokens: expected pairs or positions, found {error}") from None
    if keys.dtype.kind not in "iu":
        raise ConclaveTypeError(f"tokens: expected integers, found {keys.dtype}")
    if keys.ndim == 1:
        keys = numpy.stack([numpy.zeros_like(keys), keys], axis=1)
    if keys.ndim != 2 or keys.shape[1] != 2:
        raise ConclaveValueError(f"tokens: expected [T, 2] or [T], found {list(keys.shape)}")
    if count is not None and len(keys) != count:
        raise ConclaveValueError(f"tokens: expected {count}, one for each row, found {len(keys)}")
    if keys.dtype.kind == "u" and keys.size and int(keys.max()) > _MOST:
        raise ConclaveValueError(f"tokens: expected integers up to {_MOST}, found {keys.max()}")
    return numpy.ascontiguousarray(keys, dtype="int64")


def _keys_there(tokens: Tokens, count: int, like: Array, stream: int) -> Any:
    """The same on the GPU of `like`, where an array of it stays."""
    if _frameworks.device_of(tokens) == "cpu":
        return _frameworks.copied_to(like, _keys(tokens, count), stream)
    shape = _frameworks.shape_of(tokens, "tokens")
    if len(shape) != 2 or shape[1] != 2 or _frameworks.dtype_name(tokens) != "int64":
        raise ConclaveValueError(
            f"tokens: expected int64 [T, 2] on a GPU, found {_frameworks.dtype_name(tokens)} "
            f"{list(shape)}"
        )
    return tokens


def _checked(layer: Any) -> Layer:
    if not isinstance(layer, Layer):
        raise ConclaveTypeError(f"layer: expected a Layer, found {type(layer).__name__}")
    return layer


def _layer_number(layer: Any) -> int:
    return _limits.integer("layer", layer, 0, _MOST_LAYERS)


@dataclasses.dataclass(frozen=True)
class RecordedLayer:
    """One layer of a record. Rows are in the order of their recording; of a token that occurs twice
    the last row counts."""

    layer: int
    tokens: Any  # numpy int64 [T, 2]: sequence and position
    topk_ids: Any  # numpy int32 [T, k]
    topk_weights: Any  # numpy float32 [T, k]
    dropped_tokens: int  # recorded as well, but no longer there
    spec_hash: int  # of the layer's spec


class RoutingRecord:
    """What was recorded, by value: of a recorder or of a file."""

    def __init__(self, core: _conclave.RoutingRecord) -> None:
        self._core = core

    @classmethod
    def open(cls, path: Path) -> RoutingRecord:
        """The record of a file.

        Raises:
            Error: naming the file, and the key or tensor that is wrong.
        """
        return cls(_conclave.RoutingRecord.open(os.fspath(path)))

    def write(self, path: Path) -> None:
        """Writes a safetensors file, which appears when it is whole."""
        self._core.write(os.fspath(path))

    @property
    def model(self) -> str:
        return self._core.model

    @property
    def model_type(self) -> str:
        return self._core.model_type

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the layers, ascending."""
        return tuple(row["layer"] for row in self._core.layers())

    def rows(self, layer: int) -> RecordedLayer:
        """A copy of a layer's rows, as arrays of numpy."""
        import numpy

        known = {row["layer"]: row for row in self._core.layers()}
        layer = _layer_number(layer)
        if layer not in known:
            raise ConclaveValueError(f"layer: expected one of {sorted(known)}, found {layer}")
        row = known[layer]
        count, slots = row["num_tokens"], row["num_slots"]
        tokens = numpy.empty((count, 2), "int64")
        ids = numpy.empty((count, slots), "int32")
        weights = numpy.empty((count, slots), "float32")
        self._core.copy_rows(layer, tokens, ids, weights)
        return RecordedLayer(layer, tokens, ids, weights, row["dropped_tokens"], row["spec_hash"])


class RoutingRecorder:
    """Rings of fixed size, one for each layer, in the host's memory or a GPU's.

    Those of the host are safe from several threads; rows of a GPU are copied to them, which waits
    for the stream. Those of a GPU take its rows without a wait, also in CUDA graphs; whatever reads
    them waits for the GPU.
    """

    def __init__(
        self,
        layers: Mapping[int, Layer | MoeSpec | Mapping[str, Any]],
        *,
        capacity: int = 65536,
        when_full: str = "drop_oldest",
        model: str = "",
        model_type: str = "",
        device: str = "cpu",
    ) -> None:
        """
        Args:
            layers: by their numbers in the model, what is recorded.
            capacity: tokens of each layer.
            when_full: "drop_oldest", "drop_newest", or "error", which refuses a whole call; on a
                GPU the refusal is an error of whatever reads the rings next, until `clear`.
            model, model_type: for the file.
            device: where the rings lie: "cpu", or a GPU such as "cuda:0", whose rows alone they
                then take.

        Raises:
            Error: naming the argument.
        """
        if not isinstance(layers, Mapping):
            raise ConclaveTypeError(
                f"layers: expected layers by their numbers, found {type(layers).__name__}"
            )
        fields = [
            _conclave.recorded_layer(
                _limits.integer("layer", number, 0, _MOST_LAYERS - 1),
                layer._core.spec() if isinstance(layer, Layer) else to_dict(layer, "layers"),
            )
            for number, layer in layers.items()
        ]
        options = (
            _limits.integer("capacity", capacity, 1, _MOST_TOKENS),
            _limits.text("when_full", when_full),
            _limits.text("model", model),
            _limits.text("model_type", model_type),
        )
        self._core: _conclave.RoutingRecorder | _conclave.DeviceRoutingRecorder
        if _limits.text("device", device) == "cpu":
            self._core = _conclave.RoutingRecorder(fields, *options)
        else:
            context = _runtime.context(device)
            self._core = _conclave.DeviceRoutingRecorder(context, fields, *options)

    def record(
        self,
        layer: int,
        topk_ids: Array,
        topk_weights: Array,
        tokens: Tokens | None = None,
        *,
        num_tokens: Array | None = None,
        stream: Any = None,
    ) -> None:
        """Adds rows of a layer, all or none.

        Args:
            layer: its number.
            topk_ids: [T, k] int32 or int64, -1 for none. topk_weights: [T, k] float32.
            tokens: who the rows belong to: [T, 2] integers, sequence and position, or [T]
                positions of sequence 0. By default they are numbered on, in each layer. For rings
                on a GPU they may lie there, and in a CUDA graph they must.
            num_tokens: for rings on a GPU, an int64 array of one element there: the rows that
                count.
            stream: for rings on a GPU, as in `Layer.forward`.

        Raises:
            Error: naming the argument; ConclaveRuntimeError if the ring is full and says "error".
        """
        shape = _frameworks.shape_of(topk_ids, "topk_ids")
        _frameworks.shape_of(topk_weights, "topk_weights")
        if isinstance(self._core, _conclave.DeviceRoutingRecorder):
            handle = _frameworks.stream_of(topk_ids, stream)
            rows = int(shape[0]) if shape else 0
            keys = None if tokens is None else _keys_there(tokens, rows, topk_ids, handle)
            self._core.record(
                _layer_number(layer), topk_ids, topk_weights, keys, num_tokens, handle
            )
            return
        if num_tokens is not None or stream is not None:
            name = "num_tokens" if num_tokens is not None else "stream"
            raise ConclaveValueError(f"{name}: rings in the host's memory have no use for it")
        ids, weights = _frameworks.on_the_host(topk_ids), _frameworks.on_the_host(topk_weights)
        keys = None if tokens is None else _keys(tokens, int(shape[0]) if shape else 0)
        self._core.record(_layer_number(layer), ids, weights, keys)

    def forward(
        self,
        layer: Layer,
        number: int,
        hidden: Array,
        *,
        tokens: Tokens | None = None,
        **arguments: Any,
    ) -> Array:
        """`layer.forward(hidden, **arguments)`, recorded as layer `number`."""
        slots = _checked(layer).num_slots
        rows = _frameworks.shape_of(hidden, "hidden")
        shape = (rows[0] if rows else 0, slots)  # what has no rows is refused by the layer
        captured = {}
        for name, dtype in (("captured_ids", "int32"), ("captured_weights", "float32")):
            if name not in arguments:
                arguments[name] = _frameworks.empty_like(hidden, shape, dtype, name)
            captured[name] = arguments[name]
        out = layer.forward(hidden, **arguments)
        ids, weights = captured["captured_ids"], captured["captured_weights"]
        count = arguments.get("num_tokens")
        if isinstance(self._core, _conclave.DeviceRoutingRecorder):
            stream = arguments.get("stream")
            self.record(number, ids, weights, tokens, num_tokens=count, stream=stream)
            return out
        if count is not None:  # the rows behind it hold nothing
            used = max(int(count.item() if hasattr(count, "item") else count), 0)
            ids, weights = ids[:used], weights[:used]
        self.record(number, ids, weights, tokens)
        return out

    def recorded_tokens(self, layer: int) -> int:
        """Tokens that a layer was given. Rings on a GPU wait for it, here and below."""
        return self._core.recorded_tokens(_layer_number(layer))

    def dropped_tokens(self, layer: int) -> int:
        """Those of them that are gone."""
        return self._core.dropped_tokens(_layer_number(layer))

    def snapshot(self) -> RoutingRecord:
        """A copy of what is there."""
        return RoutingRecord(self._core.snapshot())

    def write(self, path: Path) -> None:
        """`snapshot().write(path)`."""
        self.snapshot().write(path)

    def clear(self) -> None:
        """Forgets all rows and counts."""
        self._core.clear()


class HasSnapshot(Protocol):
    """A recorder: `RoutingRecorder`, or that of `conclave.transformers.record_routing`."""

    def snapshot(self) -> RoutingRecord: ...


Recorded = RoutingRecord | HasSnapshot | str | os.PathLike


def _record_of(recorded: Recorded) -> RoutingRecord:
    if isinstance(recorded, RoutingRecord):
        return recorded
    if isinstance(recorded, (str, os.PathLike)):
        return RoutingRecord.open(recorded)
    if not hasattr(recorded, "snapshot"):
        raise ConclaveTypeError(
            f"recorded: expected a record, a file or a recorder, found {type(recorded).__name__}"
        )
    return recorded.snapshot()


class RoutingReplay:
    """Finds recorded rows by token, for forwards of any batch. Safe from several threads."""

    def __init__(self, recorded: Recorded) -> None:
        """
        Args:
            recorded: a record, a file of one, or a recorder, of whose rows this has a copy.
        """
        self.record = _record_of(recorded)
        self._core = _conclave.RoutingReplay(self.record._core)
        rows = self.record._core.layers()
        self._slots = {row["layer"]: row["num_slots"] for row in rows}
        self._num_ids = {row["layer"]: row["num_ids"] for row in rows}

    def has(self, layer: int, token: tuple[int, int]) -> bool:
        """Whether a token, sequence and position, was recorded in a layer."""
        ((sequence, position),) = _keys([token], 1).tolist()
        return self._core.has(_layer_number(layer), sequence, position)

    def routing(self, layer: int, tokens: Tokens, like: Array | None = None) -> tuple[Array, Array]:
        """Ids [T, k] int32 and weights [T, k] float32 of tokens.

        Args:
            layer: its number.
            tokens: as in `RoutingRecorder.record`.
            like: an array of the library and on the device that the result shall be of; by default
                numpy.

        Raises:
            ConclaveValueError: naming the layer, or the token, that was not recorded.
        """
        import numpy

        keys, number = _keys(tokens), _layer_number(layer)
        shape = (len(keys), self._slots.get(number, 1))
        ids, weights = numpy.empty(shape, "int32"), numpy.empty(shape, "float32")
        self._core.find(number, keys, ids, weights)
        if like is not None and _frameworks.is_torch(like):
            torch = _frameworks.torch()
            return torch.from_numpy(ids).to(like.device), torch.from_numpy(weights).to(like.device)
        return ids, weights

    def _check_sizes(self, layer: Layer, number: int) -> None:
        _, num_ids, num_slots, _ = _conclave.recorded_layer(number, _checked(layer)._core.spec())
        if self._slots[number] == num_slots and self._num_ids[number] <= num_ids:
            return
        raise ConclaveValueError(
            f"layer {number}: the record is of another model: expected {num_slots} of {num_ids} "
            f"experts, found {self._slots[number]} of {self._num_ids[number]}"
        )

    def forward(
        self, layer: Layer, number: int, hidden: Array, tokens: Tokens, **arguments: Any
    ) -> Array:
        """`layer.forward` on the recorded ids and weights of the rows' tokens: on the same weights
        and plan it has the bits of the forward that was recorded.

        A layer whose router weighs shared experts takes the ids alone, and weighs them itself.

        Raises:
            ConclaveValueError: also for a record of a layer with another k, or with more experts.
        """
        ids, weights = self.routing(number, tokens, like=hidden)
        self._check_sizes(layer, _layer_number(number))
        if layer._core.router_weighs_shared:
            return layer.forward(hidden, topk_ids=ids, **arguments)
        return layer.forward(hidden, topk_ids=ids, topk_weights=weights, **arguments)


@dataclasses.dataclass(frozen=True)
class LayerDifferences:
    """How the two records of one layer differ."""

    layer: int
    compared: int  # tokens that both have
    only_in_first: int
    only_in_second: int
    other_experts: int  # tokens with another set of experts
    reordered: int  # with the same experts in other slots
    other_weights: int  # with the same experts in the same slots, and a weight of other bits
    worst_weight_difference: float  # of an expert; one that a side did not choose weighs 0
    worst_token: tuple[int, int]  # that has it
    same_spec: bool  # False: both specs are known and differ


@dataclasses.dataclass(frozen=True)
class RoutingDifference:
    """One token whose routing differs."""

    layer: int
    token: tuple[int, int]
    first_ids: tuple[int, ...]
    second_ids: tuple[int, ...]
    weight_difference: float


@dataclasses.dataclass(frozen=True)
class RoutingComparison:
    """Where two records differ, and how far."""

    layers: tuple[LayerDifferences, ...]  # that both have
    only_in_first: tuple[int, ...]  # layers
    only_in_second: tuple[int, ...]
    examples: tuple[RoutingDifference, ...]  # the first ones, by layer and token
    equal: bool  # the same layers and tokens, with the same bits


def compare_routing(
    first: Recorded, second: Recorded, *, most_examples: int = 16
) -> RoutingComparison:
    """Compares two records token by token, whatever the order of their rows.

    Args:
        first, second: records, files or recorders.
        most_examples: tokens that differ, to be listed.

    Raises:
        ConclaveValueError: a layer has another number of slots in the other record.
    """
    found = _conclave.compare_routing(
        _record_of(first)._core,
        _record_of(second)._core,
        _limits.integer("most_examples", most_examples, 0, _MOST),
    )
    return RoutingComparison(
        layers=tuple(LayerDifferences(**layer) for layer in found["layers"]),
        only_in_first=found["only_in_first"],
        only_in_second=found["only_in_second"],
        examples=tuple(RoutingDifference(**example) for example in found["examples"]),
        equal=found["equal"],
    )
