from goldens.common import config
from goldens.families.granitemoe import FIELDS, NAMES, ROUTER, SHARED_NAMES, SIZES, read, record_with_shared
from goldens.family import Facts, Family

FAMILIES = [
    Family(
        name="granitemoehybrid",
        config=lambda: config(
            "GraniteMoeHybridConfig", **SIZES | {"num_local_experts": 8, "num_experts_per_tok": 4, "hidden_size": 40},
            num_hidden_layers=2, shared_intermediate_size=20, layer_types=["linear_attention", "full_attention"],
            mamba_n_heads=2, mamba_d_head=40, mamba_d_state=4, mamba_chunk_size=8,
        ),
        layers=[0, 1],
        module="model.layers.{}.block_sparse_moe",
        disk="model.layers.{}.block_sparse_moe",
        read=read,
        record=record_with_shared,
        router_path="router",
        seed=1012,
        block="routed experts and the layer's shared MLP",
        facts=Facts(
            FIELDS, "all; none if `num_local_experts` is 0", ROUTER, NAMES + SHARED_NAMES,
            "shared MLP in every layer, `shared_intermediate_size` wide; `residual_multiplier` is applied outside",
        ),
    )
]
