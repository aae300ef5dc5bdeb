import dataclasses

import numpy as np
import torch

from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import TINY, Array, Block, Router, sqrt_softplus, swiglu_clamped
from goldens.recording import Hooks, Recorded, first


@dataclasses.dataclass
class HashRouter(Router):
    """Experts by token id from a table; weights still from the scores."""

    table: Array | None = None  # [vocabulary, k]

    def select(self, logits: Array, token_ids: Array | None = None) -> Array:
        return self.table[token_ids]


def release_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Releases have no prefix; transformers saves one."""
    renamed = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
        renamed[name] = tensor
    return renamed


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config
    act = swiglu_clamped(fields["swiglu_limit"])
    common = dict(
        top_k=fields["num_experts_per_tok"], score=sqrt_softplus, renormalise=True, eps=TINY,
        scale=fields["routed_scaling_factor"],
    )
    hashed = f"{prefix}.gate.tid2eid" in disk
    names = dict(gate="w1", up="w3", down="w2", act=act)
    return Block(
        HashRouter(**common, table=disk[f"{prefix}.gate.tid2eid"])
        if hashed
        else Router(**common, select_bias=disk[f"{prefix}.gate.bias"]),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts", **names),
        shared=disk.mlp(f"{prefix}.shared_experts", **names),
    )


def record(model, family, path: str, hidden_states: torch.Tensor, extra: dict) -> Recorded:
    block = model.get_submodule(path)
    with Hooks() as hooks, torch.no_grad():
        hooks.watch("router", block.gate)
        hooks.watch("experts", block.experts)
        output = first(block(hidden_states[None], input_ids=extra["token_ids"][None].long()))[0]
    logits = first(hooks.seen["router"][1])
    _, ids, weights = hooks.seen["experts"][0][:3]
    return Recorded(logits, ids, weights, output)


def draw_token_ids(hidden_states: torch.Tensor, stream: np.random.Generator) -> dict[str, torch.Tensor]:
    ids = stream.integers(0, SMALL["vocab_size"], len(hidden_states))
    return {"token_ids": torch.from_numpy(ids.astype(np.int32))}


def distinct_experts(normal: Array) -> Array:
    """k different ids below 10 per row, random start, step 1 or 3."""
    start = (np.abs(normal[:, :1]) * 1000.0).astype(np.int64)
    step = np.where(normal[:, 1:2] > 0.0, 1, 3)
    return (start + step * np.arange(normal.shape[1])) % 10


FAMILIES = [
    Family(
        name="deepseek_v4",
        config=lambda: config(
            "DeepseekV4Config", **SMALL, hidden_size=40, moe_intermediate_size=28, num_hidden_layers=2, head_dim=8,
            q_lora_rank=8, n_routed_experts=10, num_experts_per_tok=3, routed_scaling_factor=1.5, swiglu_limit=1.25,
            num_hash_layers=1, layer_types=["sliding_attention", "sliding_attention"], hc_mult=2, o_groups=2,
            o_lora_rank=8, index_n_heads=1, index_head_dim=8, sliding_window=8,
        ),
        layers=[0, 1],
        module="model.layers.{}.mlp",
        disk="layers.{}.ffn",
        read=read,
        rewrite=release_names,
        record=record,
        extra=draw_token_ids,
        seed=1047,
        noise=2.0,
        fill={r"tid2eid$": distinct_experts},
        facts=Facts(
            fields="`n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="all; the first `num_hash_layers` route by token id (`mlp_layer_types[N]` is `hash_moe`)",
            router="sqrt(softplus) of a product in the model's type; selection bias, or ids from `tid2eid[token]`; "
            "/ (sum + 1e-20); * `routed_scaling_factor`",
            names="`layers.N.ffn.{gate.weight, gate.bias or gate.tid2eid [vocabulary, k], "
            "experts.e.{w1,w3,w2}.weight, shared_experts.{w1,w3,w2}.weight}`",
            quirks="silu(min(g, L)) * clamp(u), L = `swiglu_limit`, shared expert too; shared expert "
            "`moe_intermediate_size` wide whatever `n_shared_experts` says; a model saved by transformers 5 has the "
            "prefix `model.`",
        ),
    )
]
