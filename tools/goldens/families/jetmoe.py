import torch

from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, ChosenSoftmax
from goldens.recording import Hooks, Recorded


def read(disk: Disk, prefix: str) -> Block:
    return Block(
        ChosenSoftmax(disk.config["num_experts_per_tok"]),
        disk[f"{prefix}.router.layer.weight"],
        disk.stacked(f"{prefix}.input_linear.weight", f"{prefix}.output_linear.weight"),
        output_bias=disk[f"{prefix}.bias"],
    )


def record(model, family, path: str, hidden_states: torch.Tensor, extra: dict) -> Recorded:
    """The router returns its choices sorted by expert; this puts them back into slots."""
    block = model.get_submodule(path)
    with Hooks() as hooks, torch.no_grad():
        hooks.watch("router", block.router)
        output = block(hidden_states[None])[0]
    order, _, sorted_weights, counts, logits = hooks.seen["router"][1]
    slots = (len(hidden_states), block.router.top_k)
    ids = torch.empty_like(order).scatter_(0, order, torch.repeat_interleave(torch.tensor(counts)))
    weights = torch.empty_like(sorted_weights).scatter_(0, order, sorted_weights)
    return Recorded(logits, ids.view(slots), weights.view(slots), output)


SIZES = {key: value for key, value in SMALL.items() if key != "num_attention_heads"}

FAMILIES = [
    Family(
        name="jetmoe",
        config=lambda: config(
            "JetMoeConfig", **SIZES, kv_channels=4, hidden_size=40, intermediate_size=36, num_hidden_layers=1,
            num_local_experts=8, num_experts_per_tok=3,
        ),
        layers=[0],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        record=record,
        experts_path="input_linear",
        seed=1023,
        block="routed experts and output bias",
        facts=Facts(
            fields="`num_local_experts`, `num_experts_per_tok`, `intermediate_size`",
            layer_rule="all",
            router="product widened to f32; top-k of the logits; softmax over the chosen, rounded to the model's type",
            names="`mlp.router.layer.weight`, `mlp.input_linear.weight` [E, 2I, H], `mlp.output_linear.weight` "
            "[E, H, I], `mlp.bias` [H]",
            quirks="`mlp.bias` is added once after the sum; the attention is a mixture as well "
            "(`self_attention.experts`), not of this block",
        ),
    )
]
