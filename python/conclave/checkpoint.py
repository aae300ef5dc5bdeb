"""Model directories: config.json with model.safetensors or its shards."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from conclave import _conclave, _limits
from conclave.errors import ConclaveTypeError
from conclave.spec import MoeSpec, from_dict, to_dict

_MOST_LAYERS = 2**31 - 1
_MOST_SIZE = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class LayerInfo:
    """A MoE layer of a checkpoint, described without reading its data."""

    index: int  # N of model.layers.N
    prefix: str  # "model.layers.0.mlp."
    layout: str  # how experts are stored: "per_expert", "stacked", ...
    spec: MoeSpec
    bytes: int
    total_parameters: int
    active_parameters: int
    supported: bool
    reason: str  # why not supported


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint, described without reading its data."""

    directory: str
    model_type: str
    architecture: str
    num_hidden_layers: int
    total_bytes: int
    total_parameters: int
    notes: tuple[str, ...]
    layers: tuple[LayerInfo, ...]

    def layer(self, index: int) -> LayerInfo:
        """The MoE layer of that number. Raises KeyError."""
        for layer in self.layers:
            if layer.index == index:
                return layer
        raise KeyError(f"layer {index}: this checkpoint's are {[x.index for x in self.layers]}")


def _number(argument: str, layer: Any) -> int:
    return _limits.integer(argument, layer, -_MOST_LAYERS, _MOST_LAYERS)


def _listed(argument: str, values: Any) -> list[Any]:
    if isinstance(values, (list, tuple)):
        return list(values)
    raise ConclaveTypeError(f"{argument}: expected a list, found {type(values).__name__}")


def _config_text(quantization: Any) -> str:
    """A quantization_config as JSON."""
    if isinstance(quantization, str):
        return quantization
    if not isinstance(quantization, Mapping):
        raise ConclaveTypeError(
            f"quantization: expected a mapping or a text, found {type(quantization).__name__}"
        )
    try:
        return json.dumps(quantization)
    except (TypeError, ValueError) as error:
        raise ConclaveTypeError(f"quantization: expected values of JSON, found {error}") from None


def layer_info(values: dict[str, Any]) -> LayerInfo:
    """From the dictionary of the extension module."""
    return LayerInfo(**{**values, "spec": from_dict(MoeSpec, values["spec"])})


