"""Configurations, activations, builders and maps by vLLM's names."""

from __future__ import annotations

import inspect

import numpy
import pytest

import conclave
from conclave import vllm
from conclave.errors import ConclaveTypeError, ConclaveUnsupportedError, ConclaveValueError
from conclave.vllm.quant import FP8

SCALE = numpy.ones(2, dtype="float32")
SHAPE = vllm.GroupShape


@pytest.mark.parametrize(
    ("flags", "rows", "columns"),
    [
        ({}, SHAPE.PER_TENSOR, None),
        ({"per_act_token_quant": True}, SHAPE.PER_TOKEN, None),
        ({"per_out_ch_quant": True}, SHAPE.PER_TENSOR, SHAPE.PER_TOKEN),
        (
            {"per_act_token_quant": True, "per_out_ch_quant": True},
            SHAPE.PER_TOKEN,
            SHAPE.PER_TOKEN,
        ),
        ({"block_shape": [128, 128]}, SHAPE(128, 128), SHAPE(128, 128)),
    ],
)
def test_flags_come_back(flags, rows, columns):
    config = conclave.fp8_w8a8_moe_quant_config(SCALE, SCALE, **flags)
    assert (config._a1.shape, config._w2.shape) == (rows, columns)
    assert config.per_act_token_quant == config.is_per_act_token
    assert config.per_act_token_quant == flags.get("per_act_token_quant", False)
    assert config.per_out_ch_quant == flags.get("per_out_ch_quant", False)
    assert config.block_shape == flags.get("block_shape")
    assert config.is_block_quantized == ("block_shape" in flags)
    assert config.use_fp8_w8a8 and config.is_quantized and config.unsupported_reason is None
    assert config.config_name("bfloat16") == "fp8_w8a8"


@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        ({}, (1, 1)),
        ({"per_act_token_quant": True}, (7, 1)),
        ({"block_shape": [128, 128]}, (7, 3)),
    ],
)
def test_shapes_of_row_scales(flags, shape):
    config = conclave.fp8_w8a8_moe_quant_config(SCALE, SCALE, **flags)
    assert config.scale_shape(7, 300) == shape
    assert config.batched_scale_shape(4, 7, 300) == (4, *shape)
    assert vllm.FUSED_MOE_UNQUANTIZED_CONFIG.scale_shape(7, 300) is None
    assert vllm.FUSED_MOE_UNQUANTIZED_CONFIG.batched_scale_shape(4, 7, 300) is None


@pytest.mark.parametrize("flag", ["per_act_token_quant", "per_out_ch_quant"])
def test_blocks_exclude_the_other_flags(flag):
    with pytest.raises(ConclaveValueError, match="block_shape"):
        conclave.fp8_w8a8_moe_quant_config(SCALE, SCALE, block_shape=[128, 128], **{flag: True})


def test_unknown_types_are_refused():
    with pytest.raises(ConclaveTypeError, match="quant_dtype"):
        conclave.FusedMoEQuantConfig.make("mxfp5")
    with pytest.raises(ConclaveValueError, match="quant_dtype"):
        conclave.ocp_mx_moe_quant_config("nvfp4", SCALE, SCALE)
    with pytest.raises(ConclaveValueError, match="weight_bits"):
        vllm.gptq_marlin_moe_quant_config(SCALE, SCALE, 3, 128)


def other_formats():
    two, four = (SCALE, SCALE), (SCALE, SCALE, SCALE, SCALE)
    return {
        "int8_w8a8": vllm.int8_w8a8_moe_quant_config(*two, per_act_token_quant=True),
        "int8_w8a16": vllm.int8_w8a16_moe_quant_config(*two, None, None, [0, 64]),
        "int4_w4a16": vllm.int4_w4a16_moe_quant_config(*four, [0, 64]),
        "int4_w4afp8": vllm.int4_w4afp8_moe_quant_config(*four),
        "gptq": vllm.gptq_marlin_moe_quant_config(*two, 4, 128),
        "mxfp4_w4a16": vllm.mxfp4_w4a16_moe_quant_config(*two),
        "mxfp4_mxfp8": vllm.mxfp4_mxfp8_moe_quant_config(*two),
        "mxfp4_w4a8": vllm.mxfp4_w4a8_moe_quant_config(*two),
        "ocp_mx": vllm.ocp_mx_moe_quant_config("mxfp6_e3m2", *two, "mxfp4"),
        "nvfp4": vllm.nvfp4_moe_quant_config(*four, *two),
        "nvfp4_w4a16": vllm.nvfp4_w4a16_moe_quant_config(*four),
    }


