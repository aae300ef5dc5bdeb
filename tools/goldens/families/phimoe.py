import dataclasses

import numpy as np

from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Array, Block, Router, softmax


@dataclasses.dataclass
class SparseMixer(Router):
    """Two rounds; each weight is a softmax over the scores near that round's maximum."""

    jitter: float = 0.01

    def select(self, logits: Array, token_ids: Array | None = None) -> Array:
        return np.argsort(-logits, axis=-1, kind="stable")[:, :2]

    def rounds(self, logits: Array, ids: Array) -> list[tuple[Array, Array]]:
        """Per round the candidate logits, -inf where removed or far from the maximum, and the choice."""
        found = []
        remaining = logits.copy()
        for choice in (ids[:, :1], ids[:, 1:]):
            best = np.take_along_axis(remaining, choice, axis=-1)
            far = (best - logits) / np.maximum(np.abs(logits), best) > 2.0 * self.jitter
            found.append((np.where(far, -np.inf, remaining), choice))
            remaining = remaining.copy()
            np.put_along_axis(remaining, choice, -np.inf, axis=-1)
        return found

    def decisions(self, logits: Array, token_ids: Array | None = None) -> Array:
        ids = self.select(logits)
        near = [np.isfinite(candidates) for candidates, _ in self.rounds(logits, ids)]
        return np.concatenate([ids, *near], axis=-1)

    def weigh(self, logits: Array, ids: Array) -> Array:
        rounds = self.rounds(logits, ids)
        return np.concatenate([np.take_along_axis(softmax(c), choice, axis=-1) for c, choice in rounds], axis=-1)


def read(disk: Disk, prefix: str) -> Block:
    return Block(
        SparseMixer(2, jitter=disk.config["router_jitter_noise"]),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts", gate="w1", up="w3", down="w2"),
    )


FAMILIES = [
    Family(
        name="phimoe",
        config=lambda: config(
            "PhimoeConfig", **SMALL, hidden_size=56, intermediate_size=36, num_hidden_layers=1, num_local_experts=10,
            num_experts_per_tok=2, router_jitter_noise=0.2, attention_bias=True, lm_head_bias=False,
        ),
        layers=[0],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.block_sparse_moe",
        read=read,
        router_path="router",
        seed=1009,
        block="routed experts",
        facts=Facts(
            fields="`num_local_experts`, `num_experts_per_tok` (2), `intermediate_size`",
            layer_rule="all",
            router="sparsemixer, two rounds: softmax over the logits within 2 * `router_jitter_noise` of the round's "
            "maximum, relative to max(abs(logit), maximum); the second without the first choice",
            names="`block_sparse_moe.gate.weight`, `block_sparse_moe.experts.e.{w1,w3,w2}.weight`",
            quirks="`router_jitter_noise` matters in inference; the two weights do not sum to 1",
        ),
    )
]
