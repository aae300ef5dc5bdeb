import numpy as np
import torch

from goldens.common import config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Array, Block, Mlp, Router, softmax
from goldens.recording import Hooks, Recorded


class NormedSoftmax(Router):
    """Softmax over all, the chosen divided by their p-norm; scale holds p."""

    def weigh(self, logits: Array, ids: Array) -> Array:
        weights = np.take_along_axis(softmax(logits), ids, axis=-1)
        return weights / np.linalg.norm(weights, ord=self.scale, axis=-1, keepdims=True)


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config["ffn_config"]
    split = lambda name: disk[f"{prefix}.experts.mlp.{name}"].reshape(
        fields["moe_num_experts"], fields["ffn_hidden_size"], -1
    )
    experts = [Mlp(up, down.T, gate) for gate, up, down in zip(split("w1"), split("v1"), split("w2"), strict=True)]
    power = fields["moe_normalize_expert_weights"]
    router = Router(fields["moe_top_k"]) if power is None else NormedSoftmax(fields["moe_top_k"], scale=power)
    return Block(router, disk[f"{prefix}.router.layer.weight"], experts)


def record(model, family, path: str, hidden_states: torch.Tensor, extra: dict) -> Recorded:
    block = model.get_submodule(path)
    with Hooks() as hooks, torch.no_grad():
        hooks.watch("router", block.router)
        hooks.watch("experts", block.experts)
        output = block(hidden_states[None])[0]
    _, ids, weights = hooks.seen["experts"][0]
    return Recorded(hooks.seen["router"][1], ids, weights, output)


def family(name: str, seed: int, power: float | None) -> Family:
    return Family(
        name=name,
        config=lambda: config(
            "DbrxConfig", d_model=56, n_heads=2, n_layers=1, max_seq_len=64, vocab_size=96,
            attn_config={"kv_n_heads": 1, "clip_qkv": None, "rope_theta": 10000.0},
            ffn_config={
                "ffn_hidden_size": 36, "moe_num_experts": 6, "moe_top_k": 3, "ffn_act_fn": {"name": "silu"},
                "moe_normalize_expert_weights": power,
            },
        ),
        layers=[0],
        module="transformer.blocks.{}.ffn",
        disk="transformer.blocks.{}.ffn",
        read=read,
        record=record,
        seed=seed,
        block="routed experts",
        facts=Facts(
            fields="`ffn_config`: `moe_num_experts`, `moe_top_k`, `ffn_hidden_size`",
            layer_rule="all",
            router="softmax over all in the model's type; / p-norm, p = `moe_normalize_expert_weights`, null: as is",
            names="`transformer.blocks.N.ffn.router.layer.weight`, `transformer.blocks.N.ffn.experts.mlp.{w1,v1,w2}`, "
            "each [E * I, H]",
            quirks="w1 gate, v1 up; w2 holds [I, H] per expert, the transpose of a down projection",
        ),
    )


FAMILIES = [family("dbrx", 1024, 2.0), family("dbrx-unnormalised", 1025, None)]
