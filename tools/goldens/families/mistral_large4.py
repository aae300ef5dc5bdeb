from goldens.common import SMALL_MLA, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import TINY, Block, Router


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config["text_config"]
    return Block(
        Router(
            fields["num_experts_per_tok"], n_group=fields["n_group"], topk_group=fields["topk_group"],
            masked_score=0.0, renormalise=True, eps=TINY, scale=fields["routed_scaling_factor"],
        ),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts", gate="w1", up="w3", down="w2"),
        shared=disk.mlp(f"{prefix}.shared_experts", gate="w1", up="w3", down="w2"),
    )


SIZES = {key: value for key, value in SMALL_MLA.items() if key != "q_lora_rank"}
TEXT = SIZES | dict(
    hidden_size=40, intermediate_size=44, moe_intermediate_size=28, num_hidden_layers=2, n_routed_experts=8,
    num_experts_per_tok=3, n_shared_experts=1, n_group=4, topk_group=2, routed_scaling_factor=1.5,
    mlp_layer_types=["dense", "sparse"], index_topk=4, index_head_dim=8, index_n_heads=1,
)
VISION = dict(
    model_type="pixtral", hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=4,
    patch_size=2, head_dim=4,
)

FAMILIES = [
    Family(
        name="mistral_large4",
        config=lambda: config(
            "MistralLarge4Config", text_config=TEXT, vision_config=VISION, spatial_merge_size=1,
            tie_word_embeddings=False,
        ),
        model_class="MistralLarge4ForConditionalGeneration",
        layers=[1],
        module="model.language_model.layers.{}.mlp",
        disk="layers.{}",
        read=read,
        seed=1073,
        unread=(".attention", ".ffn_norm", ".ssmax", ".indexer"),
        facts=Facts(
            fields="`text_config`: `n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="`mlp_layer_types[N]` is `sparse`; null: N >= `first_k_dense_replace`",
            router="f32 product; softmax over all; `n_group` groups scored by their two best, others 0; "
            "always / (sum + 1e-20); * `routed_scaling_factor`",
            names="`layers.N.{gate.weight, experts.e.{w1,w3,w2}.weight, shared_experts.{w1,w3,w2}.weight}`",
            quirks="no selection bias; no prefix",
        ),
    )
]
