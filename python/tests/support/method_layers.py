"""Layers of vLLM's names for the checkpoints of testdata/quantised."""

from __future__ import annotations

import json
import pathlib

import torch
from safetensors.torch import load_file

from conclave import vllm
from support import safetensors
from support.problems import FLOAT32_BAR, HALF_BAR

QUANTISED = pathlib.Path(__file__).parents[3] / "testdata" / "quantised"
# vLLM's FusedMoE has no parameters for these families, methods and layouts.
OTHERS = {
    "awq-gemv": "awq of version gemv",
    "-mixed-": "prefix: expected the layer's name",
    "bnb-nf4-bf16-storage": "bnb_4bit_quant_storage",
}
SKIPPED = ("mlx", "deepseek_v4", "stacked", "gpt_oss", "deepseek_v3", "qwen2_moe")
ALL = sorted(path.parent.name for path in QUANTISED.glob("*/config.json"))
NAMES = [name for name in ALL if not any(part in name for part in SKIPPED)]
RUN = [name for name in NAMES if not any(part in name for part in OTHERS)]


def config_of(name):
    folder = QUANTISED / name
    config = json.loads((folder / "config.json").read_text())
    beside = folder / "hf_quant_config.json"
    method = config.get("quantization_config")
    if beside.is_file():
        method = {"quant_method": "modelopt", **json.loads(beside.read_text())}
    return config, method


def sizes_of(config):
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    experts = config.get("num_local_experts") or config["num_experts"]
    return {
        "num_experts": experts,
        "hidden_size": config["hidden_size"],
        "intermediate_size": inner,
    }


def golden_of(name):
    golden = safetensors.read(QUANTISED / name / "golden.safetensors")
    hidden, ids, weights = (
        torch.tensor(golden[key]) for key in ("hidden_states", "topk_ids", "topk_weights")
    )
    return hidden, ids, weights, golden["float64.output"]


def expert_tensors(name):
    """Names below the block of experts, and tensors."""
    found = load_file(QUANTISED / name / "model.safetensors")
    return {
        full.partition(".experts.")[2]: tensor
        for full, tensor in found.items()
        if ".experts." in full
    }


def layer_of(name, quantization=None, prefix="", **arguments):
    """A layer of golden's routing, and what it is fed with."""
    config, method = config_of(name)
    hidden, ids, weights, expected = golden_of(name)
    sizes = sizes_of(config)
    names = (
        ("w1", "w2", "w3") if name.startswith("mixtral") else ("gate_proj", "down_proj", "up_proj")
    )
    layer = vllm.FusedMoE(
        **sizes,
        top_k=ids.shape[1],
        params_dtype=torch.float32,
        quant_config=quantization or method,
        prefix=prefix,
        custom_routing_function=lambda hidden_states, gating_output, topk, renormalize: (
            weights[: len(hidden_states)],
            ids[: len(hidden_states)],
        ),
        expert_mapping=vllm.FusedMoE.make_expert_params_mapping(None, *names, sizes["num_experts"]),
        **arguments,
    )
    return layer, hidden, expected


def load(layer, name):
    tensors = expert_tensors(name)
    layer.layer_name = "model.layers.0.mlp.experts"
    taken = layer.load_weights(tensors.items())
    return tensors, taken


def logits_for(layer, hidden):
    return torch.zeros(len(hidden), layer.logical_num_experts)


def bar_of(name):
    config = json.dumps(config_of(name)[1])
    kinds = ("modelopt-fp8", "modelopt-channel", "modelopt-nvfp4", "-token", "-rows", "-static")
    rows = any(kind in name for kind in kinds)
    fp8 = '"type": "float"' in config and '"num_bits": 8' in config
    return HALF_BAR if rows or fp8 else FLOAT32_BAR
