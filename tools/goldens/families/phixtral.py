import torch
from torch.nn import functional

from goldens.disk import Disk
from goldens.family import Facts
from goldens.formula import BlockTensors, FormulaFamily, PublishedConfig, combine
from goldens.oracle import Block, ChosenSoftmax, gelu_tanh
from goldens.recording import Recorded


def read(disk: Disk, prefix: str) -> Block:
    return Block(
        ChosenSoftmax(disk.config["num_experts_per_tok"]),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.mlp", gate=None, up="fc1", down="fc2", act=gelu_tanh),
    )


def evaluate(tensors: BlockTensors, block: str, fields: dict, x: torch.Tensor, extra: dict) -> Recorded:
    logits = tensors.linear(f"{block}.gate", x)
    best, ids = logits.topk(fields["num_experts_per_tok"])
    weights = torch.softmax(best, dim=-1, dtype=torch.float32)

    def expert(e: int, rows: torch.Tensor) -> torch.Tensor:
        inner = functional.gelu(tensors.linear(f"{block}.mlp.{e}.fc1", rows), approximate="tanh")
        return tensors.linear(f"{block}.mlp.{e}.fc2", inner)

    return Recorded(logits, ids, weights, combine(x, ids, weights, expert))


def shapes(fields: dict) -> dict:
    hidden, count = fields["n_embd"], fields["num_local_experts"]
    inner = fields["n_inner"] or 4 * hidden
    found = {}
    for layer in range(fields["n_layer"]):
        block = f"transformer.h.{layer}.moe"
        found[f"{block}.gate.weight"] = (count, hidden)
        for e in range(count):
            found |= {f"{block}.mlp.{e}.fc1.weight": (inner, hidden), f"{block}.mlp.{e}.fc1.bias": (inner,)}
            found |= {f"{block}.mlp.{e}.fc2.weight": (hidden, inner), f"{block}.mlp.{e}.fc2.bias": (hidden,)}
    return found


CONFIG = dict(
    architectures=["PhiForCausalLM"], model_type="phi-msft", activation_function="gelu_new", vocab_size=96,
    n_positions=64, n_embd=40, n_head=2, n_head_kv=None, n_inner=None, n_layer=1, rotary_dim=8, num_local_experts=4,
    num_experts_per_tok=2, layer_norm_epsilon=1e-05, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.1, flash_attn=False,
    flash_rotary=False, fused_dense=False, img_processor=None, tie_word_embeddings=False, torch_dtype="bfloat16",
)


def family(name: str, seed: int, **fields) -> FormulaFamily:
    return FormulaFamily(
        name=name,
        config=lambda: PublishedConfig(CONFIG | fields, CONFIG["n_embd"]),
        layers=[0],
        module="transformer.h.{}.moe",
        disk="transformer.h.{}.moe",
        read=read,
        shapes=shapes,
        evaluate=evaluate,
        experts_path="mlp",
        seed=seed,
        block="routed experts",
        facts=Facts(
            fields="`num_local_experts`, `num_experts_per_tok`, `n_inner` (null: 4 `n_embd`)",
            layer_rule="all; the type without `num_local_experts` is a dense model",
            router="top-k of the logits; softmax over the chosen in f32",
            names="`transformer.h.N.moe.gate.weight`, `transformer.h.N.moe.mlp.e.{fc1,fc2}.{weight,bias}`",
            quirks="phixtral; no gate: fc2(gelu_tanh(fc1(x))) with both biases; H is `n_embd`",
        ),
    )


FAMILIES = [
    family("phixtral", 2010),
    family("phixtral-inner", 2011, n_inner=36, num_local_experts=6, num_experts_per_tok=1),
]
