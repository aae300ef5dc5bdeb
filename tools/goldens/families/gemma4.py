import numpy as np
import torch

from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Array, Block, Router, geglu_tanh
from goldens.recording import Hooks, Recorded


class ScaledRouter(Router):
    """Softmax over all, renormalised, times a learned scale per expert, which scale holds."""

    def weigh(self, logits: Array, ids: Array) -> Array:
        weights = np.take_along_axis(self.score(logits), ids, axis=-1)
        return weights / weights.sum(axis=-1, keepdims=True) * self.scale[ids]


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config.get("text_config", disk.config)
    scale, eps = disk[f"{prefix}.router.scale"], fields["rms_norm_eps"]

    def norm(x: Array) -> Array:
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * scale * x.shape[-1] ** -0.5

    return Block(
        ScaledRouter(fields["top_k_experts"], scale=disk[f"{prefix}.router.per_expert_scale"]),
        disk[f"{prefix}.router.proj.weight"],
        disk.stacked(f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj", act=geglu_tanh),
        router_norm=norm,
    )


def record(model, family, path: str, hidden_states: torch.Tensor, extra: dict) -> Recorded:
    """As the decoder layer does: the router reads the residual, the experts a norm of it."""
    layer = model.get_submodule(path)
    with Hooks() as hooks, torch.no_grad():
        hooks.watch("product", layer.router.proj)
        _, weights, ids = layer.router(hidden_states)
        normed = layer.pre_feedforward_layernorm_2(hidden_states)
        output = layer.experts(normed, ids, weights)
    logits = hooks.seen["product"][1]
    return Recorded(logits, ids, weights, output, normed, {"router_input": hidden_states})


TEXT = SMALL | dict(
    head_dim=8, global_head_dim=8, hidden_size=40, intermediate_size=44, moe_intermediate_size=36, num_hidden_layers=2,
    enable_moe_block=True, num_experts=8, top_k_experts=3, hidden_size_per_layer_input=0, vocab_size_per_layer_input=96,
    layer_types=["sliding_attention", "full_attention"],
)
VISION = dict(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=4,
    patch_size=2, position_embedding_size=4,
)
FACTS = Facts(
    fields="`text_config`: `num_experts`, `top_k_experts`, `moe_intermediate_size`",
    layer_rule="all, if `enable_moe_block`",
    router="input: RMS norm without weight of the raw residual, * `router.scale` * H^-0.5; softmax over all in f32; "
    "always / sum; * `router.per_expert_scale[e]`",
    names="`model.language_model.layers.N.{router.proj.weight, router.scale [H], router.per_expert_scale [E], "
    "experts.gate_up_proj [E, 2I, H], experts.down_proj [E, H, I]}`; text only: prefix `model.`",
    quirks="gelu (tanh); the experts read `pre_feedforward_layernorm_2(residual)`; a dense MLP with norms of its own "
    "runs in parallel, outside the block, as are the norms after it",
)


def family(name: str, seed: int, **changes) -> Family:
    return Family(
        name=name,
        layers=[0, 1],
        read=read,
        record=record,
        seed=seed,
        block="routed experts; hidden_states is their normed input, router_input the raw residual",
        facts=FACTS,
        fill={
            r"router\.proj\.weight$": lambda normal: 2.0 * normal,
            r"(router\.scale|per_expert_scale)$": lambda normal: 1.0 + 0.3 * normal,
        },
        unread=(".input", ".layer_scalar", ".mlp", ".per_layer", ".post", ".pre", ".self_attn"),
        **changes,
    )


FAMILIES = [
    family(
        "gemma4", 1042, config=lambda: config(
            "Gemma4Config", text_config=TEXT, vision_config=VISION, audio_config=None, tie_word_embeddings=True,
        ),
        model_class="Gemma4ForConditionalGeneration", module="model.language_model.layers.{}",
        disk="model.language_model.layers.{}",
    ),
    family(
        "gemma4_text", 1048, config=lambda: config(
            "Gemma4TextConfig", **TEXT | {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 28},
        ),
        module="model.layers.{}", disk="model.layers.{}",
    ),
]
