import torch

from goldens.common import SMALL, config
from goldens.families.flex_olmo import read
from goldens.family import Facts, Family

FAMILIES = [
    Family(
        name="qwen3_moe",
        config=lambda: config(
            "Qwen3MoeConfig", **SMALL, head_dim=8, hidden_size=24, intermediate_size=44, moe_intermediate_size=12,
            num_hidden_layers=2, num_experts=60, num_experts_per_tok=5, norm_topk_prob=True, mlp_only_layers=[0],
        ),
        dtype=torch.float32,
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=1082,
        block="routed experts",
        facts=Facts(
            fields="`num_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="N not in `mlp_only_layers` and (N + 1) % `decoder_sparse_step` == 0",
            router="softmax over all in f32; `norm_topk_prob`: / sum; weights rounded to the model's type",
            names="`mlp.gate.weight`, `mlp.experts.e.{gate,up,down}_proj.weight`",
        ),
    )
]
