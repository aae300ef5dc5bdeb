from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, Router


def read(disk: Disk, prefix: str) -> Block:
    top_k = disk.config["moe_topk"]
    layer = int(prefix.split(".")[2])
    return Block(
        Router(top_k if isinstance(top_k, int) else top_k[layer], renormalise=True),
        disk[f"{prefix}.gate.wg.weight"],
        disk.experts(f"{prefix}.experts"),
        shared=disk.mlp(f"{prefix}.shared_mlp"),
    )


FAMILIES = [
    Family(
        name="hunyuan_v1_moe",
        config=lambda: config(
            "HunYuanMoEV1Config", **SMALL, head_dim=8, hidden_size=40, intermediate_size=45, num_hidden_layers=2,
            num_experts=8, moe_topk=[3, 2],
        ),
        layers=[0, 1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=1020,
        keep_float32=r"gate\.wg\.weight$",
        facts=Facts(
            fields="`num_experts`, `moe_topk` (number or list per layer), `intermediate_size`",
            layer_rule="all",
            router="f32 product (if the gate is f32); softmax over all; always / sum",
            names="`mlp.gate.wg.weight` (f32), `mlp.experts.e.{gate,up,down}_proj.weight`, "
            "`mlp.shared_mlp.{gate,up,down}_proj.weight`",
            quirks="shared MLP `intermediate_size` wide, plain add",
        ),
    )
]