@pytest.mark.parametrize("name", other_formats())
def test_every_builder_makes_what_runs(name):
    config = other_formats()[name]
    assert config.unsupported_reason is None
    assert not config.rows_stay_plain


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"quant_dtype": "nvfp4", "weight_dtype": "mxfp4"}, "nvfp4 multiply no weights of mxfp4"),
        ({"quant_dtype": "int8", "weight_dtype": "mxfp4"}, "int8 multiply no weights of mxfp4"),
        ({"quant_dtype": "int8", "weight_dtype": FP8}, "int8 multiply no weights of float8"),
        ({"weight_dtype": "mxfp4", "w1_zp": SCALE, "w2_zp": SCALE}, "integers"),
        ({"quant_dtype": "int8", "w1_zp": SCALE, "w2_zp": SCALE}, "rows stay"),
        ({"weight_dtype": "int4", "w1_zp": SCALE}, "w1_zp and w2_zp"),
        ({"weight_dtype": "mxfp4", "w1_scale": object(), "w2_scale": SCALE}, "w1_precision"),
        ({"weight_dtype": "mxfp4", "w2_scale": object(), "w1_scale": SCALE}, "w2_precision"),
        (
            {"quant_dtype": "int8", "weight_dtype": "int4", "block_shape": [1, 64]},
            "rows of int4 have a scale each",
        ),
    ],
)
def test_what_does_not_run_says_why(arguments, reason):
    config = conclave.FusedMoEQuantConfig.make(**arguments)
    assert reason in config.unsupported_reason
    weights = numpy.zeros((2, 8, 8), dtype="float32")
    with pytest.raises(ConclaveUnsupportedError) as caught:
        conclave.fused_experts(
            numpy.zeros((1, 8), dtype="float32"),
            weights,
            weights[:, :, :4],
            numpy.ones((1, 1), dtype="float32"),
            numpy.zeros((1, 1), dtype="int32"),
            quant_config=config,
        )
    assert reason in str(caught.value)


def test_what_formats_say_of_themselves():
    found = other_formats()
    assert found["int8_w8a8"].use_int8_w8a8 and not found["int8_w8a8"].use_int8_w8a16
    assert found["int8_w8a16"].use_int8_w8a16
    assert found["int8_w8a16"].config_name("bfloat16") == "int8_w8a16"
    assert found["int4_w4a16"].use_int4_w4a16 and found["int4_w4a16"].w1_zp is SCALE
    assert found["int4_w4a16"].config_name("bfloat16") == "int4_w4a16"
    assert found["mxfp4_w4a16"].use_mxfp4_w4a16
    assert found["mxfp4_w4a16"].ocp_mx_scheme == "w_mxfp4"
    assert found["mxfp4_w4a8"].ocp_mx_scheme is None  # rows of a real dtype
    assert found["mxfp4_mxfp8"].ocp_mx_scheme is None
    assert found["ocp_mx"].ocp_mx_scheme == "w_mxfp4_a_mxfp6_e3m2"
    assert found["nvfp4"].use_nvfp4_w4a4 and found["nvfp4"].ocp_mx_scheme is None
    assert found["nvfp4_w4a16"].use_nvfp4_w4a16
    assert vllm.FUSED_MOE_UNQUANTIZED_CONFIG.config_name("float32") == "float32"
    assert vllm.FUSED_MOE_UNQUANTIZED_CONFIG.config_name("bfloat16") is None


