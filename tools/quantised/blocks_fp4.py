"""mxfp4 as gpt-oss and DeepSeek-V4 have it; the tool itself writes these layouts."""

import numpy as np
import torch

from quantised.arithmetic import decode, encode, expand, quantised_rows, silu
from quantised.bits import E2M1, codes_of, nearest_codes, powers, spread, words_of
from quantised.case import LAYER, Case, draw, matrix, scales_of
from quantised.packaged import Packaged


def exponents(weight: np.ndarray, largest: float) -> np.ndarray:
    """e8m0 codes of groups of 32 columns: the least power that keeps every value in range."""
    amax = np.abs(weight).reshape(*weight.shape[:-1], -1, 32).max(-1)
    return (np.ceil(np.log2(amax / largest)) + 127).astype(np.uint8)


def halves(weight: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [..., columns / 2] and e8m0 codes [..., columns / 32] of a matrix or several."""
    scale = exponents(weight, 6)
    codes = nearest_codes(weight / spread(2.0 ** (scale - 127.0), 32, weight.shape[-1]), E2M1)
    packed = words_of(codes.reshape(-1, weight.shape[-1]), 4).reshape(*weight.shape[:-1], -1)
    return torch.from_numpy(packed), torch.from_numpy(scale)


class GptOss(Packaged):
    """Blocks of 16 bytes; rows of gate and up alternate; every matrix has a bias. transformers decodes it as well."""

    router = "mlp.router.weight"
    hidden, inner, experts, top_k = 96, 64, 4, 2
    alpha, limit = 1.702, 7.0

    @property
    def config(self):
        return {
            "model_type": "gpt_oss",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": 1,
            "swiglu_limit": self.limit,
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
                ],
            },
        }  # fmt: skip

    def plain(self):
        bf16 = lambda name, size, *shape: torch.from_numpy(size * draw(name, *shape)).to(torch.bfloat16)
        base = LAYER + self.experts_at
        return super().plain() | {
            LAYER + "mlp.router.bias": bf16("router bias", 0.5, self.experts),
            f"{base}.gate_up_proj_bias": bf16("gate up bias", 0.5, self.experts, 2 * self.inner),
            f"{base}.down_proj_bias": bf16("down bias", 0.5, self.experts, self.hidden),
        }

    def tensors(self):
        weights = self.matrices()
        at = lambda e, leaf: weights[f"{LAYER}{self.experts_at}.{e}.{leaf}"]
        # The size brings the clamp into play.
        fused = lambda e: 4 * np.stack([at(e, "gate_proj"), at(e, "up_proj")], axis=1).reshape(-1, self.hidden)
        written = {}
        for name, make in {"gate_up_proj": fused, "down_proj": lambda e: at(e, "down_proj")}.items():
            packed, scale = halves(np.stack([make(e) for e in range(self.experts)]))
            place = f"{LAYER}{self.experts_at}.{name}"
            written[f"{place}_blocks"] = packed.reshape(*scale.shape, 16)
            written[f"{place}_scales"] = scale
        return written

    def parted(self, fused, down) -> dict:
        return {"gate": fused[0::2], "up": fused[1::2], "down": down}

    def expert(self, disk, number):
        read = []
        for name in ("gate_up_proj", "down_proj"):
            place = f"{LAYER}{self.experts_at}.{name}"
            blocks, scale = disk[f"{place}_blocks"][number].flatten(1), disk[f"{place}_scales"][number]
            codes = codes_of(blocks, 4, 2 * blocks.shape[1])
            read.append(E2M1[codes] * spread(powers(scale), 32, codes.shape[1]))
        return self.parted(*read)

    def packaged_expert(self, disk, number):
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        read = []
        for name in ("gate_up_proj", "down_proj"):
            place = f"{LAYER}{self.experts_at}.{name}"
            # It gives [1, columns, rows] of bf16, which holds every value.
            planes = (disk[f"{place}_{plane}"][number : number + 1] for plane in ("blocks", "scales"))
            read.append(convert_moe_packed_tensors(*planes)[0].T)
        return self.parted(*read)

    def mlp(self, disk: dict, number: int, x: np.ndarray) -> np.ndarray:
        expert = self.expert(disk, number)
        base = LAYER + self.experts_at
        fused, down = (decode(disk[f"{base}.{n}_bias"][number]) for n in ("gate_up_proj", "down_proj"))
        gate = np.minimum(x @ expert["gate"].T + fused[0::2], self.limit)
        up = np.clip(x @ expert["up"].T + fused[1::2], -self.limit, self.limit)
        inner = (up + 1) * gate / (1 + np.exp(-self.alpha * gate))
        return inner @ expert["down"].T + down


class GptOssWide(GptOss):
    hidden, inner, experts, top_k = 64, 160, 3, 3
    limit = 2.5


class DeepseekV4(Case):
    """Two columns in a byte of int8, a power of two for 32 of them; activated rows are clamped first."""

    experts_at, leaves = "ffn.experts", {"gate": "w1", "up": "w3", "down": "w2"}
    router = "ffn.gate.weight"
    layer = "layers.0."
    hidden, inner, experts, top_k = 96, 64, 4, 2
    limit = 2.0
    rows = {"form": "group", "power_of_two": True}

    @property
    def config(self):
        return {
            "model_type": "deepseek_v4",
            "dtype": "bfloat16",
            "expert_dtype": "fp4",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "mlp_layer_types": ["moe"],
            "moe_intermediate_size": self.inner,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": 1,
            "routed_scaling_factor": 1.5,
            "scoring_func": "sqrtsoftplus",
            "swiglu_limit": self.limit,
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "scale_fmt": "ue8m0",
                "weight_block_size": [128, 128],
            },
        }

    def matrices(self):
        """The shared expert's as well, which is as wide as the others."""
        shapes = {"w1": (self.inner, self.hidden), "w3": (self.inner, self.hidden), "w2": (self.hidden, self.inner)}
        places = [f"{self.experts_at}.{e}" for e in range(self.experts)] + ["ffn.shared_experts"]
        names = [(f"{self.layer}{place}.{leaf}", shape) for place in places for leaf, shape in shapes.items()]
        return {name: 2 * matrix(name, *shape) for name, shape in names}

    def plain(self):
        gate = 2 * draw("router", self.experts, self.hidden) / np.sqrt(self.hidden)
        return {
            self.layer + self.router: torch.from_numpy(gate).to(torch.bfloat16),
            self.layer + "ffn.gate.bias": torch.from_numpy(0.1 * draw("bias", self.experts)).to(torch.float32),
        }

    def shared_tensors(self, weight: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """e4m3 in blocks of 128x128, whose scales are powers of two."""
        codes = np.ceil(np.log2(scales_of(weight, (128, 128)).astype(np.float64))) + 127
        steps = 2.0 ** (codes - 127)
        return encode(weight / expand(steps, weight.shape, (128, 128))), torch.from_numpy(codes.astype(np.uint8))

    def tensors(self):
        written = {}
        for module, weight in self.matrices().items():
            codes, scale = halves(weight) if ".experts." in module else self.shared_tensors(weight)
            written[f"{module}.weight"] = codes.view(torch.int8) if ".experts." in module else codes
            written[f"{module}.scale"] = scale.view(torch.float8_e8m0fnu)
        return written

    def read(self, disk, module):
        stored, scale = disk[f"{module}.weight"], powers(disk[f"{module}.scale"])
        if stored.dtype == torch.float8_e4m3fn:
            return decode(stored) * expand(scale, stored.shape, (128, 128))
        codes = codes_of(stored, 4, 2 * stored.shape[1])
        return E2M1[codes] * spread(scale, 32, codes.shape[1])

    def expert(self, disk, number):
        return self.read_expert(disk, f"{self.layer}{self.experts_at}.{number}")

    def clamped(self, expert: dict, x: np.ndarray) -> np.ndarray:
        seen = quantised_rows(x, self.rows)
        gate = np.minimum(seen @ expert["gate"].T, self.limit)
        up = np.clip(seen @ expert["up"].T, -self.limit, self.limit)
        return quantised_rows(silu(gate) * up, self.rows) @ expert["down"].T

    def mlp(self, disk, number, x):
        return self.clamped(self.expert(disk, number), x)

    def shared_rows(self, disk, x):
        return self.clamped(self.read_expert(disk, f"{self.layer}ffn.shared_experts"), x)


class DeepseekV4Wide(DeepseekV4):
    hidden, inner, experts, top_k = 160, 96, 3, 2


CASES = {
    "gpt_oss-mxfp4": GptOss,
    "gpt_oss-mxfp4-wide": GptOssWide,
    "deepseek_v4-fp4": DeepseekV4,
    "deepseek_v4-fp4-wide": DeepseekV4Wide,
}
