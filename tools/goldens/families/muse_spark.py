import dataclasses

import numpy as np
import torch

from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Array, Block, Mlp, Router, sigmoid
from goldens.recording import Recorded, record_block


def rms(x: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)


def normed(mlp: Mlp, weight: Array, eps: float):
    """An expert whose output is scaled by 1 + weight, then normalised, before it is weighted."""
    return lambda x: rms(mlp(x) * (1.0 + weight), eps)


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config["text_config"]
    multiplier = fields["output_multiplier"]
    before, after = disk[f"{prefix}.pre_expert_proj.weight"], disk[f"{prefix}.post_expert_proj.weight"]
    gain = 1.0 + disk[f"{prefix}.pre_expert_norm.weight"]
    stacks = disk.stacked(f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj")
    weight = disk[f"{prefix}.experts.post_expert_norm.weight"]
    return Block(
        Router(
            fields["num_experts_per_tok"], score=lambda logits: sigmoid(multiplier * logits),
            select_bias=disk[f"{prefix}.gate.e_score_correction_bias"], renormalise=True, eps=1e-15,
            scale=fields["routed_scaling_factor"],
        ),
        disk[f"{prefix}.gate.weight"],
        [normed(mlp, weight, fields["post_norm_eps"]) for mlp in stacks],
        latent_in=lambda x: rms(x @ before.T, fields["rms_norm_eps"]) * gain,
        latent_out=lambda x: x @ after.T,
    )


def record(model, family, path: str, hidden_states: torch.Tensor, extra: dict) -> Recorded:
    """The router returns multiplied logits; the golden keeps the product itself."""
    recorded = record_block(model, family, path, hidden_states, extra)
    with torch.no_grad():
        weight = model.get_submodule(path).gate.weight
        product = torch.nn.functional.linear(hidden_states.float(), weight.float())
    return dataclasses.replace(recorded, logits=product)


TEXT = SMALL | dict(
    head_dim=8, hidden_size=40, intermediate_size=44, moe_intermediate_size=36, moe_hidden_size=28,
    num_hidden_layers=2, num_local_experts=8, num_experts_per_tok=3, routed_scaling_factor=1.5,
    output_multiplier=0.6, mlp_layer_types=["dense", "sparse"], sliding_window=8,
)
VISION = dict(
    patch_size=2, pos_emb_height=2, pos_emb_width=2, num_attention_heads=2, num_hidden_layers=1, hidden_size=8,
    intermediate_size=8, patch_temporal=1, merge_size=1,
)
AUDIO = dict(
    patch_sizes=[2], hidden_sizes=[8], depths=[1], num_hidden_layers=1, mlp_ratio=1.0, conv_kernel_size=3,
    out_hidden_size=40,
)

FAMILIES = [
    Family(
        name="muse_spark",
        config=lambda: config(
            "MuseSparkConfig", text_config=TEXT, vision_config=VISION, audio_config=AUDIO, out_hidden_size=8,
            projector_hidden_size=8, tie_word_embeddings=True,
        ),
        model_class="MuseSparkForConditionalGeneration",
        layers=[1],
        module="model.language_model.layers.{}.mlp",
        disk="model.language_model.layers.{}.mlp",
        read=read,
        record=record,
        seed=1093,
        keep_float32=r"mlp\.gate\.(weight|e_score_correction_bias)$|residual_gate\.gate$",
        fill={r"norm\.weight$": lambda normal: 0.3 * normal},
        block="routed experts between two projections",
        facts=Facts(
            fields="`text_config`: `num_local_experts`, `num_experts_per_tok`, `moe_intermediate_size`, "
            "`moe_hidden_size`",
            layer_rule="`mlp_layer_types[N]` is `sparse`; null: all",
            router="f32 product of the full x, * `output_multiplier`; sigmoid; selection bias; / (sum + 1e-15); "
            "* `routed_scaling_factor`",
            names="`model.language_model.layers.N.mlp.{gate.weight, gate.e_score_correction_bias, "
            "pre_expert_proj.weight, pre_expert_norm.weight, experts.gate_up_proj [E, 2I, Hm], experts.down_proj "
            "[E, Hm, I], experts.post_expert_norm.weight, post_expert_proj.weight}`",
            quirks="experts work on an RMS norm (times 1 + weight) of pre_expert_proj; each expert's output is scaled "
            "by 1 + post_expert_norm and normalised before it is weighted; no shared expert",
        ),
    )
]
