from goldens.common import SMALL, config, transpose_stacks
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, Router


def read(disk: Disk, prefix: str, columns: bool = True) -> Block:
    fields = disk.config["text_config"]
    return Block(
        Router(fields["num_experts_per_tok"], renormalise=True),
        disk[f"{prefix}.gate.weight"],
        disk.stacked(f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj", columns=columns),
    )


TEXT = SMALL | dict(
    head_dim=8, hidden_size=56, intermediate_size=44, moe_intermediate_size=36, num_hidden_layers=2, num_experts=10,
    num_experts_per_tok=3, mlp_only_layers=[0],
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
)
VISION = dict(
    depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=56, patch_size=2, temporal_patch_size=1,
    spatial_merge_size=1, num_position_embeddings=4, deepstack_visual_indexes=[],
)

FACTS = Facts(
    fields="`text_config`: `num_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
    layer_rule="N not in `mlp_only_layers` and (N + 1) % `decoder_sparse_step` == 0",
    router="softmax over all in f32; always / sum; weights rounded to the model's type",
    names="`model.language_model.layers.N.mlp.{gate.weight, experts.gate_up_proj [E, H, 2I], "
    "experts.down_proj [E, I, H]}`",
    quirks="expert tensors transposed on disk, gate half first; a model saved by transformers 5 has [E, 2I, H] and "
    "[E, H, I] under the same names (`qwen3_vl_moe-saved`)",
)


def family(name: str, seed: int, **changes) -> Family:
    return Family(
        name=name,
        config=lambda: config("Qwen3VLMoeConfig", text_config=TEXT, vision_config=VISION, tie_word_embeddings=True),
        model_class="Qwen3VLMoeForConditionalGeneration",
        layers=[1],
        module="model.language_model.layers.{}.mlp",
        disk="model.language_model.layers.{}.mlp",
        seed=seed,
        block="routed experts",
        facts=FACTS,
        **changes,
    )


FAMILIES = [
    family("qwen3_vl_moe", 1004, read=read, rewrite=transpose_stacks),
    family("qwen3_vl_moe-saved", 1054, read=lambda disk, prefix: read(disk, prefix, columns=False)),
]
