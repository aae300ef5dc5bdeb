from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, Router


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config["text_config"]
    grouped = fields["topk_method"] == "group_limited_greedy"
    return Block(
        Router(
            fields["num_experts_per_tok"], n_group=fields["n_group"] if grouped else 1,
            topk_group=fields["topk_group"] if grouped else 1, group_score="max",
            scale=fields["routed_scaling_factor"],
        ),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts"),
        shared=disk.mlp(f"{prefix}.shared_experts"),
    )


TEXT = SMALL | dict(
    hidden_size=40, intermediate_size=44, moe_intermediate_size=20, num_hidden_layers=2, n_shared_experts=2,
    mlp_layer_types=["dense", "sparse"],
)
SAM = dict(
    hidden_size=8, output_channels=4, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=16,
    window_size=2, global_attn_indexes=[0], mlp_dim=8, downsample_channels=[4, 8],
)
QWEN = dict(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=8
)
CLIP = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=4, patch_size=2)


def family(name: str, seed: int, kind: str, encoder: dict, **fields) -> Family:
    return Family(
        name=name,
        config=lambda: config(
            f"{kind}Config", text_config=TEXT | fields, vision_config={"sam_config": SAM, "encoder_config": encoder},
            tie_word_embeddings=True,
        ),
        model_class=f"{kind}ForConditionalGeneration",
        layers=[1],
        module="model.language_model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=seed,
        facts=Facts(
            fields="`text_config` (`language_config` in releases): `n_routed_experts`, `num_experts_per_tok`, "
            "`moe_intermediate_size`",
            layer_rule="`mlp_layer_types[N]` is `sparse`; null: N >= `first_k_dense_replace`",
            router="as `deepseek_v2`",
            names="as `deepseek_v2`, prefix `model.`",
            quirks="shared expert is `moe_intermediate_size * n_shared_experts` wide",
        ),
    )


FAMILIES = [
    family(
        "deepseek_ocr2", 2038, "DeepseekOcr2", QWEN, n_routed_experts=10, num_experts_per_tok=3,
        topk_method="greedy", routed_scaling_factor=1.0,
    ),
    family(
        "unlimited_ocr", 2039, "UnlimitedOcr", CLIP, n_routed_experts=12, num_experts_per_tok=4, n_group=4,
        topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=1.5,
    ),
]
