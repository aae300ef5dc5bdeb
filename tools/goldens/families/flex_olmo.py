from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, Router


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config
    return Block(
        Router(fields["num_experts_per_tok"], renormalise=fields["norm_topk_prob"]),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts"),
    )


FAMILIES = [
    Family(
        name="flex_olmo",
        config=lambda: config(
            "FlexOlmoConfig", **SMALL, hidden_size=56, intermediate_size=45, num_hidden_layers=1, num_experts=7,
            num_experts_per_tok=5, norm_topk_prob=False,
        ),
        layers=[0],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=1022,
        block="routed experts",
        facts=Facts(
            fields="`num_experts`, `num_experts_per_tok`, `intermediate_size`",
            layer_rule="all",
            router="softmax over all in f32; `norm_topk_prob` (default false): / sum; rounded to the model's type",
            names="`mlp.gate.weight`, `mlp.experts.e.{gate,up,down}_proj.weight`",
            quirks="the norm follows the block: its input is the raw residual",
        ),
    )
]
