import dataclasses

import numpy as np
import torch

from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Array, Block, Mlp, Router, sigmoid, softmax
from goldens.recording import Recorded, record_block


@dataclasses.dataclass
class SinkRouter(Router):
    """The last logits are the shared experts': always chosen, and part of every softmax."""

    shared_count: int = 1

    def choice_scores(self, logits: Array) -> Array:
        return sigmoid(logits[:, : -self.shared_count]) + self.select_bias

    def weigh_all(self, logits: Array, ids: Array) -> Array:
        """[T, k + S]: softmax of the log sigmoids of the chosen and the shared logits."""
        chosen = np.take_along_axis(logits, ids, axis=-1)
        chosen = np.concatenate([chosen, logits[:, -self.shared_count :]], axis=-1)
        return softmax(-np.logaddexp(0.0, -chosen)) * self.scale

    def weigh(self, logits: Array, ids: Array) -> Array:
        return self.weigh_all(logits, ids)[:, : self.top_k]


@dataclasses.dataclass
class SinkBlock(Block):
    shared_experts: list[Mlp] = dataclasses.field(default_factory=list)

    def output(self, x: Array, ids: Array, weights: Array, logits: Array, extra: dict) -> Array:
        out = self.routed(x, ids, weights)
        shared = self.router.weigh_all(logits, ids)[:, self.router.top_k :]
        return out + sum(shared[:, s, None] * mlp(x) for s, mlp in enumerate(self.shared_experts))


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config["text_config"]
    shared = f"{prefix}.shared_experts.shared"
    return SinkBlock(
        SinkRouter(
            fields["num_experts_per_tok"], select_bias=disk[f"{prefix}.gate.bias"],
            scale=fields["route_scale"] * disk[f"{prefix}.gate.global_scale"][0],
            shared_count=fields["n_shared_experts"],
        ),
        disk[f"{prefix}.gate.weight"],
        disk.stacked(f"{prefix}.experts.w13_weight", f"{prefix}.experts.w2_weight", interleaved=True),
        shared_experts=disk.stacked(f"{shared}_w13_weight", f"{shared}_w2_weight", interleaved=True),
    )


def record(model, family, path: str, hidden_states: torch.Tensor, extra: dict) -> Recorded:
    """The router returns the routed logits only; the golden keeps those of the shared experts too."""
    recorded = record_block(model, family, path, hidden_states, extra)
    with torch.no_grad():
        weight = model.get_submodule(path).gate.weight
        product = torch.nn.functional.linear(hidden_states.float(), weight.float())
    return dataclasses.replace(recorded, logits=product)


TEXT = SMALL | dict(
    head_dim=8, swa_num_attention_heads=2, swa_num_key_value_heads=1, swa_head_dim=8, hidden_size=40,
    intermediate_size=44, moe_intermediate_size=28, num_hidden_layers=2, n_routed_experts=10, num_experts_per_tok=3,
    n_shared_experts=2, route_scale=2.5, d_rel=4, rel_extent=8, conv_kernel_size=2, sliding_window_size=8,
    mlp_layer_types=["dense", "sparse"], layer_types=["hybrid_sliding", "hybrid"],
)
AUDIO = dict(n_mel_bins=2, mel_vocab_size=4, text_hidden_size=40)
VISION = dict(text_hidden_size=40, patch_size=2, temporal_patch_size=2, hidden_size=8, num_hidden_layers=1)

FAMILIES = [
    Family(
        name="inkling_mm_model",
        config=lambda: config(
            "InklingConfig", text_config=TEXT, audio_config=AUDIO, vision_config=VISION, tie_word_embeddings=False,
        ),
        model_class="InklingForConditionalGeneration",
        layers=[1],
        module="model.language_model.layers.{}.mlp",
        disk="model.llm.layers.{}.mlp",
        read=read,
        record=record,
        seed=1046,
        block="routed experts and weighted shared experts",
        fill={r"global_scale$": lambda normal: 1.0 + 0.3 * normal},
        facts=Facts(
            fields="`text_config`: `n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`; "
            "`n_shared_experts`",
            layer_rule="`mlp_layer_types[N]` is `sparse`; null: N >= `dense_mlp_idx`",
            router="f32 product of E + S rows; sigmoid; selection bias; weights: softmax over log sigmoid of the k "
            "chosen "
            "and the S shared logits, * `route_scale` * `gate.global_scale`, rounded to the model's type",
            names="`model.llm.layers.N.mlp.{gate.weight [E + S, H], gate.bias [E], gate.global_scale [1], "
            "experts.w13_weight [E, 2I, H], experts.w2_weight [E, H, I], shared_experts.shared_w13_weight, "
            "shared_experts.shared_w2_weight}`",
            quirks="w13 rows interleaved gate, up; the last S weights multiply the shared experts",
        ),
    )
]