# Names of OCP schemes: the only pairs of weights and rows that there are.
OCP_SCHEMES = {
    ("mxfp4", None): "w_mxfp4",
    ("mxfp4", "mxfp4"): "w_mxfp4_a_mxfp4",
    ("mxfp4", "mxfp6_e3m2"): "w_mxfp4_a_mxfp6_e3m2",
    ("mxfp4", "mxfp6_e2m3"): "w_mxfp4_a_mxfp6_e2m3",
    ("mxfp6_e3m2", None): "w_mxfp6_e3m2",
    ("mxfp6_e3m2", "mxfp6_e3m2"): "w_mxfp6_e3m2_a_mxfp6_e3m2",
    ("mxfp6_e2m3", None): "w_mxfp6_e2m3",
    ("mxfp6_e2m3", "mxfp6_e2m3"): "w_mxfp6_e2m3_a_mxfp6_e2m3",
}
OCP_ROWS = (None, "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8", "nvfp4", "float8_e4m3fn")


@pytest.mark.parametrize("rows", OCP_ROWS)
@pytest.mark.parametrize("weights", ["mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8", "nvfp4"])
def test_ocp_schemes_are_those_that_there_are(weights, rows):
    descriptors = [vllm.FusedMoEQuantDesc(dtype) for dtype in (rows, rows, weights, weights)]
    config = conclave.FusedMoEQuantConfig(*descriptors)
    assert config.ocp_mx_scheme == OCP_SCHEMES.get((weights, rows))


def test_flags_of_fp8_are_given_by_name():
    """By position the fifth argument is another one in each version of vLLM."""
    with pytest.raises(TypeError, match="positional"):
        vllm.fp8_w8a8_moe_quant_config(SCALE, SCALE, None, None, True)
    config = vllm.fp8_w8a8_moe_quant_config(SCALE, SCALE, None, None, per_act_token_quant=True)
    assert config.per_act_token_quant and config.w1_bias is None


def test_precision_objects_are_told_from_scales():
    class PrecisionConfig:
        pass

    precision = PrecisionConfig()
    config = vllm.mxfp4_w4a16_moe_quant_config(precision, SCALE)
    assert config.w1_precision is precision and config.w2_precision is None
    assert vllm.FUSED_MOE_UNQUANTIZED_CONFIG.w1_precision is None


@pytest.mark.parametrize("rows", [FP8, "int8"])
def test_rows_in_groups_of_any_width_run(rows):
    config = conclave.FusedMoEQuantConfig.make(rows, block_shape=[64, 32])
    assert config.unsupported_reason is None and not config.rows_stay_plain


# Parallel configurations: the examples in vLLM's documentation of `make`.

EXAMPLES = [
    # tp, dp, ep?, tp_rank, dp_rank -> tp_size, tp_rank, dp_size, dp_rank, ep_size, ep_rank
    ((2, 1, False, 0, 0), (2, 0, 1, 0, 1, 0)),
    ((2, 1, False, 1, 0), (2, 1, 1, 0, 1, 0)),
    ((1, 2, False, 0, 0), (2, 0, 2, 0, 1, 0)),
    ((1, 2, False, 0, 1), (2, 1, 2, 1, 1, 0)),
    ((2, 2, False, 0, 0), (4, 0, 2, 0, 1, 0)),
    ((2, 2, False, 1, 0), (4, 1, 2, 0, 1, 0)),
    ((2, 2, False, 0, 1), (4, 2, 2, 1, 1, 0)),
    ((2, 2, False, 1, 1), (4, 3, 2, 1, 1, 0)),
    ((2, 1, True, 0, 0), (1, 0, 1, 0, 2, 0)),
    ((2, 1, True, 1, 0), (1, 0, 1, 0, 2, 1)),
    ((1, 2, True, 0, 0), (1, 0, 2, 0, 2, 0)),
    ((1, 2, True, 0, 1), (1, 0, 2, 1, 2, 1)),
    ((2, 2, True, 0, 0), (1, 0, 2, 0, 4, 0)),
    ((2, 2, True, 1, 0), (1, 0, 2, 0, 4, 1)),
    ((2, 2, True, 0, 1), (1, 0, 2, 1, 4, 2)),
    ((2, 2, True, 1, 1), (1, 0, 2, 1, 4, 3)),
    ((1, 1, True, 0, 0), (1, 0, 1, 0, 1, 0)),
]


