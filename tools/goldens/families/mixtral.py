from goldens.common import SMALL, config
from goldens.families.minimax import read
from goldens.family import Facts, Family

FAMILIES = [
    Family(
        name="mixtral",
        config=lambda: config(
            "MixtralConfig", **SMALL, hidden_size=40, intermediate_size=36, num_hidden_layers=2, num_local_experts=6,
            num_experts_per_tok=2,
        ),
        layers=[0, 1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.block_sparse_moe",
        read=read,
        seed=1080,
        block="routed experts",
        facts=Facts(
            fields="`num_local_experts`, `num_experts_per_tok`, `intermediate_size`",
            layer_rule="all",
            router="softmax over all in f32; always / sum; weights stay f32",
            names="`block_sparse_moe.gate.weight`, `block_sparse_moe.experts.e.{w1,w3,w2}.weight`",
        ),
    )
]
