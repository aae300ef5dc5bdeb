import torch

from goldens.common import noaux_tc
from goldens.disk import Disk
from goldens.family import Facts
from goldens.formula import BlockTensors, FormulaFamily, PublishedConfig, combine, expert_shapes, gated_shapes
from goldens.oracle import Block, Router
from goldens.recording import Recorded


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config
    if fields.get("score_function") == "sigmoid":
        router = noaux_tc(fields, disk[f"{prefix}.gate.expert_bias"])
    else:
        router = Router(fields["num_experts_per_tok"], renormalise=fields["norm_topk_prob"])
    return Block(
        router,
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts"),
        shared=disk.mlp(f"{prefix}.shared_experts"),
    )


def softmax_route(logits: torch.Tensor, fields: dict) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(fields["num_experts_per_tok"])
    return (weights / weights.sum(dim=-1, keepdim=True) if fields["norm_topk_prob"] else weights), ids


def sigmoid_route(logits: torch.Tensor, bias: torch.Tensor, fields: dict) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.sigmoid(logits)
    groups = (scores + bias).view(len(logits), fields["n_group"], -1)
    best = groups.topk(2, dim=-1).values.sum(dim=-1).topk(fields["topk_group"]).indices
    kept = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter_(1, best, True)
    biased = groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    ids = biased.topk(fields["num_experts_per_tok"]).indices
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * fields["routed_scaling_factor"], ids


def evaluate(tensors: BlockTensors, block: str, fields: dict, x: torch.Tensor, extra: dict) -> Recorded:
    if fields.get("score_function") == "sigmoid":
        logits = x.float() @ tensors[f"{block}.gate.weight"].float().T
        weights, ids = sigmoid_route(logits, tensors[f"{block}.gate.expert_bias"].float(), fields)
    else:
        logits = tensors.linear(f"{block}.gate", x)
        weights, ids = softmax_route(logits, fields)
    out = combine(x, ids, weights, lambda e, rows: tensors.mlp(f"{block}.experts.{e}", rows))
    return Recorded(logits, ids, weights, out + tensors.mlp(f"{block}.shared_experts", x))


def shapes(fields: dict) -> dict:
    hidden, count = fields["hidden_size"], fields["num_experts"]
    inner, first = fields["moe_intermediate_size"], fields["first_k_dense_replace"]
    shared = fields.get("moe_shared_expert_intermediate_size", inner) * fields["num_shared_experts"]
    block = f"model.layers.{first}.mlp"
    bias = {f"{block}.gate.expert_bias": (count,)} if fields.get("moe_router_enable_expert_bias") else {}
    dense = gated_shapes("model.layers.0.mlp", fields["intermediate_size"], hidden) if first else {}
    return (
        dense
        | {f"{block}.gate.weight": (count, hidden)}
        | bias
        | expert_shapes(f"{block}.experts", count, inner, hidden)
        | gated_shapes(f"{block}.shared_experts", shared, hidden)
    )


COMMON = dict(
    vocab_size=96, hidden_size=56, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
    hidden_act="silu", rms_norm_eps=1e-06, rope_theta=600000.0, rope_scaling=None, tie_word_embeddings=False,
    use_bias=False, use_qkv_bias=False, embedding_dropout=0.0, output_dropout=0.0, norm_head=False, norm_softmax=False,
    norm_topk_prob=True, torch_dtype="bfloat16",
)
V1 = COMMON | dict(
    architectures=["BailingMoeForCausalLM"], model_type="bailing_moe", num_hidden_layers=1, first_k_dense_replace=0,
    intermediate_size=20, moe_intermediate_size=20, num_experts=10, num_experts_per_tok=3, num_shared_experts=2,
)
V2 = COMMON | dict(
    architectures=["BailingMoeV2ForCausalLM"], model_type="bailing_moe_v2", num_hidden_layers=2,
    first_k_dense_replace=1, intermediate_size=44, moe_intermediate_size=20, moe_shared_expert_intermediate_size=28,
    num_experts=12, num_experts_per_tok=4, num_shared_experts=1, n_group=4, topk_group=2, routed_scaling_factor=2.5,
    score_function="sigmoid", moe_router_enable_expert_bias=True, router_dtype="fp32", use_qk_norm=True,
    num_nextn_predict_layers=0, use_rmsnorm=True, head_dim=28, partial_rotary_factor=0.5,
)
NAMES = (
    "`mlp.gate.weight`, `mlp.experts.e.{gate,up,down}_proj.weight`, `mlp.shared_experts.{gate,up,down}_proj.weight`"
)
SIGMOID = (
    "f32 product; sigmoid; selection bias; `n_group` groups scored by their two best, `topk_group` kept, others -inf; "
    "/ (sum + 1e-20); * `routed_scaling_factor`"
)
FIELDS = "`num_experts`, `num_experts_per_tok`, `moe_intermediate_size`"
FACTS_V1 = Facts(
    fields=FIELDS,
    layer_rule="N >= `first_k_dense_replace`",
    router="softmax over all in f32; `norm_topk_prob`: / sum; with `score_function` `sigmoid` as `bailing_moe_v2`",
    names=NAMES,
    quirks="shared expert is `moe_intermediate_size * num_shared_experts` wide; releases of the second generation "
    "have this type as well",
)
FACTS_V2 = Facts(
    fields=FIELDS,
    layer_rule="N >= `first_k_dense_replace`",
    router=SIGMOID,
    names=f"{NAMES}, `mlp.gate.expert_bias`",
    quirks="shared expert is `moe_shared_expert_intermediate_size * num_shared_experts` wide; "
    "`moe_router_enable_expert_bias` false: no bias; layers from `num_hidden_layers` on are MTP",
)


def family(name: str, seed: int, fields: dict, facts: Facts) -> FormulaFamily:
    return FormulaFamily(
        name=name,
        config=lambda: PublishedConfig(fields, fields["hidden_size"]),
        layers=[fields["first_k_dense_replace"]],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        shapes=shapes,
        evaluate=evaluate,
        seed=seed,
        facts=facts,
    )


FAMILIES = [
    family("bailing_moe", 2003, V1, FACTS_V1),
    family("bailing_moe-unnormalised", 2004, V1 | {"norm_topk_prob": False}, FACTS_V1),
    family("bailing_moe-sigmoid", 2005, V2 | {"model_type": "bailing_moe"}, FACTS_V1),
    family("bailing_moe_v2", 2006, V2, FACTS_V2),
]
