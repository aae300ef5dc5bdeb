import numpy as np
import torch

from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import TINY, Array, Block, Router, sigmoid, sqrt_softplus
from goldens.recording import Recorded, record_block

SCORES = {"sigmoid": sigmoid, "sqrtsoftplus": sqrt_softplus}


def capped_swiglu(gate_cap: float, up_cap: float):
    def act(gate: Array, up: Array) -> Array:
        return gate_cap * np.tanh(gate / gate_cap) * sigmoid(gate) * (up_cap * np.tanh(up / up_cap))

    return act


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config.get("text_config", disk.config)
    return Block(
        Router(
            fields["num_experts_per_tok"], SCORES[fields["scoring_func"]], select_bias=disk[f"{prefix}.gate.bias"],
            renormalise=True, eps=TINY, scale=fields["route_scale"],
        ),
        disk[f"{prefix}.gate.weight"],
        disk.stacked(
            f"{prefix}.experts.w13_weight", f"{prefix}.experts.w2_weight", interleaved=True,
            act=capped_swiglu(fields["mlp_gate_softcap"], fields["mlp_up_softcap"]),
        ),
    )


def record(model, family, path: str, hidden_states: torch.Tensor, extra: dict) -> Recorded:
    """The published code needs the router in float32, also in a bfloat16 model."""
    model.get_submodule(path).gate.float()
    return record_block(model, family, path, hidden_states, extra)


TEXT = {key: value for key, value in SMALL.items() if key != "tie_word_embeddings"} | dict(
    unpadded_vocab_size=96, head_dim=8, swa_num_attention_heads=2, swa_num_key_value_heads=1, swa_head_dim=8,
    hidden_size=40, moe_intermediate_size=28, num_hidden_layers=1, n_routed_experts=10, num_experts_per_tok=3,
    route_scale=2.5, d_rel=4, rel_extent=8, conv_kernel_size=2, sliding_window_size=8, n_layers_per_attn_res_block=1,
    mlp_gate_softcap=2.0, mlp_up_softcap=3.0,
)
VISION = dict(
    text_hidden_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, patch_size=2, posemb_grid_size=2,
    projection_hidden_dim=8,
)
FACTS = Facts(
    fields="`text_config`: `n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
    layer_rule="all",
    router="f32 product; `scoring_func` (sigmoid); selection bias; / (sum + 1e-20); * `route_scale`",
    names="`model.llm.layers.N.mlp.{gate.weight, gate.bias, experts.w13_weight [E, 2I, H], experts.w2_weight "
    "[E, H, I]}`",
    quirks="w13 rows interleaved gate, up; G tanh(g / G) sigmoid(g) * U tanh(u / U), G = `mlp_gate_softcap`, U = "
    "`mlp_up_softcap`; no shared expert; the release stores experts in MXFP8",
)


def family(name: str, seed: int, module: str, make, **others) -> Family:
    return Family(
        name=name,
        config=make,
        layers=[0],
        module=module,
        disk="model.llm.layers.{}.mlp",
        read=read,
        record=record,
        seed=seed,
        block="routed experts",
        keep_float32=r"(e_score_correction_bias|mlp\.gate\.weight)$",
        facts=FACTS,
        **others,
    )


FAMILIES = [
    family(
        "inkling2", 2034, "model.language_model.layers.{}.mlp",
        lambda: config("Inkling2Config", text_config=TEXT, vision_config=VISION, transformers_version="5.23.0"),
        model_class="Inkling2ForConditionalGeneration",
    ),
    family("inkling2_text", 2035, "model.layers.{}.mlp", lambda: config("Inkling2TextConfig", **TEXT)),
]
