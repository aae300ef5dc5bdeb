from goldens.common import SMALL, config, sigmoid_gated, stack_experts
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, Router


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config.get("text_config", disk.config)
    return Block(
        Router(fields["num_experts_per_tok"], renormalise=True),
        disk[f"{prefix}.gate.weight"],
        disk.stacked(f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj")
        if f"{prefix}.experts.gate_up_proj" in disk
        else disk.experts(f"{prefix}.experts"),
        shared=sigmoid_gated(disk, prefix),
    )


TEXT = SMALL | dict(
    head_dim=8, hidden_size=40, moe_intermediate_size=24, shared_expert_intermediate_size=36, num_hidden_layers=2,
    num_experts=10, num_experts_per_tok=4, layer_types=["linear_attention", "full_attention"],
    linear_key_head_dim=4, linear_value_head_dim=4, linear_num_key_heads=2, linear_num_value_heads=2,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1],
                     "partial_rotary_factor": 1.0},
)
VISION = dict(
    depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=40, patch_size=2, temporal_patch_size=1,
    spatial_merge_size=1, num_position_embeddings=4,
)

FACTS = Facts(
    fields="`text_config`: `num_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
    layer_rule="all",
    router="softmax over all in f32; always / sum; weights rounded to the model's type",
    names="`model.language_model.layers.N.mlp.{gate.weight, experts.gate_up_proj [E, 2I, H], experts.down_proj "
    "[E, H, I], shared_expert.*_proj.weight, shared_expert_gate.weight}`",
    quirks="shared expert, `shared_expert_intermediate_size` wide, times sigmoid of its gate; MTP in `mtp.*`; a "
    "model saved by "
    "transformers 5 has `experts.e.{gate,up,down}_proj.weight` instead (`qwen3_5_moe_text`)",
)

FAMILIES = [
    Family(
        name="qwen3_5_moe",
        config=lambda: config("Qwen3_5MoeConfig", text_config=TEXT, vision_config=VISION, tie_word_embeddings=True),
        model_class="Qwen3_5MoeForConditionalGeneration",
        layers=[0, 1],
        module="model.language_model.layers.{}.mlp",
        disk="model.language_model.layers.{}.mlp",
        read=read,
        rewrite=stack_experts,
        seed=1005,
        block="routed experts and gated shared expert",
        facts=FACTS,
    ),
    Family(
        name="qwen3_5_moe_text",
        config=lambda: config(
            "Qwen3_5MoeTextConfig", **TEXT | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        ),
        layers=[0],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=1055,
        block="routed experts and gated shared expert",
        facts=FACTS,
    ),
]
