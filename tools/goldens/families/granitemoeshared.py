from goldens.common import config
from goldens.families.granitemoe import FIELDS, NAMES, ROUTER, SHARED_NAMES, SIZES, read, record_with_shared
from goldens.family import Facts, Family

FAMILIES = [
    Family(
        name="granitemoeshared",
        config=lambda: config(
            "GraniteMoeSharedConfig", **SIZES | {"num_local_experts": 6, "num_experts_per_tok": 2},
            num_hidden_layers=1, shared_intermediate_size=44,
        ),
        layers=[0],
        module="model.layers.{}.block_sparse_moe",
        disk="model.layers.{}.block_sparse_moe",
        read=read,
        record=record_with_shared,
        router_path="router",
        seed=1011,
        block="routed experts and the layer's shared MLP",
        facts=Facts(
            FIELDS, "all", ROUTER, NAMES + SHARED_NAMES,
            "shared MLP `shared_intermediate_size` wide, none if 0; `residual_multiplier` is applied outside",
        ),
    )
]
