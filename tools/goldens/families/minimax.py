from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, Router


def read(disk: Disk, prefix: str) -> Block:
    return Block(
        Router(disk.config["num_experts_per_tok"], renormalise=True),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts", gate="w1", up="w3", down="w2"),
    )


FAMILIES = [
    Family(
        name="minimax",
        config=lambda: config(
            "MiniMaxConfig", **SMALL, head_dim=8, hidden_size=40, intermediate_size=45, num_hidden_layers=2,
            num_local_experts=6, num_experts_per_tok=2, layer_types=["linear_attention", "full_attention"],
            block_size=8, mlp_alpha_factor=2, mlp_beta_factor=1,
        ),
        layers=[0, 1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.block_sparse_moe",
        read=read,
        seed=1016,
        block="routed experts",
        facts=Facts(
            fields="`num_local_experts`, `num_experts_per_tok`, `intermediate_size`",
            layer_rule="all",
            router="softmax over all in f32; always / sum; weights stay f32",
            names="`block_sparse_moe.gate.weight`, `block_sparse_moe.experts.e.{w1,w3,w2}.weight`",
            quirks="outside the block: residual is `mlp_alpha_factor` * x + `mlp_beta_factor` * out, x after the norm",
        ),
    )
]