class EngineConfig:
    def __init__(self, enable_expert_parallel, data_parallel_rank):
        self.enable_expert_parallel = enable_expert_parallel
        self.data_parallel_rank = data_parallel_rank
        self.all2all_backend = "deepep_low_latency"


@pytest.mark.parametrize(("groups", "expected"), EXAMPLES)
def test_parallel_config_examples(groups, expected):
    tp, dp, expert_parallel, tp_rank, dp_rank = groups
    engine = EngineConfig(expert_parallel, dp_rank)
    config = conclave.FusedMoEParallelConfig.make(tp, dp, engine, tp_rank=tp_rank)
    found = (config.tp_size, config.tp_rank, config.dp_size, config.dp_rank)
    assert (*found, config.ep_size, config.ep_rank) == expected
    assert config.use_ep == (expert_parallel and tp * dp > 1)
    assert config.use_all2all_kernels == (config.use_ep and dp > 1)
    assert config.use_deepep_ll_kernels == config.use_all2all_kernels
    assert not config.use_pplx_kernels and not config.use_deepep_ht_kernels


@pytest.mark.parametrize("axis", ["tp_size", "dp_size", "pcp_size", "sp_size"])
def test_tokens_change_ranks_where_experts_do_and_tokens_are_split(axis):
    sizes = {axis: 2, "ep_size": 2}
    split = conclave.FusedMoEParallelConfig(use_ep=True, **sizes)
    assert split.use_all2all_kernels == (axis != "tp_size")
    assert not conclave.FusedMoEParallelConfig(**sizes).use_all2all_kernels


def test_parallel_config_checks_ranks():
    with pytest.raises(ConclaveValueError, match="ep_rank"):
        conclave.FusedMoEParallelConfig(ep_size=2, ep_rank=2)
    with pytest.raises(ConclaveValueError, match="tp_size"):
        conclave.FusedMoEParallelConfig(tp_size=0)


def test_moe_config_delegates():
    split = conclave.FusedMoEParallelConfig.make(2, 2, EngineConfig(True, 1), tp_rank=1)
    config = conclave.FusedMoEConfig(8, 2, 64, 2, split, "bfloat16")
    assert (config.ep_size, config.ep_rank, config.tp_size, config.use_ep) == (4, 3, 1, True)
    assert config.is_act_and_mul and config.max_num_tokens == 256
    with pytest.raises(ConclaveValueError, match="max_num_tokens"):
        conclave.FusedMoEConfig(8, 2, 64, 2, split, "bfloat16", max_num_tokens=0)
    with pytest.raises(ConclaveUnsupportedError, match="moe_backend"):
        conclave.FusedMoEConfig(8, 2, 64, 2, split, "bfloat16", moe_backend="triton")


