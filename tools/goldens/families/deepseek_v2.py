from goldens.common import SMALL_MLA, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, Router


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config
    grouped = fields["topk_method"] == "group_limited_greedy"
    return Block(
        Router(
            fields["num_experts_per_tok"], n_group=fields["n_group"] if grouped else 1,
            topk_group=fields["topk_group"] if grouped else 1, group_score="max",
            scale=fields["routed_scaling_factor"],
        ),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts"),
        shared=disk.mlp(f"{prefix}.shared_experts"),
    )


SIZES = SMALL_MLA | dict(
    hidden_size=56, intermediate_size=44, moe_intermediate_size=20, num_hidden_layers=2, n_shared_experts=2,
    first_k_dense_replace=1,
)
FACTS = Facts(
    fields="`n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
    layer_rule="N >= `first_k_dense_replace`",
    router="f32 product; softmax over all; `topk_method` `greedy`: top-k, `group_limited_greedy`: `n_group` groups "
    "scored by their best, `topk_group` kept, others 0; * `routed_scaling_factor`",
    names="`mlp.gate.weight`, `mlp.experts.e.{gate,up,down}_proj.weight`, `mlp.shared_experts.*_proj.weight`",
    quirks="transformers ignores `norm_topk_prob`; shared expert is `moe_intermediate_size * n_shared_experts` wide",
)


def family(name: str, seed: int, **fields) -> Family:
    return Family(
        name=name,
        config=lambda: config("DeepseekV2Config", **SIZES, **fields),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=seed,
        facts=FACTS,
    )


FAMILIES = [
    family(
        "deepseek_v2", 1007, n_routed_experts=12, num_experts_per_tok=3, n_group=4, topk_group=2,
        topk_method="group_limited_greedy", routed_scaling_factor=2.5,
    ),
    family(
        "deepseek_v2-greedy", 1008, n_routed_experts=10, num_experts_per_tok=4, n_group=1, topk_group=1,
        topk_method="greedy", routed_scaling_factor=1.0,
    ),
]
