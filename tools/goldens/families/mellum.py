from goldens.common import SMALL, config
from goldens.families.flex_olmo import read
from goldens.family import Facts, Family

FAMILIES = [
    Family(
        name="mellum",
        config=lambda: config(
            "MellumConfig", **SMALL, head_dim=8, hidden_size=40, intermediate_size=44, moe_intermediate_size=28,
            num_hidden_layers=3, num_experts=10, num_experts_per_tok=1, norm_topk_prob=False,
            mlp_layer_types=["sparse", "dense", "sparse"],
        ),
        layers=[0, 2],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=1038,
        block="routed experts",
        facts=Facts(
            fields="`num_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="`mlp_layer_types[N]` is `sparse`; null: all",
            router="softmax over all in f32; `norm_topk_prob`: / sum; weights rounded to the model's type",
            names="`mlp.gate.weight`, `mlp.experts.e.{gate,up,down}_proj.weight`",
        ),
    )
]
