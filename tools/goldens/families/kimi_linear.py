from goldens.common import SMALL_MLA, config, kimi_fields, noaux_tc
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block


def read(disk: Disk, prefix: str) -> Block:
    return Block(
        noaux_tc(kimi_fields(disk.config), disk[f"{prefix}.gate.e_score_correction_bias"]),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts", gate="w1", up="w3", down="w2"),
        shared=disk.mlp(f"{prefix}.shared_experts"),
    )


FAMILIES = [
    Family(
        name="kimi_linear",
        config=lambda: config(
            "KimiLinearConfig", **SMALL_MLA | {"q_lora_rank": None}, hidden_size=40, intermediate_size=44,
            moe_intermediate_size=36, num_hidden_layers=2, num_experts=8, num_experts_per_token=3,
            num_shared_experts=1, num_expert_group=2, topk_group=1, moe_renormalize=True, routed_scaling_factor=2.446,
            mlp_layer_types=["dense", "sparse"], layer_types=["linear_attention", "full_attention"],
            linear_head_dim=4, linear_num_heads=2, linear_conv_kernel_dim=2,
        ),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.block_sparse_moe",
        read=read,
        seed=1065,
        facts=Facts(
            fields="`num_experts`, `num_experts_per_token`, `moe_intermediate_size`",
            layer_rule="`mlp_layer_types[N]` is `sparse`; releases: N >= `first_k_dense_replace`",
            router="as `deepseek_v3`, with `num_expert_group`, `topk_group` and `moe_renormalize`",
            names="`block_sparse_moe.gate.{weight,e_score_correction_bias}`, "
            "`block_sparse_moe.experts.e.{w1,w3,w2}.weight`, "
            "`block_sparse_moe.shared_experts.{gate,up,down}_proj.weight`",
            quirks="shared expert is `moe_intermediate_size * num_shared_experts` wide",
        ),
    )
]
