from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, Router, sigmoid


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config
    return Block(
        Router(
            fields["num_experts_per_tok"],
            score=sigmoid,
            select_bias=disk[f"{prefix}.expert_bias"] if fields["use_expert_bias"] else 0.0,
            renormalise=fields["norm_topk_prob"],
            eps=1e-6,
            scale=fields["routed_scaling_factor"],
        ),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts", gate="w1", up="w3", down="w2"),
    )


def family(name: str, seed: int, **fields) -> Family:
    return Family(
        name=name,
        config=lambda: config(
            "Lfm2MoeConfig", **SMALL, hidden_size=40, intermediate_size=44, moe_intermediate_size=28,
            num_hidden_layers=2, num_experts=10, num_dense_layers=1, layer_types=["conv", "full_attention"], **fields,
        ),
        layers=[1],
        module="model.layers.{}.feed_forward",
        disk="model.layers.{}.feed_forward",
        read=read,
        seed=seed,
        noise=2.0,
        block="routed experts",
        facts=Facts(
            fields="`num_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="N >= `num_dense_layers`",
            router="product and sigmoid in the model's type; `use_expert_bias`: selection bias; `norm_topk_prob`: "
            "/ (sum + 1e-6); * `routed_scaling_factor`",
            names="`feed_forward.{gate.weight, expert_bias}`, `feed_forward.experts.e.{w1,w3,w2}.weight`",
        ),
    )


FAMILIES = [
    family(
        "lfm2_moe", 1028, num_experts_per_tok=4, use_expert_bias=True, norm_topk_prob=True, routed_scaling_factor=1.5,
    ),
    family("lfm2_moe-unbiased", 1029, num_experts_per_tok=2, use_expert_bias=False, norm_topk_prob=False),
]
