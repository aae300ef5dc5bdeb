import copy
import dataclasses

from goldens.common import config
from goldens.disk import Disk
from goldens.families import nemotron_h
from goldens.family import Family
from goldens.oracle import Block

TEXT = nemotron_h.SIZES | dict(
    model_type="nemotron_h", hidden_size=40, n_routed_experts=10, num_experts_per_tok=3, n_group=1, topk_group=1,
    norm_topk_prob=True, routed_scaling_factor=2.5, moe_latent_size=28,
)
VISION = dict(
    hidden_size=8, num_hidden_layers=1, num_attention_heads=2, mlp_ratio=1.0, patch_size=4, image_size=8,
    max_img_size=8, num_registers=1, num_cls_tokens=1, video_temporal_patch_size=2,
)


def read(disk: Disk, prefix: str) -> Block:
    text = copy.copy(disk)
    text.config = disk.config["text_config"]
    return nemotron_h.read(text, prefix)


FACTS = nemotron_h.FAMILIES[0].facts

FAMILIES = [
    Family(
        name="nemotron_h_omni",
        config=lambda: config(
            "NemotronH_Omni_Reasoning_V3_Config", text_config=TEXT, vision_config=VISION, audio_config=None,
            projector_hidden_size=8, vision_hidden_size=8,
        ),
        auto_class="AutoModelForImageTextToText",
        layers=[1],
        module="language_model.model.layers.{}.mixer",
        disk="language_model.backbone.layers.{}.mixer",
        read=read,
        seed=2041,
        facts=dataclasses.replace(
            FACTS,
            fields=f"`text_config` (`llm_config` in releases): {FACTS.fields}",
            names=FACTS.names.replace("`backbone.", "`language_model.backbone."),
        ),
    )
]
