import torch

from goldens.common import config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Array, Block, Router
from goldens.recording import Hooks, Recorded


def relu(x: Array) -> Array:
    return x * (x > 0.0)


def read(disk: Disk, prefix: str) -> Block:
    count = disk.config["num_experts"]
    return Block(
        Router(1),
        disk[f"{prefix}.router.classifier.weight"],
        [disk.mlp(f"{prefix}.experts.expert_{e}", gate=None, up="wi", down="wo", act=relu) for e in range(count)],
    )


def record(model, family, path: str, hidden_states: torch.Tensor, extra: dict) -> Recorded:
    """The router returns its choice as a one-hot row."""
    block = model.get_submodule(path)
    with Hooks() as hooks, torch.no_grad():
        hooks.watch("router", block.router)
        output = block(hidden_states[None])[0]
    chosen, weights, logits = hooks.seen["router"][1]
    return Recorded(logits[0], chosen[0].argmax(dim=-1, keepdim=True), weights[0], output)


FAMILIES = [
    Family(
        name="switch_transformers",
        config=lambda: config(
            "SwitchTransformersConfig", vocab_size=96, d_model=40, d_kv=4, d_ff=36, num_layers=4, num_decoder_layers=1,
            num_heads=2, num_experts=6, num_sparse_encoder_layers=2, num_sparse_decoder_layers=0,
            expert_capacity=1024, relative_attention_num_buckets=8, eos_token_id=None, pad_token_id=0,
        ),
        model_class="SwitchTransformersForConditionalGeneration",
        layers=[1, 3],
        module="encoder.block.{}.layer.1.mlp",
        disk="encoder.block.{}.layer.1.mlp",
        read=read,
        record=record,
        seed=1094,
        block="routed experts, no token over the capacity",
        facts=Facts(
            fields="`num_experts`, k is 1, `d_ff`",
            layer_rule="`num_sparse_encoder_layers` evenly among `num_layers`: N % step == 1, or all if the step is 1; "
            "the decoder likewise, mixtures in layer.2",
            router="f32 product and softmax over all (`router_dtype`); top-1; not renormalised",
            names="`encoder.block.N.layer.1.mlp.router.classifier.weight`, "
            "`encoder.block.N.layer.1.mlp.experts.expert_e.{wi,wo}.weight`",
            quirks="relu, not gated; tokens beyond `expert_capacity` per expert and sequence get zero; the golden "
            "covers the encoder",
        ),
    )
]
