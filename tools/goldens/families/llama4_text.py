import torch

from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, LogitChoice, sigmoid
from goldens.recording import Hooks, Recorded


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config.get("text_config", disk.config)
    return Block(
        LogitChoice(fields["num_experts_per_tok"], score=sigmoid),
        disk[f"{prefix}.router.weight"],
        disk.stacked(f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj", columns=True),
        shared=disk.mlp(f"{prefix}.shared_expert"),
        weight_on_input=True,
    )


def record(model, family, path: str, hidden_states: torch.Tensor, extra: dict) -> Recorded:
    """The router returns a dense score matrix, zero where not chosen."""
    block = model.get_submodule(path)
    with Hooks() as hooks, torch.no_grad():
        hooks.watch("router", block.router)
        output, _ = block(hidden_states[None])
    scores, logits = hooks.seen["router"][1]
    weights, ids = scores.topk(block.top_k, dim=1)
    return Recorded(logits, ids, weights, output)


TEXT = SMALL | dict(
    head_dim=8, hidden_size=56, intermediate_size=36, intermediate_size_mlp=44, num_hidden_layers=2,
    num_local_experts=6, num_experts_per_tok=1, interleave_moe_layer_step=2,
)
VISION = dict(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vision_output_dim=8, image_size=4,
    patch_size=2, projector_input_dim=8, projector_output_dim=8, pixel_shuffle_ratio=0.5,
)
FACTS = Facts(
    fields="`num_local_experts`, `num_experts_per_tok`, `intermediate_size`; in `text_config` for `llama4`",
    layer_rule="N in `moe_layers`; null: (N + 1) % `interleave_moe_layer_step` == 0",
    router="top-k of the logits; weight is their sigmoid in f32, rounded to the model's type",
    names="`language_model.model.layers.N.feed_forward.{router.weight, experts.gate_up_proj [E, H, 2I], "
    "experts.down_proj [E, I, H], shared_expert.*_proj.weight}`; text only: prefix `model.`",
    quirks="the weight multiplies the expert's input; gate half first; shared expert `intermediate_size` wide, "
    "dense layers `intermediate_size_mlp`",
)

FAMILIES = [
    Family(
        name="llama4_text",
        config=lambda: config("Llama4TextConfig", **TEXT | {"num_local_experts": 10, "hidden_size": 40}),
        layers=[1],
        module="model.layers.{}.feed_forward",
        disk="model.layers.{}.feed_forward",
        read=read,
        record=record,
        seed=1014,
        facts=FACTS,
    ),
    Family(
        name="llama4_text-two",
        config=lambda: config("Llama4TextConfig", **TEXT | {"num_experts_per_tok": 2, "hidden_size": 48}),
        layers=[1],
        module="model.layers.{}.feed_forward",
        disk="model.layers.{}.feed_forward",
        read=read,
        record=record,
        seed=1111,
        facts=FACTS,
    ),
    Family(
        name="llama4",
        config=lambda: config("Llama4Config", text_config=TEXT, vision_config=VISION, tie_word_embeddings=True),
        model_class="Llama4ForConditionalGeneration",
        layers=[1],
        module="language_model.model.layers.{}.feed_forward",
        disk="language_model.model.layers.{}.feed_forward",
        read=read,
        record=record,
        seed=1015,
        facts=FACTS,
    ),
]
