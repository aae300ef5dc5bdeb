"""Parameters of every public callable against those of vLLM: names, order, defaults and kinds.

support/vllm_interface.json was made from vLLM's own files by tools/vllm_interface.py: `layer` with
the class FusedMoE, `factory` with the newer function of that name, `modular_kernel` and `config`.
What differs stands below with its reason, and must differ.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import pathlib

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from conclave import vllm

HERE = pathlib.Path(__file__).parent
TABLE = json.loads((HERE / "support" / "vllm_interface.json").read_text())
KINDS = inspect.Parameter

# Names of the table that are other ones here.
RENAMED = {("factory", "FusedMoE"): "FusedMoEFactory"}

_NEW = "new here, by name only"
_NEWER = "of newer versions of vLLM, by name only"
_BEHIND = "new here, behind all of vLLM's"
_NEWER_BEHIND = "of newer versions of vLLM, behind all of the older"
_ONE_RANK = "left out: one rank"
_ROCM = "a kernel for other GPUs"

_ACTIVATION_AND_SCALES = {
    **{
        f"+{name}": _NEWER_BEHIND
        for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "is_scale_swizzled")
    },
    "+scale_fmt": _BEHIND + ": vLLM's kernels decide by the device",
}

DIFFERENCES = {
    "layer.FusedMoE": {
        "+router": _NEWER,
        "+swiglu_limit": _NEWER,
        "+shared_expert_gate": _NEWER,
        "+routed_output_transform": _NEWER,
        "+apply_routed_scale_to_output": _NEWER,
        "+zero_expert_type": _NEWER,
        "+hash_indices_table": _NEWER,
        "+runner_cls": _NEWER,
        "+runner_args": _NEWER,
        "+routed_experts_cls": _NEWER,
        "+routed_experts_args": _NEWER,
        "+moe_parallel_config": _NEW + ": it says which rank this is",
        "+expert_placement_strategy": _NEW + ": there is no engine's configuration to read it from",
        "+tp_group": _NEW + ": there is no engine to ask for its groups",
        "+dp_group": _NEW + ": there is no engine to ask for its groups",
        "+pcp_group": _NEW + ": there is no engine to ask for its groups",
        "+ep_group": _NEW + ": there is no engine to ask for its groups",
        "+return_shared_apart": _NEW + ": older versions returned a pair always",
        "+swiglu_alpha": _NEWER,
        "+swiglu_beta": _NEWER,
        "+activation_situ_beta": _NEWER,
        "+activation_situ_linear_beta": _NEWER,
        "+shared_experts_stream_token_threshold": _NEW + ": an environment variable there",
    },
    "layer.FusedMoE.forward_native": {
        "router_logits default": "may be left out with a gate",
        "+input_ids": _NEWER_BEHIND,
        "+num_tokens": _NEW + ": vLLM reads it from its forward context",
        "+padding_mask": _NEW + ": VLLM_MOE_SKIP_PADDING is not read",
        "+rank_tokens": _NEW + ": vLLM reads them from its forward context",
    },
    "layer.FusedMoE.forward_cuda": {
        "router_logits default": "may be left out with a gate",
        "+input_ids": _NEWER_BEHIND,
        "+num_tokens": _NEW + ": vLLM reads it from its forward context",
        "+padding_mask": _NEW + ": VLLM_MOE_SKIP_PADDING is not read",
        "+rank_tokens": _NEW + ": vLLM reads them from its forward context",
    },
    "layer.FusedMoE.update_expert_map": {"+moe_parallel_config": _BEHIND + ": the new split"},
    "layer.maybe_roundup_hidden_size": {
        "act_dtype default": "nothing is rounded up, so that nothing else is needed",
        "moe_parallel_config default": "nothing is rounded up",
        "is_lora_enabled default": "nothing is rounded up",
        "model_type default": "nothing is rounded up",
        "is_mxfp4_quant default": "nothing is rounded up",
    },
    "factory.FusedMoE": {
        "+swiglu_alpha": _NEWER,
        "+swiglu_beta": _NEWER,
        "+activation_situ_beta": _NEWER,
        "+activation_situ_linear_beta": _NEWER,
        "+shared_experts_stream_token_threshold": _NEW + ": an environment variable there",
        "+moe_parallel_config": _NEW + ": it says which rank this is",
        "+expert_placement_strategy": _NEW + ": there is no engine's configuration to read it from",
        "+tp_group": _NEW + ": there is no engine to ask for its groups",
        "+dp_group": _NEW + ": there is no engine to ask for its groups",
        "+pcp_group": _NEW + ": there is no engine to ask for its groups",
        "+ep_group": _NEW + ": there is no engine to ask for its groups",
    },
    "modular_kernel.ExpertTokensMetadata": {
        "expert_num_tokens_cpu default": "may be left out: None"
    },
    "modular_kernel.FusedMoEModularKernel": {
        "+chunk_size": _BEHIND + ": vLLM reads it from the environment"
    },
    "modular_kernel.SharedBuffers": {
        "missing": "an instance has buffers of its own, so that instances may run at once"
    },
    "config.fp8_w8a8_moe_quant_config": {
        **{
            f"{name} kind": "by name only: other versions have other arguments at its position"
            for name in ("per_act_token_quant", "per_out_ch_quant", "block_shape")
        },
        **{
            f"+{name}": _NEWER
            for name in ("w1_bias", "w2_bias", "a1_gscale", "a2_gscale", "g1_alphas", "g2_alphas")
        },
        "+parameters": _NEWER + ": of the activation",
    },
    "config.int8_w8a8_moe_quant_config": {
        "a1_scale default": "may be left out: None",
        "a2_scale default": "may be left out: None",
        "+w1_bias": _NEWER_BEHIND,
        "+w2_bias": _NEWER_BEHIND,
    },
    **{
        f"config.{name}_moe_quant_config": {
            "w1_zp default": "may be left out, as in newer versions",
            "w2_zp default": "may be left out, as in newer versions",
            "+further": _NEWER + ": biases, and parameters of the activation",
        }
        for name in ("int4_w4a16", "int8_w8a16")
    },
    "config.biased_moe_quant_config": {"+parameters": _NEWER + ": of the activation"},
    "config.mxfp4_w4a16_moe_quant_config": {"+parameters": _NEWER + ": of the activation"},
    "config.ocp_mx_moe_quant_config": {"+parameters": _NEWER + ": of the activation"},
    "config.nvfp4_moe_quant_config": {
        "+w1_bias": _NEWER_BEHIND,
        "+w2_bias": _NEWER_BEHIND,
        "+is_scale_swizzled": _NEWER_BEHIND,
        "+parameters": _NEWER + ": of the activation",
    },
    "config.FusedMoEQuantConfig": _ACTIVATION_AND_SCALES,
    "config.FusedMoEQuantConfig.make": _ACTIVATION_AND_SCALES,
    "config.FusedMoEParallelConfig": {
        **{
            f"{name} default": _ONE_RANK
            for name in ("tp_size", "dp_size", "ep_size", "tp_rank", "dp_rank", "ep_rank", "use_ep")
        },
        **{
            f"+{name}": _NEWER_BEHIND
            for name in ("pcp_size", "pcp_rank", "sp_size", "all2all_backend", "enable_eplb")
        },
    },
    "config.FusedMoEParallelConfig.make": {
        "tp_size_ default": _ONE_RANK,
        "dp_size_ default": _ONE_RANK,
        "vllm_parallel_config default": "may be left out: no expert parallelism",
        "+pcp_size_": _NEWER,
        "+sp_size_": _NEWER,
        **{
            f"+{name}": _NEW + ": there are no process groups to ask"
            for name in ("tp_rank", "dp_rank", "pcp_rank", "enable_expert_parallel")
        },
    },
    "config.FusedMoEConfig": {
        "max_num_tokens default": "VLLM_MOE_DP_CHUNK_SIZE is not read; 256 is its default",
        **{
            f"+{name}": _NEWER_BEHIND
            for name in (
                "intermediate_size",
                "intermediate_size_per_partition",
                "num_logical_experts",
                "activation",
                "is_act_and_mul",
                "routing_method",
                "router_logits_dtype",
                "swiglu_limit",
                "moe_backend",
                "device",
                "is_lora_enabled",
                "disable_inplace",
                "max_capture_size",
                "swiglu_alpha",
                "swiglu_beta",
                "activation_situ_beta",
                "activation_situ_linear_beta",
                "hidden_dim_unpadded",
                "intermediate_size_per_partition_unpadded",
                "intermediate_pad",
                "shared_expert_prefix",
                "skip_final_all_reduce",
                "defer_moe_finalize",
                "defer_moe_finalize_max_num_tokens",
            )
        },
    },
}

_ELSEWHERE = "in a file of vLLM that the table is not made from"
_OURS = "no name of vLLM's"
OUTSIDE = {
    **dict.fromkeys(
        (
            "FusedMoEExperts",
            "FusedMoEExpertsModular",
            "FusedMoEExpertsMonolithic",
            "FusedMoEKernel",
            "FusedMoEPrepareAndFinalizeModular",
            "FusedMoEPrepareAndFinalizeMonolithic",
            "UnfinalizedMoEOutput",
        ),
        "newer than the table: test_vllm_turns.py",
    ),
    **dict.fromkeys(("install", "is_installed", "uninstall"), "not vLLM's"),
    **dict.fromkeys(
        (
            "BaseRouter",
            "BatchedPrepareAndFinalize",
            "CustomRoutingRouter",
            "DistributionBasedRouting",
            "EPLBConfig",
            "EplbLayerState",
            "EplbModelState",
            "EplbState",
            "ExpertMapManager",
            "FusedMoEMethodBase",
            "FusedMoEModularMethod",
            "FusedMoERouter",
            "FusedTopKBiasRouter",
            "FusedTopKRouter",
            "GroupShape",
            "GroupedTopKRouter",
            "MoEActivation",
            "MoERunner",
            "MoEPrepareAndFinalizeNoEP",
            "QuantizationConfig",
            "QuantizeMethodBase",
            "RoutingMethodType",
            "RoutingSimulator",
            "RoutingSimulatorRouter",
            "RoutingStrategy",
            "TopKWeightAndReduceContiguous",
            "TopKWeightAndReduceDelegate",
            "TopKWeightAndReduceNaiveBatched",
            "TopKWeightAndReduceNoOP",
            "build_initial_global_physical_to_logical_map",
            "UnquantizedFusedMoEMethod",
            "ZeroExpertRouter",
            "count_expert_num_tokens",
            "create_fused_moe_router",
            "fused_experts",
            "fused_topk",
            "fused_topk_bias",
            "grouped_topk",
            "moe_align_block_size",
            "moe_permute",
            "moe_unpermute",
            "process_weights_after_loading",
            "set_weight_attrs",
        ),
        _ELSEWHERE,
    ),
    **dict.fromkeys(
        (
            "fp8_w8a16_moe_quant_config",
            "gptq_marlin_moe_quant_config",
            "int4_w4afp8_moe_quant_config",
            "mxfp4_moe_quant_config",
            "mxfp4_mxfp8_moe_quant_config",
            "mxfp4_w4a8_moe_quant_config",
            "nvfp4_w4a16_moe_quant_config",
        ),
        "of newer versions of vLLM",
    ),
    **dict.fromkeys(
        (
            "AllToAllPrepareAndFinalize",
            "BatchedConclaveExperts",
            "ConclaveExperts",
            "SchemeFusedMoEMethod",
            "UnreducedConclaveExperts",
            "forget_packed_layers",
            "map_to_physical",
            "moe_problem_size",
            "packed_layers",
        ),
        _OURS,
    ),
    "ensure_round_robin_expert_routing_tables": "a static method of the class FusedMoE there",
    "rebalance_experts": "a class method of a policy there",
}


def theirs_of(words):
    """inspect's parameters of a line of the table."""
    tree = ast.parse(f"def f({', '.join(words)}): pass").body[0].args
    plain = [*tree.posonlyargs, *tree.args]
    gap = len(plain) - len(tree.defaults)
    found = []
    for i, parameter in enumerate(plain):
        default = KINDS.empty if i < gap else ast.unparse(tree.defaults[i - gap])
        found.append((parameter.arg, KINDS.POSITIONAL_OR_KEYWORD, default))
    for parameter, value in zip(tree.kwonlyargs, tree.kw_defaults, strict=True):
        default = KINDS.empty if value is None else ast.unparse(value)
        found.append((parameter.arg, KINDS.KEYWORD_ONLY, default))
    return found


