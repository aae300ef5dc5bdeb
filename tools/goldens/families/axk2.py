import dataclasses

from goldens.common import SMALL_MLA, config, read_deepseek_v3
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block


def read(disk: Disk, prefix: str) -> Block:
    block = read_deepseek_v3(disk, prefix)
    return dataclasses.replace(block, router=dataclasses.replace(block.router, masked_score=0.0))


def family(name: str, seed: int, **fields) -> Family:
    return Family(
        name=name,
        config=lambda: config(
            "AXK2Config", **SMALL_MLA, hidden_size=40, intermediate_size=44, moe_intermediate_size=28,
            num_hidden_layers=2, n_shared_experts=1, norm_topk_prob=True, routed_scaling_factor=2.5,
            mlp_layer_types=["dense", "sparse"], index_topk=4, index_head_dim=8, index_n_heads=1, gated_norm_rank=4,
            **fields,
        ),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=seed,
        facts=Facts(
            fields="`n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="`mlp_layer_types[N]` is `sparse`",
            router="as `deepseek_v3`, but other groups 0; `n_group` null: no groups",
            names="as `deepseek_v3`",
        ),
    )


FAMILIES = [
    family("axk2", 1067, n_routed_experts=10, num_experts_per_tok=5, n_group=None, topk_group=None),
    family("axk2-grouped", 1068, n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2),
]
