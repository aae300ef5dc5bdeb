"""Goldens of families that transformers has no class for: the published formula takes its place.

A FormulaFamily states config.json as published and the shape of every tensor on disk. Its `evaluate`
writes the block out in torch, as the published code computes it, for the float32 and bfloat16 runs;
`read` gives the float64 block as for every other family. The two are written apart from each other.
"""

import dataclasses
import json
import pathlib
import types
from collections.abc import Callable
from typing import ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from goldens.family import Family
from goldens.recording import Recorded

Shapes = dict[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class PublishedConfig:
    """config.json, key for key; hidden_size apart, since families spell it differently."""

    fields: dict
    hidden_size: int

    def get_text_config(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(hidden_size=self.hidden_size)


class FormulaModel(torch.nn.Module):
    """Tensors under their names on disk, with what build.py wants of a model."""

    def __init__(self, config: PublishedConfig, tensors: dict[str, torch.Tensor]):
        super().__init__()
        self.published = config
        for name, tensor in tensors.items():
            parent = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in parent._modules:
                    parent.add_module(part, torch.nn.Module())
                parent = parent._modules[part]
            parent.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))

    def save_pretrained(self, directory: pathlib.Path) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        text = json.dumps(self.published.fields, indent=2, sort_keys=True)
        (directory / "config.json").write_text(text + "\n")


class BlockTensors:
    """A block's tensors in the run's type, by their names below the layer."""

    def __init__(self, model: FormulaModel, layer: str):
        self.layer = int(layer.rpartition(".")[2])
        self.tensors = {
            name.removeprefix(f"{layer}."): tensor
            for name, tensor in model.state_dict().items()
            if name.startswith(f"{layer}.")
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def mlp(self, path: str, x: torch.Tensor, names=("gate_proj", "up_proj", "down_proj"), act=None) -> torch.Tensor:
        """down(act(gate x, up x)), act: silu(g) * u where not given."""
        gate, up, down = (f"{path}.{name}" for name in names)
        g, u = self.linear(gate, x), self.linear(up, x)
        return self.linear(down, functional.silu(g) * u if act is None else act(g, u))


def combine(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, expert: Callable) -> torch.Tensor:
    """sum_k w_k * expert(id_k, x), weighted and summed in x's type, experts in ascending order."""
    out = torch.zeros_like(x)
    for number in ids.unique().tolist():
        tokens, slots = torch.nonzero(ids == number, as_tuple=True)
        rows = expert(number, x[tokens]) * weights[tokens, slots, None].to(x.dtype)
        out.index_add_(0, tokens, rows.to(x.dtype))
    return out


def gated_shapes(path: str, inner: int, outer: int, names=("gate_proj", "up_proj", "down_proj")) -> Shapes:
    gate, up, down = (f"{path}.{name}.weight" for name in names)
    return {gate: (inner, outer), up: (inner, outer), down: (outer, inner)}


def expert_shapes(path: str, count: int, inner: int, outer: int, **names) -> Shapes:
    """path.0 ... path.(count - 1), gated, one tensor each."""
    found = {}
    for e in range(count):
        found |= gated_shapes(f"{path}.{e}", inner, outer, **names)
    return found


def record_formula(model, family, path: str, hidden_states: torch.Tensor, extra: dict) -> Recorded:
    layer, _, block = path.rpartition(".")
    with torch.no_grad():
        return family.evaluate(BlockTensors(model, layer), block, family.fields(), hidden_states, extra)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormulaFamily(Family):
    """`module` is the same path as `disk`. Tensors beside the block's are left out of the file but for
    those of dense layers, which a layer rule has to tell apart."""

    shapes: Callable[[dict], Shapes]  # of every tensor, from the fields of config.json
    evaluate: Callable[..., Recorded]  # (BlockTensors, block, fields, hidden_states, extra)
    record: Callable[..., Recorded] = record_formula

    made_by: ClassVar[str] = "formula"

    def fields(self) -> dict:
        fields = self.config().fields
        return fields.get("text_config", fields)

    @property
    def model_type(self) -> str:
        return self.config().fields["model_type"]

    def build(self) -> FormulaModel:
        config = self.config()
        return FormulaModel(config, {name: torch.zeros(shape) for name, shape in self.shapes(self.fields()).items()})

    def loader(self) -> types.SimpleNamespace:
        def from_pretrained(directory: pathlib.Path, **_) -> tuple[FormulaModel, dict]:
            tensors = load_file(directory / "model.safetensors")
            expected = self.shapes(self.fields())
            info = {
                "missing_keys": expected.keys() - tensors.keys(),
                "unexpected_keys": tensors.keys() - expected.keys(),
                "mismatched_keys": {n for n, t in tensors.items() if expected.get(n) != tuple(t.shape)},
            }
            return FormulaModel(self.config(), tensors), info

        return types.SimpleNamespace(from_pretrained=from_pretrained)
