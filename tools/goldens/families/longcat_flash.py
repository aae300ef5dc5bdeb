from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, Router


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config
    experts = [disk.mlp(f"{prefix}.experts.{e}") for e in range(fields["n_routed_experts"])]
    return Block(
        Router(
            fields["moe_topk"], select_bias=disk[f"{prefix}.router.e_score_correction_bias"],
            scale=fields["routed_scaling_factor"],
        ),
        disk[f"{prefix}.router.classifier.weight"],
        experts,
    )


SIZES = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"} | dict(
    q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, head_dim=4, v_head_dim=4,
)

FAMILIES = [
    Family(
        name="longcat_flash",
        config=lambda: config(
            "LongcatFlashConfig", **SIZES, hidden_size=40, ffn_hidden_size=20, expert_ffn_hidden_size=36, num_layers=1,
            n_routed_experts=8, zero_expert_num=4, moe_topk=4, routed_scaling_factor=2.5,
        ),
        layers=[0],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        unread=tuple(f".experts.{e}." for e in range(8, 12)),  # saved by transformers, used by nothing
        router_path="router",
        seed=1030,
        block="routed and identity experts",
        fill={r"e_score_correction_bias$": lambda normal: 0.04 * normal},
        facts=Facts(
            fields="`n_routed_experts` + `zero_expert_num`, `moe_topk`, `expert_ffn_hidden_size`",
            layer_rule="all",
            router="f32 product; softmax over all E + Z; selection bias; not renormalised; * `routed_scaling_factor`",
            names="`mlp.router.classifier.weight` [E + Z, H], `mlp.router.e_score_correction_bias`, "
            "`mlp.experts.e.{gate,up,down}_proj.weight`",
            quirks="ids from E on are identity experts, for which transformers saves unused gate and up "
            "projections; the block runs beside the second attention",
        ),
    )
]
