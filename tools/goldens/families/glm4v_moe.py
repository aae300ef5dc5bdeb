from goldens.common import SMALL, config, read_deepseek_v3
from goldens.family import Facts, Family

TEXT = SMALL | dict(
    hidden_size=40, intermediate_size=44, moe_intermediate_size=28, num_hidden_layers=2, n_routed_experts=10,
    num_experts_per_tok=3, n_shared_experts=1, n_group=5, topk_group=2, norm_topk_prob=True,
    routed_scaling_factor=1.5, first_k_dense_replace=1, head_dim=8,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1],
                     "partial_rotary_factor": 1.0},
)
VISION = dict(
    depth=1, hidden_size=8, num_heads=2, image_size=4, patch_size=2, spatial_merge_size=1, temporal_patch_size=1,
    out_hidden_size=40, intermediate_size=8,
)

FAMILIES = [
    Family(
        name="glm4v_moe",
        config=lambda: config("Glm4vMoeConfig", text_config=TEXT, vision_config=VISION, tie_word_embeddings=True),
        model_class="Glm4vMoeForConditionalGeneration",
        layers=[1],
        module="model.language_model.layers.{}.mlp",
        disk="model.language_model.layers.{}.mlp",
        read=read_deepseek_v3,
        seed=1063,
        facts=Facts(
            fields="`text_config`: `n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="N >= `first_k_dense_replace`",
            router="as `deepseek_v3`",
            names="as `deepseek_v3`, prefix `model.language_model.`",
            quirks="MTP layer past the last",
        ),
    )
]
