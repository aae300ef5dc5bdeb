#!/usr/bin/env python3
"""Writes testdata/adapters: adapters that PEFT made for the tiny checkpoints, and PEFT's results.

Needs torch, transformers, peft and safetensors. Each folder is what `save_pretrained` of PEFT wrote
for random factors; beside them lies reference.safetensors with, for each MoE layer N of the model,
`layers.N.output` [T, H]: the block in float64 with PEFT's wrappers active, on the hidden states,
ids and weights of the checkpoint's own reference.safetensors.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]

STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES: dict[str, dict[str, Any]] = {
    "mixtral-tiny": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ["q_proj"],
        "target_parameters": STACKED,
        "rank_pattern": {"mlp.experts.down_proj": 3},
        "alpha_pattern": {"experts.down_proj": 5},
    },
    "qwen2-moe-tiny": {
        "r": 3,
        "lora_alpha": 4,
        "use_rslora": True,
        "target_modules": r".*shared_expert\.(gate_proj|up_proj|down_proj)",
        "target_parameters": STACKED,
    },
}


def randomise(model: torch.nn.Module, seed: int) -> None:
    """PEFT begins with lora_B = 0, which would change nothing."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            width = parameter.shape[1]
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.data /= width**0.5 if "lora_A" in name else 1.0


def block_output(block: torch.nn.Module, recorded: dict[str, torch.Tensor]) -> torch.Tensor:
    hidden = recorded["hidden_states"].double()
    out = block.experts(hidden, recorded["topk_ids"].long(), recorded["topk_weights"].double())
    if hasattr(block, "shared_expert"):
        gate = torch.sigmoid(block.shared_expert_gate(hidden))
        out = out + gate * block.shared_expert(hidden)
    return out


def make(name: str, settings: dict[str, Any], folder: Path) -> None:
    source = ROOT / "testdata" / name
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, experts_implementation="eager"
    )
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    randomise(adapted, 20261129)
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace(str(source), name) + "\n")
    adapted = adapted.double()
    recorded = load_file(source / "reference.safetensors")
    outputs = {}
    with torch.no_grad():
        for index, layer in enumerate(adapted.base_model.model.model.layers):
            prefix = f"layers.{index}."
            own = {k.removeprefix(prefix): v for k, v in recorded.items() if k.startswith(prefix)}
            if own:
                outputs[f"{prefix}output"] = block_output(layer.mlp, own).contiguous()
    versions = {"peft": peft.__version__, "transformers": transformers.__version__}
    save_file(outputs, folder / "reference.safetensors", metadata=versions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "testdata" / "adapters")
    options = parser.parse_args()
    for name, settings in CASES.items():
        make(name, settings, options.out / name)


if __name__ == "__main__":
    main()
