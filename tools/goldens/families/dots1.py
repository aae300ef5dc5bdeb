from goldens.common import SMALL, config, read_deepseek_v3
from goldens.family import Facts, Family

FAMILIES = [
    Family(
        name="dots1",
        config=lambda: config(
            "Dots1Config", **SMALL, head_dim=8, hidden_size=56, intermediate_size=44, moe_intermediate_size=20,
            num_hidden_layers=2, n_routed_experts=12, num_experts_per_tok=4, n_shared_experts=2, n_group=4,
            topk_group=3, norm_topk_prob=False, routed_scaling_factor=2.5, first_k_dense_replace=1,
        ),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read_deepseek_v3,
        seed=1021,
        facts=Facts(
            fields="`n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="N >= `first_k_dense_replace`",
            router="as `deepseek_v3`; `norm_topk_prob` defaults to false",
            names="as `deepseek_v3`",
            quirks="shared expert is `moe_intermediate_size * n_shared_experts` wide",
        ),
    )
]
