from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, LogitChoice, sigmoid


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config
    bias = disk[f"{prefix.removesuffix('mlp')}moe.router.expert_bias"]
    return Block(
        LogitChoice(fields["num_experts_per_tok"], sigmoid, select_bias=bias, renormalise=fields["norm_topk_prob"]),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts"),
        shared=disk.mlp(f"{prefix}.shared_experts"),
    )


def family(name: str, seed: int, **fields) -> Family:
    return Family(
        name=name,
        config=lambda: config(
            "Kolibri1Config", **SMALL, head_dim=8, hidden_size=40, num_hidden_layers=1, moe_intermediate_size=28,
            shared_expert_intermediate_size=20, num_experts=10, sliding_window=8, **fields,
        ),
        layers=[0],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=seed,
        # Logits have a wider range than the scores that other families' biases move.
        fill={r"e_score_correction_bias$": lambda values: 0.7 * values},
        facts=Facts(
            fields="`num_experts` (or `num_local_experts`), `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="all",
            router="f32 product; top-k of logit + bias; weights: sigmoid of the logits; `norm_topk_prob`: / sum "
            "without epsilon",
            names="`mlp.gate.weight`, `moe.router.expert_bias` (beside `mlp`), "
            "`mlp.experts.e.{gate,up,down}_proj.weight`, `mlp.shared_experts.*_proj.weight`",
            quirks="the bias is added to logits, not to scores; shared expert `shared_expert_intermediate_size` wide",
        ),
    )


FAMILIES = [
    family("kolibri1", 2020, num_experts_per_tok=3, norm_topk_prob=True),
    family("kolibri1-unnormalised", 2021, num_experts_per_tok=4, norm_topk_prob=False),
]
