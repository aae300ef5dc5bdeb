import dataclasses

import numpy as np
import torch

from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Array, Block, Router, sigmoid
from goldens.recording import Recorded, record_block


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config
    cap = fields["moe_router_logit_softcapping"]

    def score(logits: Array) -> Array:
        return sigmoid(cap * np.tanh(logits / cap) if cap > 0.0 else logits)

    bias = disk[f"{prefix}.experts.e_score_correction_bias"]
    return Block(
        Router(fields["num_experts_per_tok"], score=score, select_bias=bias, renormalise=True),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts"),
        shared=disk.mlp(f"{prefix}.shared_expert"),
        output_scale=fields["moe_routed_scaling_factor"],
    )


def record(model, family, path: str, hidden_states: torch.Tensor, extra: dict) -> Recorded:
    """The router returns capped logits; the golden keeps the product before the cap."""
    recorded = record_block(model, family, path, hidden_states, extra)
    with torch.no_grad():
        product = torch.nn.functional.linear(hidden_states, model.get_submodule(path).gate.weight)
    return dataclasses.replace(recorded, logits=product)


def family(name: str, seed: int, **fields) -> Family:
    return Family(
        name=name,
        config=lambda: config(
            "LagunaConfig", **SMALL, head_dim=8, hidden_size=40, intermediate_size=44, moe_intermediate_size=28,
            shared_expert_intermediate_size=36, num_hidden_layers=2, **fields,
        ),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        record=record,
        seed=seed,
        facts=Facts(
            fields="`num_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="`mlp_layer_types[N]` is `sparse`; null: N > 0",
            router="product widened to f32; c * tanh(l / c), c = `moe_router_logit_softcapping`, if c > 0; sigmoid; "
            "selection bias; always / sum without epsilon; weights rounded to the model's type",
            names="`mlp.gate.weight`, `mlp.experts.e_score_correction_bias`, "
            "`mlp.experts.e.{gate,up,down}_proj.weight`, `mlp.shared_expert.*_proj.weight`",
            quirks="`moe_routed_scaling_factor` multiplies the routed sum; `moe_apply_router_weight_on_input` is not "
            "read by transformers; shared expert `shared_expert_intermediate_size` wide",
        ),
    )


FAMILIES = [
    family(
        "laguna", 1043, num_experts=10, num_experts_per_tok=4, moe_routed_scaling_factor=2.5,
        moe_router_logit_softcapping=1.5,
    ),
    family("laguna-uncapped", 1044, num_experts=8, num_experts_per_tok=2, moe_routed_scaling_factor=1.0),
]