class Checkpoint:
    """An open model directory: its headers were read and are consistent.

    Args:
        directory: a folder with config.json and safetensors files.
        experts: "text", or "vision" for models with two sets of experts.
        extra_layers: also list the MoE layers of multi-token prediction.
        verify: check data against conclave.manifest.json while it is read.

    Raises:
        ConclaveFileError, ConclaveCheckpointError: naming file, tensor, expected and found.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        experts: str = "text",
        extra_layers: bool = False,
        verify: bool = False,
    ) -> None:
        self._core = _conclave.Checkpoint.open(
            _limits.path("directory", directory),
            _limits.text("experts", experts),
            _limits.flag("extra_layers", extra_layers),
            _limits.flag("verify", verify),
        )

    @property
    def info(self) -> CheckpointInfo:
        core = self._core
        return CheckpointInfo(
            directory=core.directory,
            model_type=core.model_type,
            architecture=core.architecture,
            num_hidden_layers=core.num_hidden_layers,
            total_bytes=core.total_bytes,
            total_parameters=core.total_parameters,
            notes=tuple(core.notes()),
            layers=tuple(layer_info(layer) for layer in core.layers()),
        )


class Feed:
    """Weights of a model pushed tensor by tensor, in any order; names, checks and errors are those
    of a `Checkpoint`. Tensors are copied. One thread at a time.

    Args:
        config_json: the text of config.json; or
        gguf: the first bytes of a GGUF file, all that its header has and any number behind it, as
            bytes or an array of uint8, such as a `GGUFReader`'s `data`; or
        spec, model_type, layers: layers of one spec, by the names of a family ("qwen3_moe").
        quantization: with spec, the quantization_config of a method that packs the experts, as a
            mapping or its text; the spec then says what the layer would be without it.
        modules: with quantization, full names of modules that have one scheme by its rules, which
            all experts then have; by default rules are followed by the names of tensors.
        gguf_parts: the same of the other parts of a split model. A header with the list of all
            tensors says what layers have, and tensors must be as it says; otherwise layers have
            what is put, so that all should be put before a layer is made.
    """

    def __init__(
        self,
        config_json: str | None = None,
        *,
        spec: MoeSpec | Mapping[str, Any] | None = None,
        model_type: str = "",
        layers: Sequence[int] = (),
        quantization: Mapping[str, Any] | str | None = None,
        modules: Sequence[str] = (),
        gguf: Any = None,
        gguf_parts: Sequence[Any] = (),
    ) -> None:
        if sum(given is not None for given in (config_json, spec, gguf)) != 1:
            raise ConclaveTypeError(
                "config_json: expected one of config_json, spec with model_type and layers, and "
                "gguf, found none or several"
            )
        if gguf is not None:
            if quantization is not None:
                raise ConclaveTypeError(
                    "quantization: expected with a spec; tensors of gguf have types"
                )
            self._core = _conclave.Feed.from_gguf(gguf, _listed("gguf_parts", gguf_parts))
            return
        if config_json is not None:
            if quantization is not None:
                raise ConclaveTypeError(
                    "quantization: expected with a spec; config_json has its own"
                )
            self._core = _conclave.Feed.from_config(_limits.text("config_json", config_json))
            return
        of_layers = (
            to_dict(spec, "spec"),
            _limits.text("model_type", model_type),
            _limits.integers("layers", layers, 0, _MOST_LAYERS),
        )
        if quantization is None:
            self._core = _conclave.Feed.from_spec(*of_layers)
        else:
            self._core = _conclave.Feed.from_method(
                *of_layers, _config_text(quantization), _limits.texts("modules", modules)
            )

    def put(
        self,
        name: str,
        tensor: Any,
        type: int | str | None = None,
        shape: Sequence[int] | None = None,
    ) -> bool:
        """Takes a dense CPU tensor under its full name ("model.layers.0.mlp.gate.weight").

        Args:
            name: as the model's files have it.
            tensor: the values; with a type also their bytes.
            type: for tensors of GGUF models, ggml's number of a type or its name ("Q4_K").
            shape: with a type, the elements of each axis, the length of a row last: ggml's order
                reversed. By default that of `tensor`, where bytes are taken as rows.

        Returns whether a MoE layer has a use for it; others are forgotten.
        """
        name = _limits.text("name", name)
        if type is not None:
            kind = type if isinstance(type, str) else _limits.integer("type", type, 0, _MOST_LAYERS)
            sizes = None if shape is None else _limits.integers("shape", shape, 0, _MOST_SIZE)
            return self._core.put_gguf(name, tensor, kind, sizes)
        if shape is not None:
            raise ConclaveTypeError("shape: expected with a type, found one without")
        return self._core.put(name, tensor)

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the MoE layers, ascending."""
        return tuple(self._core.layers())

    def missing(self, limit: int = 10) -> list[str]:
        """What has not come yet, "NAME [rows, cols]"; empty when complete."""
        return self._core.missing(_limits.integer("limit", limit, 0, _MOST_LAYERS))

    def is_complete(self, layer: int) -> bool:
        """Whether every weight of a layer has come."""
        return self._core.is_complete(_number("layer", layer))

    def layer(self, index: int) -> LayerInfo:
        """A complete layer."""
        return layer_info(self._core.layer(_number("index", index)))

    def release(self, layer: int) -> None:
        """Frees the copies of one layer; it counts as missing again."""
        self._core.release(_number("layer", layer))


def inspect(
    directory: str | os.PathLike[str], *, experts: str = "text", extra_layers: bool = False
) -> CheckpointInfo:
    """Describes a model directory and its MoE layers; reads headers only.

    >>> conclave.inspect("Qwen3-30B-A3B").layers[0].spec.num_experts
    128
    """
    return Checkpoint(directory, experts=experts, extra_layers=extra_layers).info
