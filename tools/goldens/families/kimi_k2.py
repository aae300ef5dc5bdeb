import torch

from goldens.common import read_deepseek_v3
from goldens.family import Facts
from goldens.formula import BlockTensors, FormulaFamily, PublishedConfig, combine, expert_shapes, gated_shapes
from goldens.recording import Recorded


def evaluate(tensors: BlockTensors, block: str, fields: dict, x: torch.Tensor, extra: dict) -> Recorded:
    """One group, so that the group limit of DeepSeek-V3 falls away."""
    logits = x.float() @ tensors[f"{block}.gate.weight"].float().T
    scores = torch.sigmoid(logits)
    biased = scores + tensors[f"{block}.gate.e_score_correction_bias"].float()
    ids = biased.topk(fields["num_experts_per_tok"]).indices
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * fields["routed_scaling_factor"]
    out = combine(x, ids, weights, lambda e, rows: tensors.mlp(f"{block}.experts.{e}", rows))
    return Recorded(logits, ids, weights, out + tensors.mlp(f"{block}.shared_experts", x))


def shapes(fields: dict) -> dict:
    hidden, count, inner = fields["hidden_size"], fields["n_routed_experts"], fields["moe_intermediate_size"]
    block = "model.layers.1.mlp"
    return (
        gated_shapes("model.layers.0.mlp", fields["intermediate_size"], hidden)
        | {f"{block}.gate.weight": (count, hidden), f"{block}.gate.e_score_correction_bias": (count,)}
        | expert_shapes(f"{block}.experts", count, inner, hidden)
        | gated_shapes(f"{block}.shared_experts", inner * fields["n_shared_experts"], hidden)
    )


CONFIG = dict(
    architectures=["DeepseekV3ForCausalLM"], model_type="kimi_k2", vocab_size=96, hidden_size=56, intermediate_size=44,
    moe_intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=8,
    kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, hidden_act="silu", rms_norm_eps=1e-06,
    max_position_embeddings=64, rope_theta=50000.0, ep_size=1, first_k_dense_replace=1, moe_layer_freq=1, n_group=1,
    topk_group=1, n_routed_experts=14, n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=5,
    num_nextn_predict_layers=0, routed_scaling_factor=2.827, scoring_func="sigmoid", topk_method="noaux_tc",
    seq_aux=True, aux_loss_alpha=0.001, pretraining_tp=1, tie_word_embeddings=False, torch_dtype="bfloat16",
)

FAMILIES = [
    FormulaFamily(
        name="kimi_k2",
        config=lambda: PublishedConfig(CONFIG, CONFIG["hidden_size"]),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read_deepseek_v3,
        shapes=shapes,
        evaluate=evaluate,
        seed=2007,
        facts=Facts(
            fields="`n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="N >= `first_k_dense_replace`",
            router="as `deepseek_v3`, `n_group` 1",
            names="as `deepseek_v3`",
            quirks="shared expert is `moe_intermediate_size * n_shared_experts` wide",
        ),
    )
]
