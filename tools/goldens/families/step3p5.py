import torch
from torch.nn import functional

from goldens.disk import Disk
from goldens.families.step3p7 import limited
from goldens.family import Facts
from goldens.formula import BlockTensors, FormulaFamily, PublishedConfig, combine, gated_shapes
from goldens.oracle import TINY, Block, Mlp, Router, sigmoid
from goldens.recording import Recorded


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config
    above = prefix.removesuffix(".moe")
    layer = int(above.rpartition(".")[2])
    gate, up, down = (disk[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    act = limited(fields["swiglu_limits"], layer)
    return Block(
        Router(
            fields["moe_top_k"], sigmoid, select_bias=disk[f"{prefix}.router_bias"],
            renormalise=fields["norm_expert_weight"], eps=TINY, scale=fields["moe_router_scaling_factor"],
        ),
        disk[f"{prefix}.gate.weight"],
        [Mlp(u, d, g, act=act) for g, u, d in zip(gate, up, down, strict=True)],
        shared=disk.mlp(f"{above}.share_expert", act=limited(fields["swiglu_limits_shared"], layer)),
    )


def clamped(limit: float | None):
    def act(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if not limit:
            return functional.silu(gate) * up
        return functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)

    return act


def evaluate(tensors: BlockTensors, block: str, fields: dict, x: torch.Tensor, extra: dict) -> Recorded:
    logits = x.float() @ tensors[f"{block}.gate.weight"].float().T
    scores = torch.sigmoid(logits)
    ids = (scores + tensors[f"{block}.router_bias"].float()).topk(fields["moe_top_k"]).indices
    weights = scores.gather(1, ids)
    if fields["norm_expert_weight"]:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    weights = weights * fields["moe_router_scaling_factor"]
    gate, up, down = (tensors[f"{block}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    act = clamped(fields["swiglu_limits"][tensors.layer])

    def expert(e: int, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(act(functional.linear(rows, gate[e]), functional.linear(rows, up[e])), down[e])

    shared = tensors.mlp("share_expert", x, act=clamped(fields["swiglu_limits_shared"][tensors.layer]))
    return Recorded(logits, ids, weights, combine(x, ids, weights, expert) + shared)


def shapes(fields: dict) -> dict:
    hidden, count, inner = fields["hidden_size"], fields["moe_num_experts"], fields["moe_intermediate_size"]
    found = gated_shapes("model.layers.0.mlp", fields["intermediate_size"], hidden)
    for layer in map(int, fields["moe_layers_enum"].split(",")):
        block = f"model.layers.{layer}.moe"
        found |= {f"{block}.gate.weight": (count, hidden), f"{block}.router_bias": (count,)}
        found |= {f"{block}.{name}_proj.weight": (count, inner, hidden) for name in ("gate", "up")}
        found |= {f"{block}.down_proj.weight": (count, hidden, inner)}
        found |= gated_shapes(f"model.layers.{layer}.share_expert", fields["share_expert_dim"], hidden)
    return found


CONFIG = dict(
    architectures=["Step3p5ForCausalLM"], model_type="step3p5", vocab_size=96, hidden_size=40, intermediate_size=44,
    num_hidden_layers=3, num_attention_heads=2, num_attention_groups=1, head_dim=8, max_position_embeddings=64,
    rms_norm_eps=1e-05, rope_theta=10000.0, moe_num_experts=10, moe_top_k=3, moe_intermediate_size=20,
    share_expert_dim=28, moe_layers_enum="1,2", moe_every_n_layer=1, moe_router_activation="sigmoid",
    moe_router_scaling_factor=3.0, use_moe_router_bias=True, need_fp32_gate=True, norm_expert_weight=True,
    swiglu_limits=[0.0, 0.0, 0.5, 0.0], swiglu_limits_shared=[0.0, 0.0, 0.75, 0.0], num_nextn_predict_layers=1,
    tie_word_embeddings=False, torch_dtype="bfloat16",
)

FAMILIES = [
    FormulaFamily(
        name="step3p5",
        config=lambda: PublishedConfig(CONFIG, CONFIG["hidden_size"]),
        layers=[1, 2],
        module="model.layers.{}.moe",
        disk="model.layers.{}.moe",
        read=read,
        shapes=shapes,
        evaluate=evaluate,
        experts_path="gate",
        keep_float32=r"(router_bias|moe\.gate\.weight)$",
        seed=2013,
        facts=Facts(
            fields="`moe_num_experts`, `moe_top_k`, `moe_intermediate_size`",
            layer_rule="N in `moe_layers_enum` (\"3,4,...\")",
            router="f32 product; sigmoid; selection bias; `norm_expert_weight`: / (sum + 1e-20); * "
            "`moe_router_scaling_factor`",
            names="`moe.gate.weight`, `moe.router_bias`, `moe.{gate,up}_proj.weight` [E, I, H], `moe.down_proj.weight` "
            "[E, H, I], `share_expert.{gate,up,down}_proj.weight` (beside `moe`)",
            quirks="min(silu(g), L) * clamp(u), L = `swiglu_limits[N]`, shared expert `swiglu_limits_shared[N]`; 0 or "
            "null: no limit; lists have entries for MTP layers too; shared expert `share_expert_dim` wide",
        ),
    )
]