def test_moe_config_takes_the_older_keywords():
    """Those that vLLM's class FusedMoE gives."""
    split = conclave.FusedMoEParallelConfig(tp_size=2, tp_rank=1)
    more = {"moe_parallel_config": split, "in_dtype": "bfloat16", "num_local_experts": 8}
    config = conclave.FusedMoEConfig(
        num_experts=8,
        experts_per_token=2,
        hidden_dim=64,
        intermediate_size_per_partition=20,
        num_logical_experts=8,
        moe_backend="auto",
        router_logits_dtype=None,
        max_num_tokens=256,
        has_bias=False,
        is_act_and_mul=False,
        is_lora_enabled=False,
        activation="silu",
        device="cpu",
        routing_method=vllm.RoutingMethodType.Default,
        disable_inplace=True,
        **more,
    )
    assert (config.intermediate_size, config.intermediate_size_per_partition) == (40, 20)
    assert config.activation is vllm.MoEActivation.SILU_NO_MUL and config.is_act_and_mul is False
    assert not config.use_flashinfer_cutlass_kernels and not config.use_mori_kernels
    newer = conclave.FusedMoEConfig(8, 2, 64, intermediate_size=40, **more)
    assert newer.intermediate_size_per_partition == 20 and newer.is_act_and_mul
    with pytest.raises(ConclaveValueError, match="intermediate_size_per_partition"):
        conclave.FusedMoEConfig(
            8, 2, 64, intermediate_size=40, intermediate_size_per_partition=40, **more
        )
    with pytest.raises(ConclaveValueError, match="is_act_and_mul"):
        conclave.FusedMoEConfig(8, 2, 64, activation="silu_no_mul", is_act_and_mul=True, **more)


def test_all2all_backends_by_name():
    for backend, name in (
        ("flashinfer_all2allv", "use_fi_all2allv_kernels"),
        ("flashinfer_all2allv", "use_fi_nvl_two_sided_kernels"),
        ("flashinfer_nvlink_two_sided", "use_fi_nvl_two_sided_kernels"),
        ("flashinfer_nvlink_one_sided", "use_fi_nvl_one_sided_kernels"),
        ("mori", "use_mori_kernels"),
        ("allgather_reducescatter", "use_ag_rs_all2all_kernels"),
        ("nixl_ep", "use_nixl_ep_kernels"),
        ("nixl_ep", "needs_round_robin_routing_tables"),
        ("deepep_low_latency", "needs_round_robin_routing_tables"),
        ("deepep_v2", "use_deepep_v2_kernels"),
    ):
        config = conclave.FusedMoEParallelConfig(
            ep_size=2, dp_size=2, use_ep=True, all2all_backend=backend
        )
        assert getattr(config, name)
        assert getattr(conclave.FusedMoEConfig(8, 2, 64, 4, config, "bfloat16"), name)
        assert not getattr(conclave.FusedMoEParallelConfig(all2all_backend=backend), name)


# Placement: vLLM's test_expert_placement.py.

PLACEMENTS = [(2, e) for e in (4, 8, 9, 16, 17)] + [(4, e) for e in (8, 16, 18, 32, 33)]


@pytest.mark.parametrize(("world", "experts"), PLACEMENTS)
@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
def test_expert_maps(world, experts, strategy):
    seen = []
    base, rest = divmod(experts, world)
    for rank in range(world):
        count, expert_map, mask = vllm.determine_expert_map(
            world, rank, experts, strategy, return_expert_mask=True
        )
        assert count == base + (rank < rest)
        held = [e for e in range(experts) if int(expert_map[e]) >= 0]
        start = rank * base + min(rank, rest)
        linear = list(range(start, start + count))
        assert held == (linear if strategy == "linear" else list(range(rank, experts, world)))
        assert [int(expert_map[e]) for e in held] == list(range(count))
        assert [int(m) for m in mask] == [int(e in held) for e in range(experts)] + [0]
        pairs = ", ".join(f"{i}->{e}" for i, e in enumerate(held))
        assert vllm.get_compressed_expert_map(expert_map) == pairs
        seen += held
    assert sorted(seen) == list(range(experts))


def test_placement_strategies():
    choose = vllm.determine_expert_placement_strategy
    low = conclave.FusedMoEParallelConfig(
        ep_size=4, dp_size=2, use_ep=True, all2all_backend="deepep_low_latency"
    )
    other = conclave.FusedMoEParallelConfig(ep_size=4, dp_size=2, use_ep=True)
    assert choose("round_robin", low, 4, 0, False) == "round_robin"
    for arguments in ((low, None, 0, False), (low, 1, 0, False), (low, 4, 2, False)):
        with pytest.warns(UserWarning, match="round_robin"):
            assert choose("round_robin", *arguments) == "linear"
    for arguments in ((low, 4, 0, True), (other, 4, 0, False)):
        with pytest.warns(UserWarning, match="round_robin"):
            assert choose("round_robin", *arguments) == "linear"
    assert choose("linear", other, None, 0, False) == "linear"