def ours_of(function, *, bound):
    found = [
        (p.name, p.kind, p.default if p.default is KINDS.empty else repr(p.default))
        for p in inspect.signature(function).parameters.values()
    ]
    return found[1:] if bound else found


def differences(theirs, ours):
    """What a caller that was written for theirs could trip over in ours."""
    there = {name: (kind, default) for name, kind, default in theirs}
    here = {name: (kind, default) for name, kind, default in ours}
    found = {f"-{name}" for name in there if name not in here}
    found |= {f"+{name}" for name in here if name not in there}
    for name in there.keys() & here.keys():
        if there[name][0] != here[name][0]:
            found.add(f"{name} kind")
        if there[name][1] != here[name][1]:
            found.add(f"{name} default")
    by_place = [name for name, kind, _ in ours if kind is KINDS.POSITIONAL_OR_KEYWORD]
    expected = [
        name for name, kind, _ in theirs if kind is KINDS.POSITIONAL_OR_KEYWORD and name in by_place
    ]
    if by_place[: len(expected)] != expected:
        found.add("order")
    return found


def every_callable():
    """Key, module of the table, owner or None, name, parameters; None for a property."""
    for module, names in TABLE.items():
        for name, words in names["functions"].items():
            yield f"{module}.{name}", module, None, name, words
        for owner, held in names["classes"].items():
            if "__init__" not in held["methods"]:
                yield f"{module}.{owner}", module, owner, "", None
            for name, words in held["methods"].items():
                key = owner if name == "__init__" else f"{owner}.{name}"
                yield f"{module}.{key}", module, owner, name, words
            for name in held["properties"]:
                yield f"{module}.{owner}.{name}", module, owner, name, None


