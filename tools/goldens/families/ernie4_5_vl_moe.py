import torch

from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, Router
from goldens.recording import Hooks, Recorded


def read_half(disk: Disk, prefix: str, vision: bool) -> Block:
    """Text tokens use the first half of the experts, vision tokens the second, each with its own gate."""
    fields = disk.config["text_config"]
    count = fields["moe_num_experts"]
    first = count if vision else 0
    gate = "gate.weight_1" if vision else "gate.weight"
    bias = disk[f"{prefix}.moe_statics.e_score_correction_bias"][int(vision)]
    return Block(
        Router(fields["moe_k"], select_bias=bias, renormalise=True, min_sum=fields["moe_norm_min"]),
        disk[f"{prefix}.{gate}"].T,
        [disk.mlp(f"{prefix}.experts.{e}") for e in range(first, first + count)],
        shared=disk.mlp(f"{prefix}.shared_experts"),
    )


def record_half(vision: bool):
    def record(model, family, path: str, hidden_states: torch.Tensor, extra: dict) -> Recorded:
        block = model.get_submodule(path)
        half = block.vision_moe if vision else block.text_moe
        kinds = torch.full((1, len(hidden_states)), int(vision), dtype=torch.int32)
        with Hooks() as hooks, torch.no_grad():
            hooks.watch("router", half.gate)
            hooks.watch("experts", half.experts)
            output, _ = block(hidden_states[None], moe_mm_token_type_ids=kinds)
        _, ids, weights = hooks.seen["experts"][0][:3]
        return Recorded(hooks.seen["router"][1][0], ids, weights, output[0])

    return record


TEXT = SMALL | dict(
    hidden_size=40, intermediate_size=44, moe_intermediate_size=[28, 20], num_hidden_layers=2, moe_num_experts=6,
    moe_k=3, moe_num_shared_experts=2, moe_norm_min=0.95, mlp_layer_types=["dense", "sparse"],
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 4]},
)
VISION = dict(depth=1, hidden_size=8, num_heads=2, patch_size=2, spatial_merge_size=1, intermediate_size=8,
              temporal_merge_size=1)


def family(name: str, vision: bool, seed: int) -> Family:
    other = "gate.weight" if vision else "gate.weight_1"
    unread = range(0, 6) if vision else range(6, 12)
    return Family(
        name=name,
        config=lambda: config("Ernie4_5_VLMoeConfig", text_config=TEXT, vision_config=VISION, tie_word_embeddings=True),
        model_class="Ernie4_5_VLMoeForConditionalGeneration",
        layers=[1],
        module="model.language_model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=lambda disk, prefix: read_half(disk, prefix, vision),
        record=record_half(vision),
        experts_path="text_moe",
        seed=seed,
        keep_float32=r"(e_score_correction_bias|moe\.gate\.weight)$",
        fill={r"e_score_correction_bias$": lambda normal: 0.04 * normal},
        unread=(f".{other}", *(f".experts.{e}." for e in unread)),
        block=f"routed experts of {'vision' if vision else 'text'} tokens and shared experts",
        facts=Facts(
            fields="`text_config`: `moe_num_experts` for text and again for vision, `moe_k`, "
            "`moe_intermediate_size` [2]",
            layer_rule="`mlp_layer_types[N]` is `sparse`; releases: as `ernie4_5_moe` with lists",
            router="as `ernie4_5_moe`",
            names="`mlp.gate.weight` and `mlp.gate.weight_1` [H, E], `mlp.moe_statics.e_score_correction_bias` [2, E], "
            "`mlp.experts.e.{gate,up,down}_proj.weight`, `mlp.shared_experts.*_proj.weight`",
            quirks="text tokens: gate.weight, bias row 0, experts 0 to E - 1; vision tokens: gate.weight_1, bias "
            "row 1, "
            "experts E to 2E - 1; gates transposed; shared expert for both, `moe_intermediate_size[0] * "
            "moe_num_shared_experts` wide",
        ),
    )


FAMILIES = [
    family("ernie4_5_vl_moe", False, 1071),
    family("ernie4_5_vl_moe-vision", True, 1072),
]
