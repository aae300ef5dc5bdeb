from goldens.common import SMALL_MLA, config
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import TINY, Block, Router


def read(disk: Disk, prefix: str) -> Block:
    fields = disk.config
    return Block(
        Router(
            fields["num_experts_per_tok"], n_group=fields["n_group"], topk_group=fields["topk_group"],
            renormalise=fields["norm_topk_prob"], eps=TINY, scale=fields["routed_scaling_factor"],
        ),
        disk[f"{prefix}.gate.weight"],
        disk.stacked(f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj"),
        shared=disk.mlp(f"{prefix}.shared_experts"),
    )


FAMILIES = [
    Family(
        name="mistral4",
        model_class="Mistral4ForCausalLM",
        config=lambda: config(
            "Mistral4Config", **SMALL_MLA, hidden_size=56, intermediate_size=44, moe_intermediate_size=36,
            num_hidden_layers=2, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, n_group=4, topk_group=2,
            norm_topk_prob=True, routed_scaling_factor=1.5, first_k_dense_replace=1,
        ),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=1037,
        facts=Facts(
            fields="`n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="N >= `first_k_dense_replace`",
            router="product and softmax over all in the model's type; `n_group` groups scored by their two best, "
            "others 0; `norm_topk_prob`: / (sum + 1e-20); * `routed_scaling_factor`",
            names="`mlp.gate.weight`, `mlp.experts.gate_up_proj` [E, 2I, H], `mlp.experts.down_proj` [E, H, I], "
            "`mlp.shared_experts.*_proj.weight`",
            quirks="no selection bias; shared expert is `moe_intermediate_size * n_shared_experts` wide",
        ),
    )
]
