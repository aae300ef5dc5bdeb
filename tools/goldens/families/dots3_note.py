from goldens.common import SMALL_MLA, config, read_deepseek_v3
from goldens.family import Facts, Family

FAMILIES = [
    Family(
        name="dots3_note_text",
        config=lambda: config(
            "Dots3NoteTextConfig", **SMALL_MLA, hidden_size=40, intermediate_size=44, moe_intermediate_size=20,
            num_hidden_layers=2, n_routed_experts=12, num_experts_per_tok=4, n_shared_experts=2, n_group=4,
            topk_group=2, shared_experts_intermediate_size=12, index_head_dim=8, index_n_heads=1,
            routed_scaling_factor=1.5,
        ),
        layers=[1],
        module="model.layers.{}.mlp",
        disk="model.layers.{}.mlp",
        read=read_deepseek_v3,
        seed=2033,
        facts=Facts(
            fields="`n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`; at the top level also where "
            "the "
            "type is `dots3_note`",
            layer_rule="`mlp_layer_types[N]` is `sparse`; null: N >= `first_k_dense_replace` and N % `moe_layer_freq` "
            "== 0",
            router="as `deepseek_v3`",
            names="as `deepseek_v3`",
            quirks="shared expert is `shared_experts_intermediate_size * n_shared_experts` wide; the vision encoder's "
            "own experts are not covered",
        ),
    )
]
