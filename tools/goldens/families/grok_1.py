import dataclasses

import numpy as np
import torch
from torch.nn import functional

from goldens.disk import Disk
from goldens.family import Facts
from goldens.formula import BlockTensors, FormulaFamily, PublishedConfig, combine, expert_shapes
from goldens.oracle import Array, Block, Router, gelu
from goldens.recording import Recorded

CAP = 30.0
NAMES = ("linear", "linear_v", "linear_1")  # gate, up, down


@dataclasses.dataclass
class CappedRouter(Router):
    """30 tanh(l / 30) before the softmax."""

    def choice_scores(self, logits: Array) -> Array:
        return super().choice_scores(CAP * np.tanh(logits / CAP))

    def weigh(self, logits: Array, ids: Array) -> Array:
        return super().weigh(CAP * np.tanh(logits / CAP), ids)


def read(disk: Disk, prefix: str) -> Block:
    gate, up, down = NAMES
    return Block(
        CappedRouter(disk.config["num_experts_per_tok"], renormalise=True),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts", gate=gate, up=up, down=down, act=lambda g, u: gelu(g) * u),
    )


def evaluate(tensors: BlockTensors, block: str, fields: dict, x: torch.Tensor, extra: dict) -> Recorded:
    logits = tensors.linear(f"{block}.gate", x)
    scores = torch.softmax(CAP * torch.tanh(logits.float() / CAP), dim=-1)
    weights, ids = scores.topk(fields["num_experts_per_tok"])
    weights = weights / weights.sum(dim=-1, keepdim=True)
    act = lambda g, u: functional.gelu(g) * u
    out = combine(x, ids, weights, lambda e, rows: tensors.mlp(f"{block}.experts.{e}", rows, NAMES, act))
    return Recorded(logits, ids, weights, out)


def shapes(fields: dict) -> dict:
    block = "model.layers.0.moe_block"
    hidden, count = fields["hidden_size"], fields["num_experts"]
    experts = expert_shapes(f"{block}.experts", count, fields["intermediate_size"], hidden, names=NAMES)
    return {f"{block}.gate.weight": (count, hidden)} | experts


CONFIG = dict(
    architectures=["Grok1ModelForCausalLM"], model_type="grok-1", vocab_size=96, hidden_size=56, intermediate_size=36,
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, attn_output_multiplier=0.08838834764831845,
    embedding_multiplier_scale=78.38367176906169, output_multiplier_scale=0.5773502691896257, max_attn_value=30.0,
    max_position_embeddings=64, rms_norm_eps=1e-05, num_experts=6, num_experts_per_tok=2, tie_word_embeddings=True,
    router_aux_loss_coef=0.001, output_router_logits=False, torch_dtype="bfloat16",
)

FAMILIES = [
    FormulaFamily(
        name="grok-1",
        config=lambda: PublishedConfig(CONFIG, CONFIG["hidden_size"]),
        layers=[0],
        module="model.layers.{}.moe_block",
        disk="model.layers.{}.moe_block",
        read=read,
        shapes=shapes,
        evaluate=evaluate,
        seed=2001,
        block="routed experts",
        # Logits up to some tens, where the cap tells, and close enough for the sum of the chosen to tell too.
        fill={r"gate\.weight$": lambda values: 9.0 * values / np.sqrt(values.shape[-1])},
        facts=Facts(
            fields="`num_experts`, `num_experts_per_tok`, `intermediate_size`",
            layer_rule="all",
            router="30 tanh(l / 30); softmax over all in f32; top-k; / sum",
            names="`moe_block.gate.weight`, `moe_block.experts.e.{linear,linear_v,linear_1}.weight` (gate, up, down)",
            quirks="gelu by erf; cap and / sum as serving engines have them, xAI's first code had neither",
        ),
    )
]
