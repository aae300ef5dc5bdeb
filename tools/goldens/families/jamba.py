from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, Router


def read(disk: Disk, prefix: str) -> Block:
    return Block(
        Router(disk.config["num_experts_per_tok"]),
        disk[f"{prefix}.router.weight"],
        disk.experts(f"{prefix}.experts"),
    )


FAMILIES = [
    Family(
        name="jamba",
        config=lambda: config(
            "JambaConfig", **SMALL, hidden_size=40, intermediate_size=36, num_hidden_layers=4, num_experts=6,
            num_experts_per_tok=3, expert_layer_period=2, expert_layer_offset=1, attn_layer_period=2,
            attn_layer_offset=0, mamba_d_state=4, mamba_d_conv=2, mamba_expand=1, mamba_dt_rank=4,
            use_mamba_kernels=False,
        ),
        layers=[1, 3],
        module="model.layers.{}.feed_forward",
        disk="model.layers.{}.feed_forward",
        read=read,
        router_path="router",
        seed=1013,
        block="routed experts",
        facts=Facts(
            fields="`num_experts`, `num_experts_per_tok`, `intermediate_size`",
            layer_rule="N % `expert_layer_period` == `expert_layer_offset`",
            router="softmax over all in f32; never renormalised; weights rounded to the model's type",
            names="`feed_forward.router.weight`, `feed_forward.experts.e.{gate,up,down}_proj.weight`",
        ),
    )
]
