from goldens.common import SMALL, config
from goldens.families.qwen3_next import read
from goldens.family import Facts, Family

FAMILIES = [
    Family(
        name="qwen2_moe",
        config=lambda: config(
            "Qwen2MoeConfig", **SMALL, hidden_size=40, intermediate_size=44, moe_intermediate_size=28,
            shared_expert_intermediate_size=36, num_hidden_layers=4, num_experts=10, num_experts_per_tok=4,
            norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[3],
        ),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read,
        seed=1081,
        block="routed experts and gated shared expert",
        facts=Facts(
            fields="`num_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="N not in `mlp_only_layers` and (N + 1) % `decoder_sparse_step` == 0",
            router="as `qwen3_next`; `norm_topk_prob` defaults to false",
            names="as `qwen3_next`",
            quirks="shared expert, `shared_expert_intermediate_size` wide, times sigmoid of its gate",
        ),
    )
]
