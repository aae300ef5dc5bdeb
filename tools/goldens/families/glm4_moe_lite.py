from goldens.common import SMALL_MLA, config, read_deepseek_v3
from goldens.family import Facts, Family

FAMILIES = [
    Family(
        name="glm4_moe_lite",
        config=lambda: config(
            "Glm4MoeLiteConfig",
            **SMALL_MLA, hidden_size=40, intermediate_size=44, moe_intermediate_size=28, num_hidden_layers=2,
            n_routed_experts=10, num_experts_per_tok=4, n_shared_experts=1, n_group=1, topk_group=1,
            norm_topk_prob=True, routed_scaling_factor=1.8, mlp_layer_types=["dense", "sparse"],
        ),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read_deepseek_v3,
        seed=1060,
        facts=Facts(
            fields="`n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="`mlp_layer_types[N]` is `sparse`; null: N > 0; releases: N >= `first_k_dense_replace`",
            router="as `deepseek_v3`",
            names="as `deepseek_v3`",
            quirks="MTP layer past the last",
        ),
    )
]
