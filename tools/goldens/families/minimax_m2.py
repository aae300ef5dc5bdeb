from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, Router, sigmoid


def read(disk: Disk, prefix: str) -> Block:
    bias = disk[f"{prefix}.e_score_correction_bias"]
    return Block(
        Router(disk.config["num_experts_per_tok"], score=sigmoid, select_bias=bias, renormalise=True),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts", gate="w1", up="w3", down="w2"),
    )


FAMILIES = [
    Family(
        name="minimax_m2",
        config=lambda: config(
            "MiniMaxM2Config", **SMALL, head_dim=8, hidden_size=40, intermediate_size=12, num_hidden_layers=1,
            num_local_experts=60, num_experts_per_tok=5,
        ),
        layers=[0],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.block_sparse_moe",
        read=read,
        seed=1017,
        block="routed experts",
        facts=Facts(
            fields="`num_local_experts`, `num_experts_per_tok`, `intermediate_size`",
            layer_rule="all",
            router="sigmoid in f32 of a product in the gate's type; selection bias; always / sum without epsilon",
            names="`block_sparse_moe.{gate.weight, e_score_correction_bias}`, "
            "`block_sparse_moe.experts.e.{w1,w3,w2}.weight`",
        ),
    )
]
