import numpy as np
import torch

from goldens.common import noaux_tc
from goldens.disk import Disk
from goldens.family import Facts
from goldens.formula import BlockTensors, FormulaFamily, PublishedConfig, combine, expert_shapes, gated_shapes
from goldens.oracle import Array, Block, sigmoid
from goldens.recording import Recorded

LAYERS = "language_model.model.layers"
NAMES = ("w1", "w3", "w2")  # gate, up, down


def situ(beta: float, linear_beta: float):
    return lambda g, u: beta * np.tanh(g / beta) * sigmoid(g) * (linear_beta * np.tanh(u / linear_beta))


def normed(weight: Array, eps: float):
    return lambda x: x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config["text_config"]
    act = situ(fields["activation_situ_beta"], fields["activation_situ_linear_beta"])
    down = disk[f"{prefix}.routed_expert_down_proj.weight"]
    up = disk[f"{prefix}.routed_expert_up_proj.weight"]
    norm = normed(disk[f"{prefix}.routed_expert_norm.weight"], fields["rms_norm_eps"])
    router = dict(
        num_experts_per_tok=fields["num_experts_per_token"],
        norm_topk_prob=fields["moe_renormalize"],
        routed_scaling_factor=fields["routed_scaling_factor"],
    )
    return Block(
        noaux_tc(router, disk[f"{prefix}.gate.e_score_correction_bias"]),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts", gate="w1", up="w3", down="w2", act=act),
        shared=disk.mlp(f"{prefix}.shared_experts", act=act),
        latent_in=lambda x: x @ down.T,
        latent_out=lambda combined: norm(combined) @ up.T,
    )


def evaluate(tensors: BlockTensors, block: str, fields: dict, x: torch.Tensor, extra: dict) -> Recorded:
    beta, linear_beta = fields["activation_situ_beta"], fields["activation_situ_linear_beta"]

    def act(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        g, u = gate.float(), up.float()
        squashed = beta * torch.tanh(g / beta) * torch.sigmoid(g)
        return (squashed * linear_beta * torch.tanh(u / linear_beta)).to(gate.dtype)

    logits = x.float() @ tensors[f"{block}.gate.weight"].float().T
    scores = torch.sigmoid(logits)
    biased = scores + tensors[f"{block}.gate.e_score_correction_bias"].float()
    ids = biased.topk(fields["num_experts_per_token"]).indices
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * fields["routed_scaling_factor"]

    latent = tensors.linear(f"{block}.routed_expert_down_proj", x)
    run = lambda e, rows: tensors.mlp(f"{block}.experts.{e}", rows, NAMES, act)
    combined = combine(latent, ids, weights, run).float()
    scale = torch.rsqrt(combined.pow(2).mean(dim=-1, keepdim=True) + fields["rms_norm_eps"])
    normed_latent = tensors[f"{block}.routed_expert_norm.weight"] * (combined * scale).to(x.dtype)
    routed = tensors.linear(f"{block}.routed_expert_up_proj", normed_latent)
    return Recorded(logits, ids, weights, routed + tensors.mlp(f"{block}.shared_experts", x, act=act))


def shapes(fields: dict) -> dict:
    hidden, latent = fields["hidden_size"], fields["routed_expert_hidden_size"]
    count, inner = fields["num_experts"], fields["moe_intermediate_size"]
    block = f"{LAYERS}.1.block_sparse_moe"
    return (
        gated_shapes(f"{LAYERS}.0.mlp", fields["intermediate_size"], hidden)
        | {f"{block}.gate.weight": (count, hidden), f"{block}.gate.e_score_correction_bias": (count,)}
        | {f"{block}.routed_expert_down_proj.weight": (latent, hidden), f"{block}.routed_expert_norm.weight": (latent,)}
        | {f"{block}.routed_expert_up_proj.weight": (hidden, latent)}
        | expert_shapes(f"{block}.experts", count, inner, latent, names=NAMES)
        | gated_shapes(f"{block}.shared_experts", inner * fields["num_shared_experts"], hidden)
    )


TEXT = dict(
    model_type="kimi_linear", vocab_size=96, hidden_size=56, intermediate_size=44, moe_intermediate_size=36,
    routed_expert_hidden_size=28, latent_moe_use_norm=True, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4,
    mla_use_nope=True, hidden_act="situ", activation_situ_beta=4.0, activation_situ_linear_beta=25.0,
    rms_norm_eps=1e-05, max_position_embeddings=64, first_k_dense_replace=1, moe_layer_freq=1, num_experts=14,
    num_experts_per_token=5, num_shared_experts=2, moe_renormalize=True, moe_router_activation_func="sigmoid",
    use_grouped_topk=True, num_expert_group=1, topk_group=1, routed_scaling_factor=1.5, num_nextn_predict_layers=0,
    tie_word_embeddings=False,
)
CONFIG = dict(
    architectures=["KimiK3ForConditionalGeneration"], model_type="kimi_k3", text_config=TEXT, torch_dtype="bfloat16"
)

FAMILIES = [
    FormulaFamily(
        name="kimi_k3",
        config=lambda: PublishedConfig(CONFIG, TEXT["hidden_size"]),
        layers=[1],
        module=f"{LAYERS}.{{}}.block_sparse_moe",
        disk=f"{LAYERS}.{{}}.block_sparse_moe",
        read=read,
        shapes=shapes,
        evaluate=evaluate,
        seed=2008,
        # Wide products, where both tanh bend.
        fill={r"\.(w1|w3|gate_proj|up_proj)\.weight$": lambda values: 5.0 * values / np.sqrt(values.shape[-1])},
        facts=Facts(
            fields="`text_config`: `num_experts`, `num_experts_per_token`, `moe_intermediate_size`, "
            "`routed_expert_hidden_size`",
            layer_rule="N >= `first_k_dense_replace`",
            router="f32 product of the full x; sigmoid; selection bias; `moe_renormalize`: / (sum + 1e-20); "
            "* `routed_scaling_factor`",
            names="`language_model.model.layers.N.block_sparse_moe.{gate.weight, gate.e_score_correction_bias, "
            "experts.e.{w1,w3,w2}.weight, routed_expert_down_proj.weight, routed_expert_norm.weight, "
            "routed_expert_up_proj.weight, shared_experts.{gate,up,down}_proj.weight}`",
            quirks="experts work on the down projection; `latent_moe_use_norm`: the weighted sum passes an RMS norm "
            "before the up projection; SiTU in all experts; shared expert reads the full x and is "
            "`moe_intermediate_size * num_shared_experts` wide; the release stores experts in MXFP4",
        ),
    )
]
