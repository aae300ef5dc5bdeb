from goldens.common import SMALL, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, ChosenSoftmax, LogitChoice, sigmoid


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config
    top_k = fields["num_experts_per_tok"]
    if fields["expert_selection_fn"] == "softmax":
        router = ChosenSoftmax(top_k)
    else:
        router = LogitChoice(top_k, score=sigmoid, renormalise=fields["norm_topk_prob"])
    shared, share = None, 1.0
    if fields["num_shared_experts"]:
        mlp = disk.mlp(f"{prefix}.shared_experts")
        share = 0.5 if fields["shared_expert_combination_strategy"] == "average" else 1.0
        shared = lambda x: share * mlp(x)
    return Block(
        router,
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts"),
        shared=shared,
        output_scale=share,
    )


def family(name: str, seed: int, **fields) -> Family:
    return Family(
        name=name,
        config=lambda: config(
            "Cohere2MoeConfig", **SMALL, head_dim=8, hidden_size=56, intermediate_size=20, num_hidden_layers=2,
            prefix_dense_intermediate_size=44, mlp_layer_types=["dense", "sparse"], **fields,
        ),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=seed,
        facts=Facts(
            fields="`num_experts`, `num_experts_per_tok`, `intermediate_size`",
            layer_rule="`mlp_layer_types[N]` is `sparse`; null: N >= `first_k_dense_replace`",
            router="top-k of the logits; `expert_selection_fn` `softmax`: over the chosen in f32; `sigmoid`: of each "
            "in the model's type, `norm_topk_prob`: / sum",
            names="`mlp.gate.weight`, `mlp.experts.e.{gate,up,down}_proj.weight`, `mlp.shared_experts.*_proj.weight`",
            quirks="shared expert `intermediate_size * num_shared_experts` wide; "
            "`shared_expert_combination_strategy` `average` (default): (routed + shared) / 2, `sum`: added",
        ),
    )


FAMILIES = [
    family(
        "cohere2_moe", 1039, num_experts=10, num_experts_per_tok=3, num_shared_experts=2,
        shared_expert_combination_strategy="average", expert_selection_fn="softmax",
    ),
    family(
        "cohere2_moe-sum", 1040, num_experts=8, num_experts_per_tok=4, num_shared_experts=1,
        shared_expert_combination_strategy="sum", expert_selection_fn="sigmoid", norm_topk_prob=True,
    ),
    family(
        "cohere2_moe-unnormalised", 1041, num_experts=6, num_experts_per_tok=2, num_shared_experts=0,
        expert_selection_fn="sigmoid", norm_topk_prob=False,
    ),
]
