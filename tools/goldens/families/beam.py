import dataclasses

from goldens.common import SMALL, config, noaux_tc
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config
    router = noaux_tc(fields, disk[f"{prefix}.gate.e_score_correction_bias"])
    return Block(
        dataclasses.replace(router, scale=1.0),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts"),
        output_scale=fields["routed_scaling_factor"],
    )


FAMILIES = [
    Family(
        name="beam",
        config=lambda: config(
            "BeamConfig", **SMALL, head_dim=8, hidden_size=40, intermediate_size=44, num_hidden_layers=2,
            moe_intermediate_size=28, num_experts=12, num_experts_per_tok=4, n_group=4, topk_group=2,
            norm_topk_prob=True, routed_scaling_factor=2.5, mlp_layer_types=["dense", "sparse"], sliding_window=8,
        ),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=2023,
        block="routed experts",
        keep_float32=r"(e_score_correction_bias|mlp\.gate\.weight)$",
        facts=Facts(
            fields="`num_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="`mlp_layer_types[N]` is `sparse`; null: N >= 3",
            router="as `deepseek_v3` without the scale",
            names="`mlp.gate.{weight,e_score_correction_bias}` (both f32), `mlp.experts.e.{gate,up,down}_proj.weight`",
            quirks="`routed_scaling_factor` multiplies the routed sum; silu(g) * u in f32; no shared expert",
        ),
    )
]
