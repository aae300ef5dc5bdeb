"""Parts that several families share: small sizes, the DeepSeek-V3 router, the usual reader."""

import re

import torch
import transformers

from goldens.disk import Disk
from goldens.oracle import TINY, Array, Block, Router, sigmoid

SMALL = dict(
    vocab_size=96,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
# Multi-head latent attention, as small as it gets; every head has its own keys.
SMALL_MLA = SMALL | dict(
    num_key_value_heads=2, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, v_head_dim=4, qk_nope_head_dim=4
)


def config(class_name: str, **fields) -> transformers.PretrainedConfig:
    """Through a round trip, so that derived fields are as from_pretrained will see them."""
    made = getattr(transformers, class_name)(**fields)
    return type(made).from_dict(made.to_dict())


def noaux_tc(fields: dict, select_bias) -> Router:
    """DeepSeek-V3: sigmoid, selection bias, groups by their two best, renormalised, scaled."""
    return Router(
        top_k=fields["num_experts_per_tok"],
        score=sigmoid,
        select_bias=select_bias,
        n_group=fields.get("n_group") or 1,
        topk_group=fields.get("topk_group") or 1,
        renormalise=fields["norm_topk_prob"],
        eps=TINY,
        scale=fields["routed_scaling_factor"],
    )


def kimi_fields(fields: dict) -> dict:
    """Kimi's names of the routing fields, translated to DeepSeek's."""
    return fields | {
        "num_experts_per_tok": fields["num_experts_per_token"],
        "n_group": fields["num_expert_group"],
        "norm_topk_prob": fields["moe_renormalize"],
    }


def read_deepseek_v3(disk: Disk, prefix: str) -> Block:
    return Block(
        noaux_tc(disk.config.get("text_config", disk.config), disk[f"{prefix}.gate.e_score_correction_bias"]),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts"),
        shared=disk.mlp(f"{prefix}.shared_experts"),
    )


def sigmoid_gated(disk: Disk, prefix: str):
    """Qwen's shared expert: sigmoid(x g) * mlp(x)."""
    mlp, gate = disk.mlp(f"{prefix}.shared_expert"), disk[f"{prefix}.shared_expert_gate.weight"]

    def run(x: Array) -> Array:
        return sigmoid(x @ gate.T) * mlp(x)

    return run


def stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """experts.e.{gate,up,down}_proj.weight -> experts.gate_up_proj [E, 2I, H] and experts.down_proj [E, H, I]."""
    kept, parts = {}, {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match:
            parts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
        else:
            kept[name] = tensor
    for prefix, part in parts.items():
        count = len(part) // 3
        fused = [torch.cat([part[e, "gate"], part[e, "up"]]) for e in range(count)]
        kept[f"{prefix}.gate_up_proj"] = torch.stack(fused)
        kept[f"{prefix}.down_proj"] = torch.stack([part[e, "down"] for e in range(count)])
    return kept


def transpose_stacks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Swaps the last two dimensions of every stacked expert tensor."""
    stacked = re.compile(r"experts\.(gate_up|down)_proj$")
    return {name: t.transpose(1, 2) if stacked.search(name) else t for name, t in tensors.items()}
