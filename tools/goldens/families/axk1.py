import dataclasses

import numpy as np

from goldens.common import SMALL_MLA, config, read_deepseek_v3
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Array, Block


@dataclasses.dataclass
class NormedBlock(Block):
    """The block's sum goes through an RMS norm."""

    norm_weight: Array | float = 1.0
    norm_eps: float = 0.0

    def output(self, x: Array, ids: Array, weights: Array, logits: Array, extra: dict) -> Array:
        out = super().output(x, ids, weights, logits, extra)
        return out / np.sqrt(np.mean(out**2, axis=-1, keepdims=True) + self.norm_eps) * self.norm_weight


def read(disk: Disk, prefix: str) -> Block:
    norm = disk[prefix.removesuffix("mlp") + "post_mlp_layernorm.weight"]
    block = read_deepseek_v3(disk, prefix)
    return NormedBlock(**vars(block), norm_weight=norm, norm_eps=disk.config["rms_norm_eps"])


FAMILIES = [
    Family(
        name="axk1",
        config=lambda: config(
            "AXK1Config", **SMALL_MLA, hidden_size=40, intermediate_size=44, moe_intermediate_size=28,
            num_hidden_layers=2, n_routed_experts=12, num_experts_per_tok=3, n_shared_experts=1, n_group=3,
            topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5, mlp_layer_types=["dense", "sparse"],
        ),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=1066,
        block="routed experts, shared expert and the RMS norm of their sum",
        facts=Facts(
            fields="`n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="`mlp_layer_types[N]` is `sparse`; releases: N >= `first_k_dense_replace`",
            router="as `deepseek_v3`",
            names="as `deepseek_v3`; `post_mlp_layernorm.weight` beside `mlp`",
            quirks="routed + shared goes through the RMS norm `post_mlp_layernorm`",
        ),
    )
]
