from goldens.common import SMALL, config, read_deepseek_v3
from goldens.family import Facts, Family

FAMILIES = [
    Family(
        name="solar_open",
        config=lambda: config(
            "SolarOpenConfig", **SMALL, head_dim=8, hidden_size=40, moe_intermediate_size=36, num_hidden_layers=2,
            n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=1, n_group=2, topk_group=1,
            norm_topk_prob=True, routed_scaling_factor=1.5,
        ),
        layers=[0, 1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read_deepseek_v3,
        seed=1035,
        facts=Facts(
            fields="`n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="all",
            router="as `deepseek_v3`",
            names="as `deepseek_v3`",
        ),
    )
]
