"""The tensors of a saved model by their names on disk, widened to float64, and common layouts."""

import json
import pathlib

import numpy as np
import torch
from safetensors.torch import load_file

from goldens.oracle import Mlp, swiglu


class Disk:
    """Remembers which tensors were asked for, so that a forgotten one is noticed."""

    def __init__(self, directory: pathlib.Path):
        self.config = json.loads((directory / "config.json").read_text())
        self.tensors = load_file(directory / "model.safetensors")
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.tensors:
            raise SystemExit(f"no tensor {name} on disk")
        self.used.add(name)
        tensor = self.tensors[name]
        return tensor.numpy() if not tensor.is_floating_point() else tensor.to(torch.float64).numpy()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def unused(self, prefix: str) -> list[str]:
        return sorted(n for n in self.tensors if n.startswith(prefix) and n not in self.used)

    def mlp(self, prefix: str, gate="gate_proj", up="up_proj", down="down_proj", act=swiglu) -> Mlp:
        """One feed-forward network of separate linear layers; gate None: not gated."""
        weight = lambda name: None if name is None else self[f"{prefix}.{name}.weight"]
        bias = lambda name: self[f"{prefix}.{name}.bias"] if f"{prefix}.{name}.bias" in self else 0.0
        return Mlp(weight(up), weight(down), weight(gate), bias(gate), bias(up), bias(down), act)

    def experts(self, prefix: str, **names) -> list[Mlp]:
        """One network per expert, numbered from 0: prefix.0, prefix.1, ..."""
        count = 0
        while any(name.startswith(f"{prefix}.{count}.") for name in self.tensors):
            count += 1
        return [self.mlp(f"{prefix}.{e}", **names) for e in range(count)]

    def stacked(self, gate_up: str, down: str, columns=False, interleaved=False, act=swiglu) -> list[Mlp]:
        """gate_up [E, 2I, H] and down [E, H, I], columns: both transposed. Biases lie at NAME_bias."""
        fused, below = self[gate_up], self[down]
        if columns:
            fused, below = fused.swapaxes(1, 2), below.swapaxes(1, 2)
        bias = self[f"{gate_up}_bias"] if f"{gate_up}_bias" in self else np.zeros(fused.shape[:2])
        below_bias = self[f"{down}_bias"] if f"{down}_bias" in self else np.zeros(below.shape[:2])
        half = fused.shape[1] // 2
        gate = slice(0, None, 2) if interleaved else slice(0, half)
        up = slice(1, None, 2) if interleaved else slice(half, None)
        return [
            Mlp(f[up], d, f[gate], b[gate], b[up], c, act)
            for f, d, b, c in zip(fused, below, bias, below_bias, strict=True)
        ]

    def fused_mlp(self, gate_up: str, down: str, interleaved=False, act=swiglu) -> Mlp:
        """gate_up [2I, H] and down [H, I] of one network."""
        fused = self[gate_up]
        half = fused.shape[0] // 2
        gate = fused[0::2] if interleaved else fused[:half]
        up = fused[1::2] if interleaved else fused[half:]
        return Mlp(up, self[down], gate, act=act)
