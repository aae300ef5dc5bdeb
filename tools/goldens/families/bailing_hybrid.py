from goldens.common import SMALL_MLA, config, kimi_fields, noaux_tc
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block


def read(disk: Disk, prefix: str) -> Block:
    return Block(
        noaux_tc(kimi_fields(disk.config), disk[f"{prefix}.gate.expert_bias"]),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts"),
        shared=disk.mlp(f"{prefix}.shared_experts"),
    )


SIZES = {key: value for key, value in SMALL_MLA.items() if key != "q_lora_rank"}

FAMILIES = [
    Family(
        name="bailing_hybrid",
        config=lambda: config(
            "BailingHybridConfig", **SIZES, hidden_size=40, intermediate_size=44, moe_intermediate_size=28,
            num_hidden_layers=3, num_experts=12, num_experts_per_tok=4, num_shared_experts=1, n_group=4, topk_group=2,
            norm_topk_prob=True, routed_scaling_factor=2.5, first_k_dense_replace=2, head_dim=8, layer_group_size=2,
            short_conv_kernel_size=2, num_mtp_layers=0,
        ),
        layers=[2],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=1064,
        facts=Facts(
            fields="`num_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="`mlp_layer_types[N]` is `sparse`; null: N >= `first_k_dense_replace`",
            router="as `deepseek_v3`",
            names="as `deepseek_v3`, but `mlp.gate.expert_bias`",
            quirks="transformers 5 writes `num_experts_per_token`, `num_expert_group` and `moe_renormalize` instead of "
            "`num_experts_per_tok`, `n_group` and `norm_topk_prob`; shared expert is `moe_intermediate_size * "
            "num_shared_experts` wide",
        ),
    )
]
