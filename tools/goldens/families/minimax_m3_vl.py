from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, Router, sigmoid, swiglu_oai


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config["text_config"]
    act = swiglu_oai(fields["swiglu_alpha"], fields["swiglu_limit"])
    bias = disk[f"{prefix}.e_score_correction_bias"]
    return Block(
        Router(fields["num_experts_per_tok"], score=sigmoid, select_bias=bias, renormalise=True),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts", gate="w1", up="w3", down="w2", act=act),
        shared=disk.mlp(f"{prefix}.shared_experts", act=act),
        output_scale=fields["routed_scaling_factor"],
    )


TEXT = SMALL | dict(
    head_dim=8, hidden_size=56, intermediate_size=36, dense_intermediate_size=44, shared_intermediate_size=20,
    num_hidden_layers=2, num_local_experts=10, num_experts_per_tok=4, routed_scaling_factor=2.5, swiglu_alpha=1.5,
    swiglu_limit=1.25, mlp_layer_types=["dense", "sparse"], layer_types=["full_attention", "full_attention"],
    rotary_dim=4, index_n_heads=1, index_head_dim=8,
)
VISION = dict(
    hidden_size=12, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=4, patch_size=2,
    temporal_patch_size=1, spatial_merge_size=1,
)

FAMILIES = [
    Family(
        name="minimax_m3_vl",
        config=lambda: config(
            "MiniMaxM3VLConfig", text_config=TEXT, vision_config=VISION, projector_hidden_size=8,
            tie_word_embeddings=True,
        ),
        model_class="MiniMaxM3SparseForConditionalGeneration",
        layers=[1],
        module="model.language_model.layers.{}.mlp",
        disk="language_model.model.layers.{}.block_sparse_moe",
        read=read,
        seed=1018,
        facts=Facts(
            fields="`text_config`: `num_local_experts`, `num_experts_per_tok`, `intermediate_size`",
            layer_rule="`mlp_layer_types[N]` is `sparse`, or `moe_layer_freq[N]` is 1",
            router="sigmoid in f32 of a product in the gate's type; selection bias; always / sum without epsilon",
            names="`language_model.model.layers.N.block_sparse_moe.{gate.weight, e_score_correction_bias, "
            "experts.e.{w1,w3,w2}.weight, shared_experts.{gate,up,down}_proj.weight}`",
            quirks="(u + 1) * g * sigmoid(`swiglu_alpha` g), g <= `swiglu_limit`, u clamped on both sides, shared "
            "expert too; `routed_scaling_factor` multiplies the routed sum; shared `shared_intermediate_size` wide",
        ),
    )
]
