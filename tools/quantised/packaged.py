"""Checkpoints that the method's own package writes and decodes."""

import importlib.util
import sys
import types

import numpy as np
import torch
from torch import nn

from quantised.case import LAYER, W123, Case, mixtral, qwen3


def without_start(name: str) -> None:
    """Lets modules of a package be imported without its __init__, which wants a GPU or old packages."""
    if name in sys.modules:
        return
    package = types.ModuleType(name)
    package.__path__ = list(importlib.util.find_spec(name).submodule_search_locations)
    sys.modules[name] = package


def linear(weight: np.ndarray, dtype: torch.dtype = torch.float32) -> nn.Linear:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=dtype)
    module.weight.data = torch.from_numpy(weight).to(dtype)
    return module


def digest(values: np.ndarray) -> int:
    """FNV-1a of the bytes, as a signed number; a zero counts as positive."""
    value = 0xCBF29CE484222325
    for byte in (np.ascontiguousarray(values, np.float64) + 0.0).tobytes():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value - 2**64 if value >= 2**63 else value


class Packaged(Case):
    """read() decodes the files by the published layout, the package must make the same of them."""

    method: dict = {}
    agreement = 0.0  # how far the package's weights may lie from ours, in parts of the largest

    @property
    def config(self):
        return qwen3(type(self), quantization_config=self.method)

    def encoded(self, module: str, weight: np.ndarray) -> dict[str, torch.Tensor]:
        """The tensors of a matrix, named from the module on."""
        raise NotImplementedError

    def packaged(self, disk: dict, module: str) -> torch.Tensor:
        """The weights that the package decodes."""
        raise NotImplementedError

    def is_quantised(self, disk, module):
        return True

    def tensors(self):
        return {
            f"{module}.{name}": tensor
            for module, weight in self.matrices().items()
            for name, tensor in self.encoded(module, weight).items()
        }

    def part_of(self, disk: dict, module: str) -> dict[str, torch.Tensor]:
        start = f"{module}."
        return {name.removeprefix(start): tensor for name, tensor in disk.items() if name.startswith(start)}

    def packaged_expert(self, disk: dict, number: int) -> dict[str, torch.Tensor]:
        place = f"{LAYER}{self.experts_at}.{number}"
        return {part: self.packaged(disk, f"{place}.{leaf}") for part, leaf in self.leaves.items()}

    def worst_difference(self, disk: dict) -> float:
        """Between our weights and the package's, in parts of the largest weight."""
        worst = 0.0
        for number in range(self.experts):
            theirs = self.packaged_expert(disk, number)
            for part, ours in self.expert(disk, number).items():
                difference = np.abs(ours - theirs[part].to(torch.float64).numpy())
                worst = max(worst, difference.max() / np.abs(ours).max())
        return worst

    def golden(self, disk):
        self.worst = self.worst_difference(disk)
        if self.worst > self.agreement:
            raise ValueError(f"{type(self).__name__}: the package's weights differ by {self.worst:.3g}")
        written = super().golden(disk)
        for part in self.leaves:
            digests = [digest(self.expert(disk, number)[part]) for number in range(self.experts)]
            written[f"weights.{part}"] = torch.tensor(digests, dtype=torch.int64)
        return written


class Mixtral:
    """Names and sizes as Mixtral has them."""

    experts_at, leaves, router = "block_sparse_moe.experts", W123, "block_sparse_moe.gate.weight"

    @property
    def config(self):
        return mixtral(type(self), quantization_config=self.method)
