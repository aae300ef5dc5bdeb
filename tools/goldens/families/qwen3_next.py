from goldens.common import SMALL, config, sigmoid_gated
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, Router


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config
    return Block(
        Router(fields["num_experts_per_tok"], renormalise=fields["norm_topk_prob"]),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts"),
        shared=sigmoid_gated(disk, prefix),
    )


FAMILIES = [
    Family(
        name="qwen3_next",
        config=lambda: config(
            "Qwen3NextConfig", **SMALL, head_dim=8, hidden_size=40, intermediate_size=44, moe_intermediate_size=12,
            shared_expert_intermediate_size=28, num_hidden_layers=2, num_experts=60, num_experts_per_tok=5,
            norm_topk_prob=True, mlp_only_layers=[0], layer_types=["full_attention", "linear_attention"],
            linear_key_head_dim=4, linear_value_head_dim=4, linear_num_key_heads=2, linear_num_value_heads=2,
        ),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=1003,
        block="routed experts and gated shared expert",
        facts=Facts(
            fields="`num_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="N not in `mlp_only_layers` and (N + 1) % `decoder_sparse_step` == 0",
            router="softmax over all in f32; `norm_topk_prob`: / sum; weights rounded to the model's type",
            names="`mlp.gate.weight`, `mlp.experts.e.{gate,up,down}_proj.weight`, "
            "`mlp.shared_expert.{gate,up,down}_proj.weight`, `mlp.shared_expert_gate.weight` [1, H]",
            quirks="shared expert, `shared_expert_intermediate_size` wide, times sigmoid of its gate; MTP in `mtp.*`",
        ),
    )
]
