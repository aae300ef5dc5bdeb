import torch

from goldens.common import SMALL_MLA, config, read_deepseek_v3
from goldens.family import Facts, Family

TEXT = SMALL_MLA | dict(
    model_type="kimi_k2", hidden_size=40, intermediate_size=44, moe_intermediate_size=20, num_hidden_layers=2,
    n_routed_experts=14, num_experts_per_tok=5, n_shared_experts=1, n_group=1, topk_group=1, norm_topk_prob=True,
    routed_scaling_factor=2.827, first_k_dense_replace=1,
)
VISION = dict(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, patch_size=2, pos_emb_height=2,
    pos_emb_width=2, pos_emb_time=1,
)


def release_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Only the vision tower has blocks in releases; saving renames the text layers too."""
    before, after = "language_model.model.blocks.", "language_model.model.layers."
    return {name.replace(before, after): tensor for name, tensor in tensors.items()}


FAMILIES = [
    Family(
        name="kimi_k25",
        config=lambda: config(
            "Kimi_K25Config", text_config=TEXT, vision_config=VISION, projection_hidden_size=8, tie_word_embeddings=True
        ),
        model_class="Kimi_K25ForConditionalGeneration",
        layers=[1],
        module="model.language_model.layers.{}.mlp",
        disk="language_model.model.layers.{}.mlp",
        read=read_deepseek_v3,
        rewrite=release_names,
        seed=2037,
        facts=Facts(
            fields="`text_config`: `n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="N >= `first_k_dense_replace`",
            router="as `deepseek_v3`, `n_group` 1",
            names="as `deepseek_v3`, prefix `language_model.model.`",
            quirks="the text's type is `kimi_k2` in releases, `deepseek_v3` where transformers 5 saved; a model saved "
            "by transformers 5 has `language_model.model.blocks.N`; releases store experts in INT4",
        ),
    )
]
