from goldens.common import SMALL_MLA, config, read_deepseek_v3
from goldens.family import Facts, Family

FACTS = Facts(
    fields="`n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
    layer_rule="N >= `first_k_dense_replace`",
    router="f32 product; sigmoid; selection bias; `n_group` groups scored by their two best, `topk_group` kept, "
    "others -inf; `norm_topk_prob`: / (sum + 1e-20); * `routed_scaling_factor`",
    names="`mlp.gate.{weight,e_score_correction_bias}`, `mlp.experts.e.{gate,up,down}_proj.weight`, "
    "`mlp.shared_experts.{gate,up,down}_proj.weight`",
    quirks="shared expert is `moe_intermediate_size * n_shared_experts` wide, added unscaled; "
    "layers from `num_hidden_layers` on are MTP",
)


def family(name: str, seed: int, fill: dict | None = None, **fields) -> Family:
    return Family(
        name=name,
        config=lambda: config(
            "DeepseekV3Config", **SMALL_MLA, intermediate_size=48, num_hidden_layers=2, num_experts_per_tok=3,
            n_shared_experts=1, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5, first_k_dense_replace=1,
            num_mtp_layers=0, **fields,
        ),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read_deepseek_v3,
        seed=seed,
        fill=fill or {},
        facts=FACTS,
    )


FAMILIES = [
    family("deepseek_v3", 1001, hidden_size=72, moe_intermediate_size=40, n_routed_experts=12, n_group=3),
    # Every biased score is negative, so groups masked with 0 instead of -inf would win.
    family(
        "deepseek_v3-negative", 1051, hidden_size=24, moe_intermediate_size=20, n_routed_experts=10, n_group=5,
        fill={r"e_score_correction_bias$": lambda normal: 0.15 * normal - 1.5},
    ),
]
