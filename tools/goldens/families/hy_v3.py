from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import TINY, Block, Router, sigmoid


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config
    return Block(
        Router(
            fields["num_experts_per_tok"], score=sigmoid, select_bias=disk[f"{prefix}.expert_bias"], renormalise=True,
            eps=TINY, scale=fields["router_scaling_factor"],
        ),
        disk[f"{prefix}.router.gate.weight"],
        disk.experts(f"{prefix}.experts"),
        shared=disk.mlp(f"{prefix}.shared_mlp"),
    )


FAMILIES = [
    Family(
        name="hy_v3",
        config=lambda: config(
            "HYV3Config", **SMALL, head_dim=8, hidden_size=40, intermediate_size=44, moe_intermediate_size=28,
            num_hidden_layers=3, num_experts=10, num_experts_per_tok=4, num_shared_experts=2,
            router_scaling_factor=2.826, enable_moe_fp32_combine=True, mlp_layer_types=["dense", "sparse", "dense"],
        ),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=1045,
        facts=Facts(
            fields="`num_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="`mlp_layer_types[N]` is `sparse`; null: N > 0; releases: N >= `first_k_dense_replace`",
            router="f32 product; sigmoid; selection bias; / (sum + 1e-20); * `router_scaling_factor`",
            names="`mlp.router.gate.weight`, `mlp.expert_bias`, `mlp.experts.e.{gate,up,down}_proj.weight`, "
            "`mlp.shared_mlp.{gate,up,down}_proj.weight`",
            quirks="`enable_moe_fp32_combine`: routed and shared are added in f32; shared "
            "`moe_intermediate_size * num_shared_experts` wide",
        ),
    )
]
