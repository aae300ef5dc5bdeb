from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, Mlp, Router, sigmoid, swiglu, swiglu_clamped_after


def limited(limits: list | None, layer: int):
    """0, null or no list: no limit."""
    limit = limits[layer] if limits else None
    return swiglu_clamped_after(limit) if limit else swiglu


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config["text_config"]
    above = prefix.removesuffix(".moe")
    layer = int(above.rpartition(".")[2])
    gate, up, down = (disk[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    act = limited(fields["swiglu_limits"], layer)
    return Block(
        Router(
            fields["num_experts_per_tok"], sigmoid, select_bias=disk[f"{prefix}.router_bias"], renormalise=True
        ),
        disk[f"{prefix}.gate.weight"],
        [Mlp(u, d, g, act=act) for g, u, d in zip(gate, up, down, strict=True)],
        shared=disk.mlp(f"{above}.share_expert", act=limited(fields["swiglu_limits_shared"], layer)),
        output_scale=fields["moe_router_scaling_factor"],
    )


TEXT = {key: value for key, value in SMALL.items() if key != "pad_token_id"} | dict(
    pad_token_id=1, head_dim=8, hidden_size=40, intermediate_size=44, moe_intermediate_size=20, num_hidden_layers=3,
    n_routed_experts=10, num_experts_per_tok=3, share_expert_dim=28, mlp_layer_types=["dense", "sparse", "sparse"],
    moe_router_scaling_factor=3.0, swiglu_limits=[0.0, 0.0, 0.5], swiglu_limits_shared=[0.0, 0.0, 0.75],
)
VISION = dict(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=4, patch_size=2
)

FAMILIES = [
    Family(
        name="step3p7",
        config=lambda: config("Step3p7Config", text_config=TEXT, vision_config=VISION, tie_word_embeddings=True),
        model_class="Step3p7ForConditionalGeneration",
        layers=[1, 2],
        module="model.language_model.layers.{}.mlp",
        disk="model.layers.{}.moe",
        read=read,
        seed=2036,
        facts=Facts(
            fields="`moe_num_experts` (`n_routed_experts`), `moe_top_k` (`num_experts_per_tok`), "
            "`moe_intermediate_size`; in `text_config` for `step3p7`, at the top level for `step3p5`",
            layer_rule="`mlp_layer_types[N]` is `sparse`; releases: N in `moe_layers_enum` (\"3,4,...\")",
            router="product in the gate's type; sigmoid in f32; selection bias; / sum without epsilon",
            names="`moe.gate.weight`, `moe.router_bias`, `moe.{gate,up}_proj.weight` [E, I, H], `moe.down_proj.weight` "
            "[E, H, I], `share_expert.{gate,up,down}_proj.weight` (beside `moe`)",
            quirks="`moe_router_scaling_factor` multiplies the routed sum; min(silu(g), L) * clamp(u), L = "
            "`swiglu_limits[N]`, shared expert `swiglu_limits_shared[N]`; 0 or null: no limit; shared expert "
            "`share_expert_dim` wide",
        ),
    )
]
