from goldens.common import SMALL, config, noaux_tc
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block


def read(disk: Disk, prefix: str) -> Block:
    return Block(
        noaux_tc(disk.config, disk[f"{prefix}.e_score_correction_bias"]),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts"),
        shared=disk.mlp(f"{prefix}.shared_experts"),
    )


FAMILIES = [
    Family(
        name="exaone_moe",
        config=lambda: config(
            "ExaoneMoeConfig", **SMALL, head_dim=8, hidden_size=40, intermediate_size=44, moe_intermediate_size=28,
            num_hidden_layers=3, num_experts=12, num_experts_per_tok=3, num_shared_experts=1, n_group=3, topk_group=1,
            norm_topk_prob=True, routed_scaling_factor=2.5, mlp_layer_types=["sparse", "dense", "sparse"],
            layer_types=["full_attention"] * 3, sliding_window=16,
        ),
        layers=[0, 2],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=1034,
        facts=Facts(
            fields="`num_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="`mlp_layer_types[N]` is `sparse`; null: N >= `first_k_dense_replace`",
            router="as `deepseek_v3`",
            names="`mlp.gate.weight`, `mlp.e_score_correction_bias`, `mlp.experts.e.{gate,up,down}_proj.weight`, "
            "`mlp.shared_experts.*_proj.weight`",
            quirks="shared expert is `moe_intermediate_size * num_shared_experts` wide",
        ),
    )
]