def found_differences(module, owner, name, words):
    top = RENAMED.get((module, owner or name), owner or name)
    if not hasattr(vllm, top):
        return {"missing"}
    target = getattr(vllm, top)
    if owner is None or name == "__init__":
        return differences(theirs_of(words), ours_of(target, bound=False))
    if not name:
        return set()
    static = inspect.getattr_static(target, name, None)
    if static is None:
        return {"missing"}
    if words is None:
        return set() if isinstance(static, property) else {"no property"}
    method = getattr(target, name)
    bound = not isinstance(static, (staticmethod, classmethod))
    return differences(theirs_of(words), ours_of(method, bound=bound))


CALLABLES = {key: rest for key, *rest in every_callable()}


@pytest.mark.parametrize("key", CALLABLES)
def test_parameters_are_those_of_vllm(key):
    listed = DIFFERENCES.get(key, {})
    assert found_differences(*CALLABLES[key]) == set(listed)
    assert all(listed.values())


def test_the_list_names_what_there_is():
    assert set(DIFFERENCES) <= set(CALLABLES)


def test_every_public_name_is_compared_or_says_why_not():
    public = {*vllm.__all__, *vllm._TORCH_NAMES, "moe_align_block_size", "moe_permute"}
    public = {name for name in public if callable(getattr(vllm, name))}
    compared = {RENAMED.get((m, o or n), o or n) for _, m, o, n, _ in every_callable()}
    assert public - compared == set(OUTSIDE)
    assert len(CALLABLES) > 100


