from goldens.common import SMALL, config, noaux_tc
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block


def read(disk: Disk, prefix: str) -> Block:
    return Block(
        noaux_tc(disk.config, disk[f"{prefix}.gate.e_score_correction_bias"]),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts"),
    )


FAMILIES = [
    Family(
        name="mimo_v2_flash",
        config=lambda: config(
            "MiMoV2FlashConfig", **SMALL, head_dim=12, v_head_dim=8, hidden_size=40, intermediate_size=44,
            moe_intermediate_size=12, num_hidden_layers=2, n_routed_experts=60, num_experts_per_tok=5, n_group=4,
            topk_group=2, norm_topk_prob=True, routed_scaling_factor=1.0,
        ),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=1036,
        block="routed experts",
        facts=Facts(
            fields="`n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="`mlp_layer_types[N]` is `sparse`; null: N > 0; releases: `moe_layer_freq[N]` is 1",
            router="as `deepseek_v3`; `routed_scaling_factor` null means 1",
            names="`mlp.gate.{weight,e_score_correction_bias}`, `mlp.experts.e.{gate,up,down}_proj.weight`",
            quirks="no shared expert",
        ),
    )
]
