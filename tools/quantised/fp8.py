"""e4m3 as DeepSeek stores it, one tensor an expert or all experts in one."""

import types

import numpy as np
import torch

from quantised.arithmetic import F32, decode, expand
from quantised.case import LAYER, Case, deepseek, draw, qwen3, store


class DeepseekBlock(Case):
    """float32 scales of 128x128 blocks, partial ones at both ends; steps of rows are powers of two."""

    shared, shared_inner = "mlp.shared_experts", 132
    block = (128, 128)
    rows = {"form": "group", "power_of_two": True}

    @property
    def config(self):
        return deepseek(
            type(self),
            quantization_config={
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "scale_fmt": "ue8m0",
                "weight_block_size": list(self.block),
            },
        )

    def plain(self):
        bias = torch.from_numpy(0.1 * draw("bias", self.experts)).to(torch.float32)
        return super().plain() | {f"{LAYER}mlp.gate.e_score_correction_bias": bias}

    def tensors(self):
        written = {}
        for module, weight in self.matrices().items():
            written[f"{module}.weight"], written[f"{module}.weight_scale_inv"] = store(weight, self.block)
        return written


class SharedPlain(Case):
    """The quantiser left the shared expert, its gate and the router in bf16."""

    shared, shared_inner = "mlp.shared_expert", 44

    def plain(self):
        gate = torch.from_numpy(draw("shared gate", 1, self.hidden) / 10).to(torch.bfloat16)
        return super().plain() | {f"{LAYER}mlp.shared_expert_gate.weight": gate}

    def shared_factor(self, disk, x):
        return 1 / (1 + np.exp(-x @ decode(disk[f"{LAYER}mlp.shared_expert_gate.weight"]).T))


class QwenSharedPlain(SharedPlain):
    """bf16 scales."""

    inner, hidden = 72, 200
    block = (128, 128)
    rows = {"form": "group"}

    @property
    def config(self):
        config = qwen3(
            type(self),
            shared_expert_intermediate_size=self.shared_inner,
            quantization_config={
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": list(self.block),
                "modules_to_not_convert": ["mlp.gate", "shared_expert", "shared_expert_gate"],
            },
        )
        return config | {"model_type": "qwen2_moe"}

    def tensors(self):
        written = {}
        for module, weight in self.matrices().items():
            if ".experts." not in module:
                written[f"{module}.weight"] = torch.from_numpy(weight).to(torch.bfloat16)
                continue
            codes, scale = store(weight, self.block, lambda s: s.to(torch.bfloat16))
            written[f"{module}.weight"], written[f"{module}.weight_scale_inv"] = codes, scale
        return written


class QwenStacked(Case):
    """Three-dimensional tensors, quantised by the code that transformers saves fp8 models with."""

    hidden, inner, experts, top_k = 256, 128, 2, 1
    block = (128, 128)
    rows = {"form": "group"}

    @property
    def config(self):
        return qwen3(
            type(self),
            quantization_config={
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": list(self.block),
            },
        )

    def tensors(self):
        from transformers import FineGrainedFP8Config
        from transformers.integrations.finegrained_fp8 import Fp8Quantize

        quantise = Fp8Quantize(types.SimpleNamespace(quantization_config=FineGrainedFP8Config()))
        weights = self.matrices()
        at = lambda e, leaf: weights[f"{LAYER}{self.experts_at}.{e}.{leaf}"]
        stack = lambda make: torch.from_numpy(np.stack([make(e) for e in range(self.experts)])).to(torch.bfloat16)
        base = LAYER + self.experts_at
        return quantise.convert({
            f"{base}.gate_up_proj": stack(lambda e: np.concatenate([at(e, "gate_proj"), at(e, "up_proj")])),
            f"{base}.down_proj": stack(lambda e: at(e, "down_proj")),
        })

    def expert(self, disk, number):
        base = LAYER + self.experts_at
        read = lambda name: decode(disk[f"{base}.{name}"][number]) * expand(
            decode(disk[f"{base}.{name}_scale_inv"][number]), disk[f"{base}.{name}"].shape[1:], self.block
        )
        fused = read("gate_up_proj")
        return {"gate": fused[: self.inner], "up": fused[self.inner :], "down": read("down_proj")}


class StackedStatic(Case):
    """One scale an expert [E, 1, 1], gate and up sharing it, and static steps [E]."""

    hidden, inner, experts, top_k = 72, 40, 6, 3
    rows = {"form": "static"}

    @property
    def config(self):
        return qwen3(
            type(self),
            quantization_config={"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        )

    def tensors(self):
        weights = self.matrices()
        at = lambda e, leaf: weights[f"{LAYER}{self.experts_at}.{e}.{leaf}"]
        base = LAYER + self.experts_at
        written = {}
        for name, make in {
            "gate_up_proj": lambda e: np.concatenate([at(e, "gate_proj"), at(e, "up_proj")]),
            "down_proj": lambda e: at(e, "down_proj"),
        }.items():
            pairs = [store(make(e), make(e).shape) for e in range(self.experts)]
            written[f"{base}.{name}"] = torch.stack([codes for codes, _ in pairs])
            written[f"{base}.{name}_scale_inv"] = torch.stack([scale for _, scale in pairs])
            steps = (3.0 + np.arange(self.experts) % 3) / 448
            written[f"{base}.{name}_activation_scale"] = torch.from_numpy(steps.astype(F32))
        return written

    def steps(self, disk):
        base = LAYER + self.experts_at
        return tuple(disk[f"{base}.{n}_activation_scale"].max().item() for n in ("gate_up_proj", "down_proj"))

    def expert(self, disk, number):
        base = LAYER + self.experts_at
        read = lambda name: decode(disk[f"{base}.{name}"][number]) * disk[f"{base}.{name}_scale_inv"][number].item()
        fused = read("gate_up_proj")
        return {"gate": fused[: self.inner], "up": fused[self.inner :], "down": read("down_proj")}


CASES = {
    "deepseek_v3-fp8-block": DeepseekBlock,
    "qwen2_moe-fp8-block-shared-bf16": QwenSharedPlain,
    "qwen3_moe-fp8-stacked": QwenStacked,
    "qwen3_moe-fp8-static-stacked": StackedStatic,
}
