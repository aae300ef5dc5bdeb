from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, ChosenSoftmax


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config.get("text_config", disk.config)
    return Block(
        ChosenSoftmax(fields["moe_topk"]),
        disk[f"{prefix}.router.weight"],
        disk.stacked(f"{prefix}.experts.fc1.weight", f"{prefix}.experts.fc2.weight", columns=True),
        shared=disk.mlp(f"{prefix}.shared_experts"),
    )


TEXT = SMALL | dict(
    head_dim=8, hidden_size=56, intermediate_size=36, num_hidden_layers=1, moe_num_experts=6, moe_topk=3,
    moe_num_shared_experts=2, pad_token_id=0,
)
VISION = dict(
    model_type="idefics3_vision", hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
    image_size=4, patch_size=2,
)
FACTS = Facts(
    fields="`moe_num_experts`, `moe_topk`, `intermediate_size`; in `text_config` for `aria`",
    layer_rule="all",
    router="top-k of the logits; softmax over the chosen, in the model's type",
    names="`language_model.model.layers.N.mlp.{router.weight, experts.fc1.weight [E, H, 2I], experts.fc2.weight "
    "[E, I, H], shared_experts.{gate,up,down}_proj.weight}`; text only: prefix `model.`",
    quirks="expert tensors transposed on disk, gate half first; shared expert `intermediate_size * "
    "moe_num_shared_experts` wide",
)

FAMILIES = [
    Family(
        name="aria",
        config=lambda: config(
            "AriaConfig", text_config=TEXT, vision_config=VISION, projector_patch_to_query_dict={4: 2},
            image_token_index=9, tie_word_embeddings=True,
        ),
        model_class="AriaForConditionalGeneration",
        layers=[0],
        module="model.language_model.layers.{}.mlp",
        disk="language_model.model.layers.{}.mlp",
        read=read,
        router_path="router",
        seed=1026,
        facts=FACTS,
    ),
    Family(
        name="aria_text",
        config=lambda: config("AriaTextConfig", **TEXT | {"moe_topk": 2, "hidden_size": 40, "intermediate_size": 28}),
        model_class="AriaTextForCausalLM",
        layers=[0],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        router_path="router",
        seed=1027,
        facts=FACTS,
    ),
]
