import torch

from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, ChosenSoftmax
from goldens.recording import Recorded, record_block

SIZES = SMALL | dict(hidden_size=56, intermediate_size=36, num_local_experts=10, num_experts_per_tok=3)
ROUTER = "product widened to f32; top-k of the logits; softmax over the chosen, rounded to the model's type"
NAMES = (
    "`block_sparse_moe.router.layer.weight`, `block_sparse_moe.input_linear.weight` [E, 2I, H], "
    "`block_sparse_moe.output_linear.weight` [E, H, I]"
)
SHARED_NAMES = "; `shared_mlp.input_linear.weight` [2Is, H], `shared_mlp.output_linear.weight` [H, Is]"
FIELDS = "`num_local_experts`, `num_experts_per_tok`, `intermediate_size`"


def read(disk: Disk, prefix: str) -> Block:
    shared = prefix.removesuffix("block_sparse_moe") + "shared_mlp"
    names = (f"{shared}.input_linear.weight", f"{shared}.output_linear.weight")
    return Block(
        ChosenSoftmax(disk.config["num_experts_per_tok"]),
        disk[f"{prefix}.router.layer.weight"],
        disk.stacked(f"{prefix}.input_linear.weight", f"{prefix}.output_linear.weight"),
        shared=disk.fused_mlp(names[0], names[1]) if names[0] in disk else None,
    )


def record_with_shared(model, family, path: str, hidden_states: torch.Tensor, extra: dict) -> Recorded:
    """The decoder layer adds the shared MLP of the same input to the block's output."""
    recorded = record_block(model, family, path, hidden_states, extra)
    layer = model.get_submodule(path.rpartition(".")[0])
    with torch.no_grad():
        recorded.output = recorded.output + layer.shared_mlp(hidden_states)
    return recorded


FAMILIES = [
    Family(
        name="granitemoe",
        config=lambda: config("GraniteMoeConfig", **SIZES, num_hidden_layers=1, residual_multiplier=0.5),
        layers=[0],
        module="model.layers.{}.block_sparse_moe",
        disk="model.layers.{}.block_sparse_moe",
        read=read,
        router_path="router",
        seed=1010,
        block="routed experts",
        facts=Facts(FIELDS, "all", ROUTER, NAMES, "`residual_multiplier` is applied outside the block"),
    )
]
