import re

from goldens.common import SMALL_MLA, config, noaux_tc
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, swiglu_clamped


def release_names(tensors: dict) -> dict:
    """transformers saves every gate_proj as linear_gate, meant for the attention alone."""
    return {re.sub(r"(\.mlp\..*)linear_gate", r"\1gate_proj", name): t for name, t in tensors.items()}


def read(disk: Disk, prefix: str) -> Block:
    act = swiglu_clamped(disk.config["swiglu_limit"])
    return Block(
        noaux_tc(disk.config, disk[f"{prefix}.gate.e_score_correction_bias"]),
        disk[f"{prefix}.gate.weight"],
        disk.stacked(f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj", act=act),
        shared=disk.mlp(f"{prefix}.shared_experts"),
    )


FAMILIES = [
    Family(
        name="hy_v4",
        config=lambda: config(
            "HYV4Config", **SMALL_MLA, hidden_size=40, intermediate_size=44, moe_intermediate_size=36,
            num_hidden_layers=2, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, n_group=2,
            topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.827, swiglu_limit=1.25,
            mlp_layer_types=["dense", "sparse"], index_topk=4, index_head_dim=8, index_n_heads=1, head_dim=8, hc_mult=2,
        ),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        rewrite=release_names,
        seed=1069,
        facts=Facts(
            fields="`n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="`mlp_layer_types[N]` is `sparse`",
            router="as `deepseek_v3`",
            names="`mlp.gate.{weight,e_score_correction_bias}`, `mlp.experts.gate_up_proj` [E, 2I, H], "
            "`mlp.experts.down_proj` [E, H, I], `mlp.shared_experts.*_proj.weight`",
            quirks="silu(min(g, L)) * clamp(u), L = `swiglu_limit`, in the routed experts only; a model saved by "
            "transformers 5 has `linear_gate` for `gate_proj`",
        ),
    )
]
