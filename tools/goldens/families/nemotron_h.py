from goldens.common import SMALL, config, noaux_tc
from goldens.disk import Disk
from goldens.family import Facts, Family
from goldens.oracle import Block, identity, relu2


def read(disk: Disk, prefix: str) -> Block:
    network = dict(gate=None, act=relu2)
    project = lambda name: (lambda x, w=disk[f"{prefix}.{name}.weight"]: x @ w.T)
    latent = disk.config["moe_latent_size"] is not None
    return Block(
        noaux_tc(disk.config, disk[f"{prefix}.gate.e_score_correction_bias"]),
        disk[f"{prefix}.gate.weight"],
        disk.experts(f"{prefix}.experts", **network),
        shared=disk.mlp(f"{prefix}.shared_experts", **network),
        latent_in=project("fc1_latent_proj") if latent else identity,
        latent_out=project("fc2_latent_proj") if latent else identity,
    )


SIZES = SMALL | dict(
    head_dim=8, hidden_size=56, intermediate_size=44, moe_intermediate_size=36,
    moe_shared_expert_intermediate_size=45, layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
    num_hidden_layers=4, mamba_num_heads=2, mamba_head_dim=4, n_groups=1, ssm_state_size=4, chunk_size=8,
    use_mamba_kernels=False,
)


def family(name: str, seed: int, **fields) -> Family:
    return Family(
        name=name,
        config=lambda: config("NemotronHConfig", **SIZES, **fields),
        layers=[1],
        module="model.layers.{}.mixer",
        disk="backbone.layers.{}.mixer",
        read=read,
        seed=seed,
        facts=Facts(
            fields="`n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`",
            layer_rule="`layers_block_type[N]` is `moe` (E in `hybrid_override_pattern`)",
            router="as `deepseek_v3`",
            names="`backbone.layers.N.mixer.{gate.weight, gate.e_score_correction_bias, "
            "experts.e.{up,down}_proj.weight, "
            "shared_experts.{up,down}_proj.weight, fc1_latent_proj.weight, fc2_latent_proj.weight}`",
            quirks="relu(x)^2, not gated, shared expert too; `moe_latent_size`: experts between fc1 and fc2, router "
            "and "
            "shared expert on H; shared `moe_shared_expert_intermediate_size` wide",
        ),
    )


FAMILIES = [
    family(
        "nemotron_h", 1031, n_routed_experts=8, num_experts_per_tok=3, n_group=2, topk_group=1, norm_topk_prob=True,
        routed_scaling_factor=2.5, moe_latent_size=None,
    ),
    family(
        "nemotron_h-latent", 1032, n_routed_experts=12, num_experts_per_tok=5, n_group=1, topk_group=1,
        norm_topk_prob=False, routed_scaling_factor=1.5, moe_latent_size=28,
    ),
]
