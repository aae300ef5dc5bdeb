from goldens.common import SMALL, config, read_deepseek_v3
from goldens.family import Facts, Family

FAMILIES = [
    Family(
        name="glm4_moe",
        config=lambda: config(
            "Glm4MoeConfig", **SMALL, head_dim=8, hidden_size=56, intermediate_size=44, moe_intermediate_size=36,
            num_hidden_layers=3, n_routed_experts=10, num_experts_per_tok=4, n_shared_experts=2, n_group=1,
            topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.5, first_k_dense_replace=2,
        ),
        layers=[2],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read_deepseek_v3,
        seed=1006,
        facts=Facts(
            fields="`n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="N >= `first_k_dense_replace`",
            router="as `deepseek_v3`",
            names="as `deepseek_v3`",
            quirks="shared expert is `moe_intermediate_size * n_shared_experts` wide; MTP layer past the last",
        ),
    )
]