@pytest.mark.parametrize(("world", "experts"), PLACEMENTS)
def test_round_robin_tables(world, experts):
    for rank in range(world):
        count = vllm.determine_expert_map(world, rank, experts, "round_robin")[0]
        to_physical, to_global, local = vllm.ensure_round_robin_expert_routing_tables(
            experts, world, rank, count
        )
        base, rest = divmod(experts, world)
        expected = [e % world * base + min(e % world, rest) + e // world for e in range(experts)]
        assert to_physical.tolist() == expected
        assert [int(to_global[p]) for p in expected] == list(range(experts))
        assert local.tolist() == list(range(rank, experts, world))
        assert str(local.dtype).endswith("int64")


def test_initial_physical_map():
    build = vllm.build_initial_global_physical_to_logical_map
    assert build(4, 6) == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert build(3, 0) == [0, 1, 2]


def test_expert_params_mapping():
    rows = vllm.fused_moe_make_expert_params_mapping(None, "gate", "down", "up", 2, 1)
    prefix = "experts.routed_experts."
    assert rows[:3] == [
        (f"{prefix}w13_", "experts.0.gate.", 0, "w1"),
        (f"{prefix}w2_", "experts.0.down.", 0, "w2"),
        (f"{prefix}w13_", "experts.0.up.", 0, "w3"),
    ]
    assert len(rows) == 9
    assert rows[6:] == [
        (f"{prefix}w13_", "experts.0.gate.", 2, "w1"),
        (f"{prefix}w2_", "experts.0.down.", 2, "w2"),
        (f"{prefix}w13_", "experts.0.up.", 2, "w3"),
    ]


def test_activation_names():
    kinds = vllm.MoEActivation
    assert kinds.from_str("gelu_pytorch_tanh") is kinds.GELU_TANH
    assert kinds.SILU.without_mul() is kinds.SILU_NO_MUL
    assert kinds.RELU2_NO_MUL.without_mul() is kinds.RELU2_NO_MUL
    assert kinds.SWIGLUOAI.is_gated and not kinds.GELU_NO_MUL.is_gated
    with pytest.raises(ConclaveValueError, match=r"activation.*silu"):
        kinds.from_str("swish")


def test_routing_methods_are_numbered_as_there():
    kinds = vllm.RoutingMethodType
    assert [int(kinds[n]) for n in ("Default", "Renormalize", "DeepSeekV3", "Llama4")] == [
        0,
        1,
        2,
        3,
    ]
    assert int(kinds.Custom) == 101 and int(kinds.Simulated) == 102


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("renormalize", [False, True])
def test_sigmoid_without_a_bias_is_named_by_its_renormalisation(top_k, renormalize):
    kinds = vllm.RoutingMethodType
    found = conclave.routing.get_routing_method_type("sigmoid", top_k, renormalize)
    assert found is (kinds.SigmoidRenorm if renormalize else kinds.Sigmoid)


def test_configurations_need_no_torch():
    import subprocess
    import sys

    program = (
        "import sys, conclave, conclave.vllm as v\n"
        "v.fp8_w8a8_moe_quant_config(1, 1); v.FusedMoEParallelConfig.make(1, 1)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_public_name_is_described():
    pytest.importorskip("torch", reason="torch is not installed")
    for name in (*vllm.__all__, *vllm._TORCH_NAMES):
        found = getattr(vllm, name)
        if not callable(found):
            continue
        assert inspect.getdoc(found), name
        if isinstance(found, type):
            for method, value in vars(found).items():
                if callable(value) and not method.startswith("_"):
                    assert inspect.getdoc(getattr(found, method)), f"{name}.{method}"


def test_builders_take_what_newest_vllm_gives_them():
    bias = numpy.zeros((2, 16), dtype="float32")
    for build in (vllm.int4_w4a16_moe_quant_config, vllm.int8_w8a16_moe_quant_config):
        found = build(
            SCALE, SCALE, w1_bias=bias, w2_bias=bias, block_shape=[0, 32], gemm1_alpha=2.0
        )
        assert found.w1_bias is bias and found.w2_bias is bias and found.gemm1_alpha == 2.0
        assert found.w1_zp is None and found.unsupported_reason is None
    found = vllm.mxfp4_w4a8_moe_quant_config(SCALE, SCALE, SCALE, SCALE, bias, bias)
    assert found.a1_scale is SCALE and found.a2_scale is SCALE and found.w2_bias is bias
    found = vllm.mxfp4_mxfp8_moe_quant_config(SCALE, SCALE, None, None, bias, bias, mx_alignment=32)
    assert found.w1_bias is bias and found.w2_bias is bias
    assert vllm.mxfp4_moe_quant_config(SCALE, SCALE).ocp_mx_scheme == "w_mxfp4_a_mxfp4"
    assert vllm.biased_moe_quant_config(bias, None, gemm1_clamp_limit=7.0).gemm1_clamp_limit == 7.0
    assert vllm.nvfp4_w4a16_moe_quant_config(*[SCALE] * 4, gemm1_beta=1.0).gemm1_beta == 1.0
    assert vllm.fp8_w8a16_moe_quant_config(SCALE, SCALE, gemm1_alpha=1.5).gemm1_alpha == 1.5


def test_biases_at_the_place_of_flags_are_named():
    bias = numpy.zeros((2, 16), dtype="float32")
    with pytest.raises(ConclaveTypeError, match=r"block_shape: .*by name"):
        vllm.int4_w4a16_moe_quant_config(SCALE, SCALE, None, None, bias)
    with pytest.raises(ConclaveTypeError, match=r"block_shape: .*by name"):
        vllm.fp8_w8a16_moe_quant_config(SCALE, SCALE, bias, bias)
    with pytest.raises(ConclaveTypeError, match=r"per_act_token_quant: .*by name"):
        vllm.int8_w8a8_moe_quant_config(SCALE, SCALE, None, None, bias, bias)
    with pytest.raises(ConclaveUnsupportedError, match="a1_scale"):
        vllm.mxfp4_mxfp8_moe_quant_config(SCALE, SCALE, SCALE)


def test_sums_left_to_the_caller_and_unpadded_sizes():
    split = conclave.FusedMoEParallelConfig.make(tp_size_=2, tp_rank=1)
    found = conclave.FusedMoEConfig(8, 2, 64, 8, split, "bfloat16", intermediate_size=48)
    assert (found.hidden_dim_unpadded, found.intermediate_size_per_partition_unpadded) == (64, 24)
    assert found.w13_num_shards == 2 and not found.should_defer_moe_finalize(1)
    found.defer_moe_finalize = True
    assert found.use_deferred_moe_finalize and found.should_defer_moe_finalize(9)
    found.defer_moe_finalize_max_num_tokens = 8
    assert [found.should_defer_moe_finalize(n) for n in (0, 8, 9)] == [False, True, False]
    for padded in ({"hidden_dim_unpadded": 60}, {"intermediate_pad": 8}):
        with pytest.raises(ConclaveUnsupportedError, match="nothing is padded"):
            conclave.FusedMoEConfig(8, 2, 64, 8, split, "bfloat16", **padded)


@pytest.mark.parametrize("argument", [{"is_lora_enabled": True}, {"moe_backend": "triton"}])
def test_adapters_and_kernels_by_name_are_refused(argument):
    with pytest.raises(ConclaveUnsupportedError, match=next(iter(argument))):
        conclave.FusedMoEConfig(
            8, 2, 64, 8, conclave.FusedMoEParallelConfig(), "bfloat16", **argument
        )
