from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import TINY, Block, Router, sigmoid


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config
    return Block(
        Router(
            fields["num_experts_per_tok"], score=sigmoid, select_bias=disk[f"{prefix}.expert_bias"], renormalise=True,
            eps=TINY, scale=fields["route_scale"],
        ),
        disk[f"{prefix}.router.gate.weight"],
        disk.experts(f"{prefix}.experts"),
        shared=disk.mlp(f"{prefix}.shared_experts"),
    )


FAMILIES = [
    Family(
        name="afmoe",
        config=lambda: config(
            "AfmoeConfig", **SMALL, head_dim=8, hidden_size=40, intermediate_size=44, moe_intermediate_size=36,
            num_hidden_layers=3, num_dense_layers=1, num_experts=8, num_experts_per_tok=3, num_shared_experts=2,
            route_scale=2.5,
        ),
        layers=[1, 2],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        router_path="router",
        seed=1033,
        facts=Facts(
            fields="`num_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="N >= `num_dense_layers`",
            router="product in the model's type, sigmoid in f32; selection bias; / (sum + 1e-20); * `route_scale`",
            names="`mlp.router.gate.weight`, `mlp.expert_bias`, `mlp.experts.e.{gate,up,down}_proj.weight`, "
            "`mlp.shared_experts.*_proj.weight`",
            quirks="shared expert is `moe_intermediate_size * num_shared_experts` wide; `route_norm` and `score_func` "
            "of older files are not read",
        ),
    )
]
