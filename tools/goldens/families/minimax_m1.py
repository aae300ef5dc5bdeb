import torch

from goldens.disk import Disk
from goldens.family import Facts
from goldens.formula import BlockTensors, FormulaFamily, PublishedConfig, combine, expert_shapes
from goldens.oracle import Block, Router
from goldens.recording import Recorded

NAMES = ("w1", "w3", "w2")  # gate, up, down


def read(disk: Disk, prefix: str) -> Block:
    return Block(
        Router(disk.config["num_experts_per_tok"], renormalise=True),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts", gate="w1", up="w3", down="w2"),
    )


def evaluate(tensors: BlockTensors, block: str, fields: dict, x: torch.Tensor, extra: dict) -> Recorded:
    logits = tensors.linear(f"{block}.gate", x)
    weights, ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(fields["num_experts_per_tok"])
    weights = weights / weights.sum(dim=-1, keepdim=True)
    out = combine(x, ids, weights, lambda e, rows: tensors.mlp(f"{block}.experts.{e}", rows, NAMES))
    return Recorded(logits, ids, weights, out)


def shapes(fields: dict) -> dict:
    hidden, count = fields["hidden_size"], fields["num_local_experts"]
    block = "model.layers.0.block_sparse_moe"
    experts = expert_shapes(f"{block}.experts", count, fields["intermediate_size"], hidden, names=NAMES)
    return {f"{block}.gate.weight": (count, hidden)} | experts


CONFIG = dict(
    architectures=["MiniMaxM1ForCausalLM"], model_type="minimax_m1", vocab_size=96, hidden_size=56,
    intermediate_size=36, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=28,
    attn_type_list=[0], hidden_act="silu", rms_norm_eps=1e-05, rope_theta=10000000, rotary_dim=28, postnorm=True,
    layernorm_full_attention_alpha=3.5565588200778455, layernorm_full_attention_beta=1.0,
    layernorm_linear_attention_alpha=3.5565588200778455, layernorm_linear_attention_beta=1.0,
    layernorm_mlp_alpha=3.5565588200778455, layernorm_mlp_beta=1.0, max_position_embeddings=64, num_local_experts=10,
    num_experts_per_tok=2, router_aux_loss_coef=0.001, router_jitter_noise=0.0, shared_intermediate_size=0,
    shared_moe_mode="sigmoid", output_router_logits=False, tie_word_embeddings=False, torch_dtype="bfloat16",
)

FAMILIES = [
    FormulaFamily(
        name="minimax_m1",
        config=lambda: PublishedConfig(CONFIG, CONFIG["hidden_size"]),
        layers=[0],
        module="model.layers.{}.block_sparse_moe",
        disk="model.layers.{}.block_sparse_moe",
        read=read,
        shapes=shapes,
        evaluate=evaluate,
        seed=2012,
        block="routed experts",
        facts=Facts(
            fields="`num_local_experts`, `num_experts_per_tok`, `intermediate_size`",
            layer_rule="all",
            router="softmax over all in f32; always / sum",
            names="`block_sparse_moe.gate.weight`, `block_sparse_moe.experts.e.{w1,w3,w2}.weight`",
            quirks="`layernorm_mlp_alpha` and `layernorm_mlp_beta` are applied outside the block; "
            "`shared_intermediate_size` is 0 in the releases",
        ),
    )
]
