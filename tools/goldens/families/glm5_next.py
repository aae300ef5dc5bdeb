from goldens.common import SMALL_MLA, config, noaux_tc
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, swiglu_clamped


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config["text_config"]
    act = swiglu_clamped(fields["swiglu_limit"])
    return Block(
        noaux_tc(fields, disk[f"{prefix}.gate.e_score_correction_bias"]),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts", act=act),
        shared=disk.mlp(f"{prefix}.shared_experts", act=act),
    )


TEXT = SMALL_MLA | dict(
    qk_rope_head_dim=0, hidden_size=40, intermediate_size=44, moe_intermediate_size=20, num_hidden_layers=2,
    n_routed_experts=12, num_experts_per_tok=4, n_shared_experts=2, n_group=4, topk_group=2, norm_topk_prob=True,
    routed_scaling_factor=2.5, mlp_layer_types=["dense", "sparse"], index_head_dim=8, index_n_heads=1,
    swiglu_limit=1.25, linear_head_dim=8, linear_num_heads=2, hc_mult=2, layer_types=["linear_attention"] * 2,
)
VISION = dict(
    hidden_size=8, depth=1, num_heads=2, image_size=4, patch_size=2, temporal_patch_size=1, out_hidden_size=8,
    intermediate_size=8, projection_intermediate_size=8,
)

FAMILIES = [
    Family(
        name="glm5_next",
        config=lambda: config("Glm5NextConfig", text_config=TEXT, vision_config=VISION, tie_word_embeddings=True),
        model_class="Glm5NextForConditionalGeneration",
        layers=[1],
        module="model.language_model.layers.{}.mlp",
        disk="model.language_model.layers.{}.mlp",
        read=read,
        seed=2032,
        facts=Facts(
            fields="`text_config`: `n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="`mlp_layer_types[N]` is `sparse`; null: N >= 3",
            router="as `deepseek_v3`",
            names="as `deepseek_v3`, prefix `model.language_model.`",
            quirks="silu(min(g, L)) * clamp(u), L = `swiglu_limit`, in routed, shared and dense layers; shared expert "
            "is `moe_intermediate_size * n_shared_experts` wide; layer `num_hidden_layers` is MTP",
        ),
    )
]
