from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, ChosenSoftmax, swiglu_oai


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config
    return Block(
        ChosenSoftmax(fields["num_experts_per_tok"]),
        disk[f"{prefix}.router.weight"],
        disk.stacked(
            f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj", columns=True, interleaved=True,
            act=swiglu_oai(fields["swiglu_alpha"], fields["swiglu_limit"]),
        ),
        router_bias=disk[f"{prefix}.router.bias"],
    )


FAMILIES = [
    Family(
        name="gpt_oss",
        config=lambda: config(
            "GptOssConfig", **SMALL, head_dim=8, hidden_size=56, intermediate_size=36, num_hidden_layers=2,
            num_local_experts=6, num_experts_per_tok=4, swiglu_limit=1.25, swiglu_alpha=1.5,
        ),
        layers=[0, 1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        router_path="router",
        seed=1002,
        fill={r"mlp\..*bias$": lambda normal: 0.5 * normal},
        block="routed experts",
        facts=Facts(
            fields="`num_local_experts`, `num_experts_per_tok`, `intermediate_size`",
            layer_rule="all",
            router="product with bias; top-k of the logits; softmax over the chosen, in the model's type",
            names="`mlp.router.{weight,bias}`, `mlp.experts.gate_up_proj` [E, H, 2I], `mlp.experts.down_proj` "
            "[E, I, H], `..._bias`",
            quirks="gate and up columns interleaved; (u + 1) * g * sigmoid(`swiglu_alpha` g), g <= `swiglu_limit`, "
            "u clamped on both sides; the release stores MXFP4 as `..._blocks` and `..._scales`, not transposed",
        ),
    )
]
