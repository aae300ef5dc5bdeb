import torch

from goldens.common import SMALL, config
from goldens.families.flex_olmo import read
from goldens.family import Facts, Family

FAMILIES = [
    Family(
        name="olmoe",
        config=lambda: config(
            "OlmoeConfig", **SMALL, hidden_size=40, intermediate_size=45, num_hidden_layers=1, num_experts=8,
            num_experts_per_tok=3, norm_topk_prob=True,
        ),
        dtype=torch.float16,
        layers=[0],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=1083,
        block="routed experts",
        facts=Facts(
            fields="`num_experts`, `num_experts_per_tok`, `intermediate_size`",
            layer_rule="all",
            router="softmax over all in f32; `norm_topk_prob` (default false): / sum; rounded to the model's type",
            names="`mlp.gate.weight`, `mlp.experts.e.{gate,up,down}_proj.weight`",
        ),
    )
]
