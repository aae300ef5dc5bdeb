from goldens.common import SMALL_MLA, config, read_deepseek_v3
from goldens.family import Facts, Family

FAMILIES = [
    Family(
        name="deepseek_v32",
        config=lambda: config(
            "DeepseekV32Config",
            **SMALL_MLA, hidden_size=40, intermediate_size=44, moe_intermediate_size=20, num_hidden_layers=2,
            n_routed_experts=12, num_experts_per_tok=5, n_shared_experts=2, n_group=4, topk_group=3,
            norm_topk_prob=True, routed_scaling_factor=2.5, first_k_dense_replace=1, index_topk=4, index_head_dim=8,
            index_n_heads=1,
        ),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read_deepseek_v3,
        seed=1062,
        facts=Facts(
            fields="`n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="`mlp_layer_types[N]` is `sparse`; null: N >= `first_k_dense_replace`",
            router="as `deepseek_v3`",
            names="as `deepseek_v3`",
            quirks="layers from `num_hidden_layers` on are MTP",
        ),
    )
]
