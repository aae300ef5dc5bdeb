import torch

from goldens.common import SMALL_MLA, config, noaux_tc
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block
from goldens.recording import Hooks, Recorded, record_block


def read(disk: Disk, prefix: str) -> Block:
    return Block(
        noaux_tc(disk.config, 0.0),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts"),
        shared=disk.mlp(f"{prefix}.shared_experts"),
    )


def record(model, family, path: str, hidden_states: torch.Tensor, extra: dict) -> Recorded:
    """The block's module ends with a norm that lies outside of the block on disk; the output is its input."""
    with Hooks() as hooks:
        hooks.watch("norm", model.get_submodule(path).post_mlp_layernorm)
        recorded = record_block(model, family, path, hidden_states, extra)
    recorded.output = hooks.seen["norm"][0][0].reshape(hidden_states.shape)
    return recorded


def without_bias(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers gives the router a zero bias that releases do not have."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("e_score_correction_bias")}


FAMILIES = [
    Family(
        name="axk1",
        config=lambda: config(
            "AXK1Config", **SMALL_MLA, hidden_size=40, intermediate_size=44, moe_intermediate_size=20,
            num_hidden_layers=2, n_routed_experts=12, num_experts_per_tok=4, n_shared_experts=1, n_group=4,
            topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
        ),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        record=record,
        rewrite=without_bias,
        fill={r"e_score_correction_bias$": lambda values: 0.0 * values},
        seed=2024,
        block="routed experts and shared experts, before `post_mlp_layernorm`",
        facts=Facts(
            fields="`n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="`mlp_layer_types[N]` is `sparse`; null: N >= `first_k_dense_replace` and N % `moe_layer_freq` "
            "== 0",
            router="as `deepseek_v3` without a selection bias",
            names="`mlp.gate.weight`, `mlp.experts.e.{gate,up,down}_proj.weight`, `mlp.shared_experts.*_proj.weight`",
            quirks="shared expert is `moe_intermediate_size * n_shared_experts` wide; an RMS norm, "
            "`post_mlp_layernorm`, of the block's output is outside the block",
        ),
    )
]
