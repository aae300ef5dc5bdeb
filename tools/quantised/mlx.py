"""MLX: groups of columns with a scale and a bias, as models of mlx-community store them."""

import numpy as np
import torch

from quantised.bits import codes_of, spread
from quantised.case import LAYER, draw, qwen3
from quantised.packaged import Packaged


def package():
    import mlx.core

    return mlx.core


def to_torch(array) -> torch.Tensor:
    mx = package()
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.uint16)).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def to_mlx(tensor: torch.Tensor):
    mx = package()
    if tensor.dtype == torch.bfloat16:
        return mx.array(tensor.view(torch.int16).numpy().view(np.uint16)).view(mx.bfloat16)
    return mx.array(tensor.numpy())


class Mlx(Packaged):
    """One tensor a projection for all experts."""

    experts_at = "mlp.switch_mlp"
    hidden, inner, experts, top_k = 192, 64, 4, 2
    bits, group = 4, 64
    dtype = torch.bfloat16
    router_bits: int | None = None  # None: the router is left as it is
    agreement = 2.0**-24

    @property
    def config(self):
        described = {"group_size": self.group, "bits": self.bits}
        if self.router_bits not in (None, self.bits):
            described[LAYER + "mlp.gate"] = {"group_size": self.group, "bits": self.router_bits}
        config = qwen3(type(self), quantization=described, quantization_config=described)
        return config | {"dtype": str(self.dtype).removeprefix("torch.")}

    def quantised(self, name: str, weight: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
        found = package().quantize(to_mlx(weight.to(self.dtype)), group_size=self.group, bits=bits)
        return {f"{name}.{plane}": to_torch(a) for plane, a in zip(("weight", "scales", "biases"), found)}

    def plain(self):
        plain = super().plain()
        if self.router_bits is None:
            return plain
        return self.quantised(LAYER + "mlp.gate", plain[LAYER + self.router], self.router_bits)

    def stacked(self, leaf: str) -> torch.Tensor:
        weights = self.matrices()
        return torch.from_numpy(np.stack([weights[f"{LAYER}{self.experts_at}.{e}.{leaf}"] for e in range(self.experts)]))

    def tensors(self):
        written = {}
        for leaf in self.leaves.values():
            written |= self.quantised(f"{LAYER}{self.experts_at}.{leaf}", self.stacked(leaf), self.bits)
        return written

    def planes(self, disk: dict, leaf: str, number: int) -> list[torch.Tensor]:
        return [disk[f"{LAYER}{self.experts_at}.{leaf}.{plane}"][number] for plane in ("weight", "scales", "biases")]

    def decoded(self, words: torch.Tensor, *affine: torch.Tensor, bits: int) -> np.ndarray:
        columns = affine[0].shape[1] * self.group
        scales, biases = (spread(plane.to(torch.float64).numpy(), self.group, columns) for plane in affine)
        return codes_of(words, bits, columns) * scales + biases

    def golden(self, disk):
        written = super().golden(disk)
        if self.router_bits is not None:
            planes = (disk[f"{LAYER}mlp.gate.{plane}"] for plane in ("weight", "scales", "biases"))
            written["router"] = torch.from_numpy(self.decoded(*planes, bits=self.router_bits))
        return written

    def packaged_expert(self, disk, number):
        found = {}
        for part, leaf in self.leaves.items():
            words, *affine = self.planes(disk, leaf, number)
            planes = [to_mlx(plane) for plane in (words, *(plane.float() for plane in affine))]
            found[part] = to_torch(package().dequantize(*planes, group_size=self.group, bits=self.bits))
        return found

    def expert(self, disk, number):
        return {
            part: self.decoded(*self.planes(disk, leaf, number), bits=self.bits) for part, leaf in self.leaves.items()
        }


class Mlx8(Mlx):
    hidden, inner, experts = 64, 128, 3
    bits = 8


class Mlx6(Mlx):
    """The router in codes as well."""

    hidden, inner = 96, 64
    bits, group, router_bits = 6, 32, 6


class Mlx5(Mlx):
    hidden, inner = 64, 96
    bits, group = 5, 32


class Mlx4Group32(Mlx):
    """float16, and a router of more bits than the experts."""

    hidden, inner = 64, 96
    group, dtype, router_bits = 32, torch.float16, 8


class Mlx3(Mlx):
    bits = 3


class Mlx2(Mlx):
    hidden, inner = 128, 256
    bits, group, experts = 2, 128, 3


class MlxShared(Mlx):
    """Qwen2-MoE as mlx-lm stores it: router and gate of the shared expert in 8 bits, all else in 4."""

    hidden, inner = 128, 64
    router_bits = 8
    shared, shared_inner = "mlp.shared_expert", 192
    gate = LAYER + "mlp.shared_expert_gate"

    @property
    def config(self):
        config = super().config
        for key in ("quantization", "quantization_config"):
            config[key] = config[key] | {self.gate: {"group_size": self.group, "bits": self.router_bits}}
        return config | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": self.shared_inner}

    def plain(self):
        gate = torch.from_numpy(draw("shared gate", 1, self.hidden) / 10)
        return super().plain() | self.quantised(self.gate, gate, self.router_bits)

    def tensors(self):
        written = super().tensors()
        for module, weight in self.matrices().items():
            if LAYER + self.shared in module:
                written |= self.quantised(module, torch.from_numpy(weight), self.bits)
        return written

    def of_module(self, disk: dict, module: str, bits: int) -> np.ndarray:
        return self.decoded(*(disk[f"{module}.{plane}"] for plane in ("weight", "scales", "biases")), bits=bits)

    def read(self, disk, module):
        return self.of_module(disk, module, self.bits)

    def shared_factor(self, disk, x):
        return 1 / (1 + np.exp(-x @ self.of_module(disk, self.gate, self.router_bits).T))


CASES = {
    "qwen3_moe-mlx-8bit": Mlx8,
    "qwen3_moe-mlx-6bit-router": Mlx6,
    "qwen3_moe-mlx-5bit": Mlx5,
    "qwen3_moe-mlx-4bit": Mlx,
    "qwen3_moe-mlx-4bit-router8": Mlx4Group32,
    "qwen2_moe-mlx-4bit-shared": MlxShared,
    "qwen3_moe-mlx-3bit": Mlx3,
    "qwen3_moe-mlx-2bit": Mlx2,
}
