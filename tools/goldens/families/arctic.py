import dataclasses
from collections.abc import Callable

import torch

from goldens.disk import Disk
from goldens.family import Facts
from goldens.formula import BlockTensors, FormulaFamily, PublishedConfig, combine, expert_shapes, gated_shapes
from goldens.oracle import Array, Block, Router
from goldens.recording import Recorded

NAMES = ("w1", "w3", "w2")  # gate, up, down
LAYERS = "model.layers"


@dataclasses.dataclass
class ResidualBlock(Block):
    """y = experts(x) + mlp(r), r another norm of another point of the layer."""

    residual_mlp: Callable[[Array], Array] | None = None

    def output(self, x: Array, ids: Array, weights: Array, logits: Array, extra: dict[str, Array]) -> Array:
        return super().output(x, ids, weights, logits, extra) + self.residual_mlp(extra["residual_input"])


def read(disk: Disk, prefix: str) -> Block:
    top_k = disk.config["num_experts_per_tok"]
    layer = prefix.rpartition(".")[0]
    return ResidualBlock(
        Router(top_k, renormalise=top_k > 1),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts", gate="w1", up="w3", down="w2"),
        residual_mlp=disk.mlp(f"{layer}.residual_mlp", gate="w1", up="w3", down="w2"),
    )


def evaluate(tensors: BlockTensors, block: str, fields: dict, x: torch.Tensor, extra: dict) -> Recorded:
    logits = tensors.linear(f"{block}.gate", x)
    weights, ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(fields["num_experts_per_tok"])
    if fields["num_experts_per_tok"] > 1:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    out = combine(x, ids, weights, lambda e, rows: tensors.mlp(f"{block}.experts.{e}", rows, NAMES))
    return Recorded(logits, ids, weights, out + tensors.mlp("residual_mlp", extra["residual_input"], NAMES))


def shapes(fields: dict) -> dict:
    hidden, inner = fields["hidden_size"], fields["intermediate_size"]
    block = f"{LAYERS}.1.block_sparse_moe"
    return (
        gated_shapes(f"{LAYERS}.0.block_sparse_moe.mlp", inner, hidden, NAMES)
        | {f"{block}.gate.weight": (fields["num_local_experts"], hidden)}
        | expert_shapes(f"{block}.experts", fields["num_local_experts"], inner, hidden, names=NAMES)
        | gated_shapes(f"{LAYERS}.1.residual_mlp", hidden, hidden, NAMES)
        | {f"{LAYERS}.1.residual_layernorm.weight": (hidden,), f"{LAYERS}.1.post_attention_layernorm.weight": (hidden,)}
    )


def side_inputs(x: torch.Tensor, stream) -> dict[str, torch.Tensor]:
    return {"residual_input": torch.from_numpy(stream.standard_normal(x.shape)).float()}


CONFIG = dict(
    architectures=["ArcticForCausalLM"], model_type="arctic", vocab_size=96, hidden_size=56, intermediate_size=36,
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, hidden_act="silu", max_position_embeddings=64,
    max_sequence_length=64, rms_norm_eps=1e-05, rope_theta=10000.0, num_local_experts=10, num_experts_per_tok=2,
    moe_layer_frequency=2, parallel_attn_mlp_res=True, use_residual=True, moe_token_dropping=False,
    moe_train_capacity_factor=1, moe_eval_capacity_factor=1, moe_min_capacity=0, router_aux_loss_coef=0.001,
    enable_expert_tensor_parallelism=False, tie_word_embeddings=False, torch_dtype="bfloat16",
)

FAMILIES = [
    FormulaFamily(
        name="arctic",
        config=lambda: PublishedConfig(CONFIG, CONFIG["hidden_size"]),
        layers=[1],
        module="model.layers.{}.block_sparse_moe",
        disk="model.layers.{}.block_sparse_moe",
        read=read,
        shapes=shapes,
        evaluate=evaluate,
        extra=side_inputs,
        seed=2002,
        block="routed experts and the residual MLP of `residual_input`, which is after `residual_layernorm`",
        facts=Facts(
            fields="`num_local_experts`, `num_experts_per_tok`, `intermediate_size`",
            layer_rule="(N + 1) % `moe_layer_frequency` == 0",
            router="softmax over all in f32; top-k; / sum where k > 1",
            names="`block_sparse_moe.gate.weight`, `block_sparse_moe.experts.e.{w1,w3,w2}.weight`, "
            "`residual_mlp.{w1,w3,w2}.weight`; dense layers `block_sparse_moe.mlp.{w1,w3,w2}.weight`",
            quirks="`use_residual`: a dense MLP, H wide inside, runs beside the experts; it reads "
            "`residual_layernorm` of the layer after attention, the experts `post_attention_layernorm` of the layer's "
            "input",
        ),
    )
]