# The comparison and the maker of the table.


@pytest.mark.parametrize(
    ("ours", "found"),
    [
        (lambda a, b=1, *, c=None: 0, set()),
        (lambda a, b=1: 0, {"-c"}),
        (lambda a, b=2, *, c=None: 0, {"b default"}),
        (lambda a, b, *, c=None: 0, {"b default"}),
        (lambda a, b=1, c=None: 0, {"c kind"}),
        (lambda b=1, a=2, *, c=None: 0, {"order", "a default"}),
        (lambda a, d=0, b=1, *, c=None: 0, {"order", "+d"}),
        (lambda a, b=1, d=0, *, c=None: 0, {"+d"}),
        (lambda a, b=1, *, c=None, **d: 0, {"+d"}),
    ],
)
def test_a_difference_is_seen(ours, found):
    theirs = theirs_of(["a", "b=1", "*", "c=None"])
    assert differences(theirs, ours_of(ours, bound=False)) == found


SOURCE = '''# A comment
@dataclass
class Config:
    """Not a word: of this. class Wrong: def wrong(a):"""
    size: int
    names: Optional[list[str]] = None

    def __post_init__(self):
        self.twice = 2 * self.size

    @property
    def whole(self) -> bool:
        return True

class Kernel(Base):
    class Buffers:
        def __init__(self) -> None:
            self.held = None

    def __init__(self, config: Config, # who says how (much) of it
                 *, limit: float = 1.0):
        self.config = config

    @staticmethod
    def make(kind: str = "a, b", **more: Any) -> "Kernel":
        return Kernel(kind)

    def _private(self, a):
        return a

    def run(self, rows: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return rows

def build(
    count: int, # Number of all
    width=(1, 2),
) -> Kernel:
    return Kernel(count)
'''


def maker():
    path = HERE.parents[1] / "tools" / "vllm_interface.py"
    spec = importlib.util.spec_from_file_location("vllm_interface", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "copied",
    [
        lambda text: text,
        lambda text: "\n".join(line.strip() for line in text.splitlines()),
        lambda text: " ".join(text.split()),
    ],
    ids=["source", "no indentation", "one line"],
)
def test_the_table_is_read_from_any_copy(copied):
    table = maker().read(copied(SOURCE), []).as_dict()
    assert table["functions"] == {"build": ["count", "width=(1, 2)"]}
    classes = table["classes"]
    assert classes["Config"]["methods"] == {"__init__": ["size", "names=None"]}
    assert classes["Config"]["properties"] == ["whole"]
    assert classes["Kernel"]["methods"] == {
        "__init__": ["config", "*", "limit=1.0"],
        "make": ["kind='a, b'", "**more"],
        "run": ["rows", "scale=None"],
    }
