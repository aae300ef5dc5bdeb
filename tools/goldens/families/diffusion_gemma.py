import dataclasses

from goldens.common import SMALL, config
from goldens.families import gemma4
from goldens.family import Family

TEXT = SMALL | dict(
    head_dim=8, global_head_dim=8, hidden_size=40, intermediate_size=44, moe_intermediate_size=28, num_hidden_layers=1,
    num_experts=10, top_k_experts=4, layer_types=["full_attention"],
)

FAMILIES = [
    Family(
        name="diffusion_gemma",
        config=lambda: config(
            "DiffusionGemmaConfig", text_config=TEXT, vision_config={"model_type": "gemma4_vision"} | gemma4.VISION,
            tie_word_embeddings=True,
        ),
        model_class="DiffusionGemmaForBlockDiffusion",
        layers=[0],
        module="model.decoder.layers.{}",
        disk="model.decoder.layers.{}",
        read=gemma4.read,
        record=gemma4.record,
        seed=2040,
        block="routed experts; hidden_states is their normed input, router_input the raw residual",
        fill={
            r"router\.proj\.weight$": lambda normal: 2.0 * normal,
            r"(router\.scale|per_expert_scale)$": lambda normal: 1.0 + 0.3 * normal,
        },
        unread=(".input", ".layer_scalar", ".mlp", ".post", ".pre", ".self_attn"),
        facts=dataclasses.replace(
            gemma4.FACTS,
            layer_rule="all",
            names=gemma4.FACTS.names.replace("`model.language_model.", "`model.decoder."),
            quirks=gemma4.FACTS.quirks + "; the encoder shares the decoder's weights",
        ),
    )
]
