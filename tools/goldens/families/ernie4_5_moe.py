from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, Router


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config
    bias = disk[f"{prefix}.moe_statics.e_score_correction_bias"][0]
    return Block(
        Router(fields["moe_k"], select_bias=bias, renormalise=True, min_sum=fields["moe_norm_min"]),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts"),
        shared=disk.mlp(f"{prefix}.shared_experts") if fields["moe_num_shared_experts"] else None,
    )


FACTS = Facts(
    fields="`moe_num_experts`, `moe_k`, `moe_intermediate_size`",
    layer_rule="(N + 1) % `moe_layer_interval` == 0 and `moe_layer_start_index` <= N <= `moe_layer_end_index`",
    router="f32 product; softmax over all; selection bias; / max(sum, `moe_norm_min`); weights rounded to the "
    "model's type",
    names="`mlp.gate.weight` (f32), `mlp.moe_statics.e_score_correction_bias` [1, E], "
    "`mlp.experts.e.{gate,up,down}_proj.weight`, `mlp.shared_experts.*_proj.weight`",
    quirks="shared expert `moe_intermediate_size * moe_num_shared_experts` wide, none if 0; `use_bias` gives "
    "shared and dense layers biases, routed experts none",
)


def family(name: str, seed: int, **fields) -> Family:
    return Family(
        name=name,
        config=lambda: config("Ernie4_5_MoeConfig", **SMALL, intermediate_size=44, moe_norm_min=0.95, **fields),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=seed,
        keep_float32=r"(e_score_correction_bias|mlp\.gate\.weight)$",
        fill={
            r"e_score_correction_bias$": lambda normal: 0.04 * normal,
            r"shared_experts\..*bias$": lambda normal: 0.5 * normal,
        },
        facts=FACTS,
    )


FAMILIES = [
    family(
        "ernie4_5_moe", 1019, hidden_size=56, moe_intermediate_size=36, num_hidden_layers=3, moe_num_experts=10,
        moe_k=3, moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=1, moe_layer_interval=2,
    ),
    family(
        "ernie4_5_moe-biased", 1057, hidden_size=40, moe_intermediate_size=20, num_hidden_layers=2, moe_num_experts=6,
        moe_k=2, moe_num_shared_experts=1, use_bias=True,
    ),
]
