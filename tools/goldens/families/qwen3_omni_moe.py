from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, Router


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config["thinker_config"]["text_config"]
    return Block(
        Router(fields["num_experts_per_tok"], renormalise=fields["norm_topk_prob"]),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts"),
    )


THINKER = dict(
    text_config=SMALL | dict(
        hidden_size=40, intermediate_size=44, moe_intermediate_size=28, num_hidden_layers=2, num_experts=10,
        num_experts_per_tok=3, norm_topk_prob=True, mlp_only_layers=[0],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 3, 3]},
    ),
    vision_config=dict(
        depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=40, patch_size=2,
        temporal_patch_size=1, spatial_merge_size=1, num_position_embeddings=4, deepstack_visual_indexes=[],
    ),
    audio_config=dict(
        num_mel_bins=8, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=8, d_model=8,
        max_source_positions=4, n_window=2, output_dim=40, downsample_hidden_size=2,
    ),
)

FAMILIES = [
    Family(
        name="qwen3_omni_moe",
        config=lambda: config("Qwen3OmniMoeConfig", thinker_config=THINKER, enable_audio_output=False),
        model_class="Qwen3OmniMoeForConditionalGeneration",
        layers=[1],
        module="thinker.model.language_model.layers.{}.mlp",
        disk="thinker.model.layers.{}.mlp",
        read=read,
        seed=1074,
        block="routed experts",
        facts=Facts(
            fields="`thinker_config.text_config`: `num_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="N not in `mlp_only_layers` and (N + 1) % `decoder_sparse_step` == 0",
            router="softmax over all in f32; `norm_topk_prob`: / sum; weights rounded to the model's type",
            names="`thinker.model.layers.N.mlp.{gate.weight, experts.e.{gate,up,down}_proj.weight}`",
            quirks="the talker, with a gated shared expert, is not part of this row",
        ),
    )
]
