from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, Router, sigmoid


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config
    return Block(
        Router(fields["num_experts_per_tok"], score=sigmoid, renormalise=fields["norm_topk_prob"]),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts"),
        shared=disk.mlp(f"{prefix}.shared_expert"),
    )


FAMILIES = [
    Family(
        name="flint",
        config=lambda: config(
            "FlintConfig", **SMALL, head_dim=8, hidden_size=40, intermediate_size=44, moe_intermediate_size=28,
            shared_expert_intermediate_size=36, num_hidden_layers=2, num_experts=10, num_experts_per_tok=4,
            norm_topk_prob=True, mlp_only_layers=[0],
        ),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=1070,
        facts=Facts(
            fields="`num_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="N not in `mlp_only_layers` and (N + 1) % `decoder_sparse_step` == 0",
            router="f32 product; sigmoid; no bias; `norm_topk_prob`: / sum without epsilon",
            names="`mlp.gate.weight`, `mlp.experts.e.{gate,up,down}_proj.weight`, `mlp.shared_expert.*_proj.weight`",
            quirks="shared expert `shared_expert_intermediate_size` wide, plain add, no gate",
        ),
    )
]
