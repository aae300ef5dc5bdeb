import dataclasses

from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, ChosenSoftmax, swiglu_oai


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config
    top_k = fields["num_experts_per_tok"]
    return Block(
        dataclasses.replace(ChosenSoftmax(top_k), scale=1.0 / top_k),
        disk[f"{prefix}.router.weight"],
        disk.stacked(
            f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj", columns=True,
            act=swiglu_oai(fields["swiglu_alpha"], fields["swiglu_limit"]),
        ),
        router_bias=disk[f"{prefix}.router.bias"],
        output_scale=top_k,
    )


SIZES = SMALL | {"pad_token_id": 0}

FAMILIES = [
    Family(
        name="openai_privacy_filter",
        config=lambda: config(
            "OpenAIPrivacyFilterConfig", **SIZES, head_dim=8, hidden_size=40, intermediate_size=28,
            num_hidden_layers=1, num_local_experts=8, num_experts_per_tok=3, swiglu_limit=1.25, swiglu_alpha=1.5,
        ),
        model_class="OpenAIPrivacyFilterForTokenClassification",
        layers=[0],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        router_path="router",
        seed=1090,
        fill={r"mlp\..*bias$": lambda normal: 0.5 * normal},
        block="routed experts",
        facts=Facts(
            fields="`num_local_experts`, `num_experts_per_tok`, `intermediate_size`",
            layer_rule="all",
            router="f32 product with bias; top-k of the logits; softmax over the chosen, / k",
            names="as `gpt_oss`",
            quirks="as `gpt_oss`, but gate half before up half; the routed sum is multiplied by k",
        ),
    )
]
