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


def family(name: str, seed: int, **fields) -> Family:
    return Family(
        name=name,
        config=lambda: config(
            "Qwen4ExpTextConfig", **SMALL, head_dim=8, hidden_size=40, num_hidden_layers=1, moe_intermediate_size=28,
            shared_expert_intermediate_size=20, num_experts=10, linear_key_head_dim=4, linear_value_head_dim=4,
            linear_num_key_heads=1, linear_num_value_heads=2, hc_count=2, hc_lowrank=4,
            layer_types=["linear_attention"], **fields,
        ),
        layers=[0],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=seed,
        block="routed experts and gated shared expert",
        facts=Facts(
            fields="`num_experts`, `num_experts_per_tok`, `moe_intermediate_size`; in `text_config` for `qwen4_exp`",
            layer_rule="all",
            router="softmax over all in f32; `norm_topk_prob` (default true): / sum; weights rounded to the model's "
            "type",
            names="`mlp.gate.weight`, `mlp.experts.e.{gate,up,down}_proj.weight`, `mlp.shared_expert.*_proj.weight`, "
            "`mlp.shared_expert_gate.weight`; prefix `model.language_model.` in `qwen4_exp`",
            quirks="shared expert, `shared_expert_intermediate_size` wide, times sigmoid of its gate; MTP in `mtp.*`",
        ),
    )


FAMILIES = [
    family("qwen4_exp_text", 2030, num_experts_per_tok=3, norm_topk_prob=True),
    family("qwen4_exp_text-unnormalised", 2031, num_experts_per_tok=4, norm_topk_prob=False),
]
