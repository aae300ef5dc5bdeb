from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.families.granitemoe import FIELDS, ROUTER, record_with_shared
from goldens.family import Facts, Family
from goldens.oracle import Block, ChosenSoftmax


def read(disk: Disk, prefix: str) -> Block:
    shared = prefix.removesuffix("block_sparse_moe") + "shared_mlp"
    return Block(
        ChosenSoftmax(disk.config["num_experts_per_tok"]),
        disk[f"{prefix}.router.weight"],
        disk.stacked(f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj"),
        shared=disk.fused_mlp(f"{shared}.input_linear.weight", f"{shared}.output_linear.weight"),
    )


FAMILIES = [
    Family(
        name="granitemoe_swa",
        config=lambda: config(
            "GraniteMoeSWAConfig", **SMALL, hidden_size=40, intermediate_size=28, num_local_experts=8,
            num_experts_per_tok=3, num_hidden_layers=1, shared_intermediate_size=36,
        ),
        layers=[0],
        module="model.layers.{}.block_sparse_moe",
        disk="model.layers.{}.block_sparse_moe",
        read=read,
        record=record_with_shared,
        router_path="router",
        seed=1089,
        block="routed experts and the layer's shared MLP",
        facts=Facts(
            FIELDS, "all", ROUTER,
            "`block_sparse_moe.router.weight`, `block_sparse_moe.experts.gate_up_proj` [E, 2I, H], "
            "`block_sparse_moe.experts.down_proj` [E, H, I]; `shared_mlp.{input,output}_linear.weight`",
            "as `granitemoeshared` otherwise",
        ),
    )
]
