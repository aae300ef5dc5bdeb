import dataclasses

import torch

from goldens.disk import Disk
from goldens.family import Facts
from goldens.formula import BlockTensors, FormulaFamily, PublishedConfig, combine, expert_shapes, gated_shapes
from goldens.oracle import Array, Block, Router, sigmoid, softmax
from goldens.recording import Recorded


@dataclasses.dataclass
class MixedBlock(Block):
    """y = c0 experts(x) + c1 shared(x), c = softmax(x W^T + b)."""

    mix_weight: Array | None = None  # [2, H]
    mix_bias: Array | None = None  # [2]

    def output(self, x: Array, ids: Array, weights: Array, logits: Array, extra: dict[str, Array]) -> Array:
        mix = softmax(x @ self.mix_weight.T + self.mix_bias)
        return mix[:, :1] * self.routed(x, ids, weights) + mix[:, 1:] * self.shared(x)


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config
    bias = disk[f"{prefix}.expert_bias"]
    return MixedBlock(
        Router(fields["num_experts_per_tok"], sigmoid, select_bias=bias, renormalise=fields["norm_topk_prob"]),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts"),
        shared=disk.mlp(f"{prefix}.shared_experts"),
        mix_weight=disk[f"{prefix}.coefficient.weight"],
        mix_bias=disk[f"{prefix}.coefficient.bias"],
    )


def evaluate(tensors: BlockTensors, block: str, fields: dict, x: torch.Tensor, extra: dict) -> Recorded:
    logits = tensors.linear(f"{block}.gate", x)
    scores = torch.sigmoid(logits.float())
    ids = (scores + tensors[f"{block}.expert_bias"].float()).topk(fields["num_experts_per_tok"]).indices
    weights = scores.gather(1, ids)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    routed = combine(x, ids, weights, lambda e, rows: tensors.mlp(f"{block}.experts.{e}", rows))
    mix = torch.softmax(tensors.linear(f"{block}.coefficient", x), dim=-1, dtype=torch.float32).to(x.dtype)
    out = routed * mix[:, :1] + tensors.mlp(f"{block}.shared_experts", x) * mix[:, 1:]
    return Recorded(logits, ids, weights, out)


def shapes(fields: dict) -> dict:
    hidden, count, inner = fields["hidden_size"], fields["num_experts"], fields["moe_intermediate_size"]
    block = "model.layers.1.mlp"
    return (
        gated_shapes("model.layers.0.mlp", fields["intermediate_size"], hidden)
        | {f"{block}.gate.weight": (count, hidden), f"{block}.expert_bias": (count,)}
        | {f"{block}.coefficient.weight": (2, hidden), f"{block}.coefficient.bias": (2,)}
        | expert_shapes(f"{block}.experts", count, inner, hidden)
        | gated_shapes(f"{block}.shared_experts", inner * fields["n_shared_experts"], hidden)
    )


CONFIG = dict(
    architectures=["KlearMoeForCausalLM"], model_type="Klear", vocab_size=96, hidden_size=56, intermediate_size=44,
    moe_intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, attention_bias=False,
    hidden_act="silu", rms_norm_eps=1e-06, rope_theta=500000.0, max_position_embeddings=64, mlp_only_layers=[0],
    decoder_sparse_step=1, num_experts=10, num_experts_per_tok=3, n_shared_experts=2, norm_topk_prob=True,
    routed_scaling_factor=2.5, moe_aux_loss_coeff=0.0001, tie_word_embeddings=False, dtype="bfloat16",
)

FAMILIES = [
    FormulaFamily(
        name="klear",
        config=lambda: PublishedConfig(CONFIG, CONFIG["hidden_size"]),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        shapes=shapes,
        evaluate=evaluate,
        seed=2009,
        facts=Facts(
            fields="`num_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="N not in `mlp_only_layers` and (N + 1) % `decoder_sparse_step` == 0",
            router="sigmoid in f32; selection bias; `norm_topk_prob`: / sum without epsilon",
            names="`mlp.gate.weight`, `mlp.expert_bias`, `mlp.coefficient.{weight [2, H], bias [2]}`, "
            "`mlp.experts.e.{gate,up,down}_proj.weight`, `mlp.shared_experts.*_proj.weight`",
            quirks="y = c0 routed + c1 shared, c = softmax(coefficient(x)); shared expert is `moe_intermediate_size * "
            "n_shared_experts` wide; `routed_scaling_factor` is not read",
        ),
    )
]
