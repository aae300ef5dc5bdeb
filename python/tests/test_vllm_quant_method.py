"""conclave.vllm.FusedMoE with quantisation methods of a program's own; the library's as objects."""

from __future__ import annotations

import copy
import itertools

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from conclave import vllm  # noqa: E402
from conclave.errors import (  # noqa: E402
    ConclaveTypeError,
    ConclaveUnsupportedError,
    ConclaveValueError,
    Error,
)
from support.devices import seeded  # noqa: E402
from support.problems import FLOAT32_BAR, worst_error  # noqa: E402
from support.vllm_reference import experts_reference  # noqa: E402

pytestmark = pytest.mark.usefixtures("device")

SIZES = {"num_experts": 8, "top_k": 2, "hidden_size": 48, "intermediate_size": 40}


class Halves(vllm.FusedMoEMethodBase):
    """Weights are stored as twice their values, and halved after loading."""

    supports_eplb = True

    def __init__(self, moe, log):
        super().__init__(moe)
        self.log = log

    def create_weights(
        self,
        layer,
        num_experts,
        hidden_size,
        intermediate_size_per_partition,
        params_dtype,
        **extra_weight_attrs,
    ):
        self.log.append(("create", num_experts, sorted(extra_weight_attrs)))
        assert layer.local_num_experts == num_experts and layer.moe_config is self.moe
        inner = intermediate_size_per_partition
        for name, shape in (
            ("w13_weight", (num_experts, 2 * inner, hidden_size)),
            ("w2_weight", (num_experts, hidden_size, inner)),
        ):
            stored = torch.nn.Parameter(torch.zeros(shape, dtype=params_dtype), False)
            layer.register_parameter(name, stored)
            vllm.set_weight_attrs(stored, extra_weight_attrs)

    def process_weights_after_loading(self, layer):
        self.log.append(("process",))
        for name in ("w13_weight", "w2_weight"):
            getattr(layer, name).data /= 2

    def get_fused_moe_quant_config(self, layer):
        self.log.append(("config",))
        return vllm.FUSED_MOE_UNQUANTIZED_CONFIG

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts_input=None):
        self.log.append(("apply", x.shape[0]))
        return vllm.fused_experts(
            x,
            layer.w13_weight,
            layer.w2_weight,
            topk_weights,
            topk_ids,
            expert_map=layer.expert_map,
            global_num_experts=layer.global_num_experts,
        )


class Config:
    """As a program writes one: no base class."""

    def __init__(self, method=Halves, name="halves"):
        self.method, self.name, self.log, self.asked = method, name, [], []

    def get_name(self):
        return self.name

    def get_quant_method(self, layer, prefix):
        self.asked.append((layer, prefix))
        made = self.method
        return made(layer.moe_config, self.log) if isinstance(made, type) else made


def tokens(count=11):
    generator = seeded(1)
    return torch.randn(count, 48, generator=generator), torch.randn(count, 8, generator=generator)


def tensors(factor):
    generator = seeded(2)
    found = {}
    for expert in range(8):
        for name, shape in (("w1", (40, 48)), ("w2", (48, 40)), ("w3", (40, 48))):
            values = torch.randn(shape, generator=generator) / 4
            found[f"{expert}.{name}.weight"] = values * factor
    return found


MAPPING = vllm.FusedMoE.make_expert_params_mapping(None, "w1", "w2", "w3", 8)


_numbers = itertools.count()


def made(factor=1.0, **arguments):
    arguments.setdefault("prefix", f"methods{next(_numbers)}.0.experts")
    layer = vllm.FusedMoE(**SIZES, expert_mapping=MAPPING, **arguments)
    assert len(layer.load_weights(tensors(factor).items())) == 3 * layer.local_num_experts
    return layer


def test_a_method_of_your_own_makes_loads_and_computes():
    config = Config()
    layer = made(2.0, quant_config=config, prefix="own.3.experts")
    assert config.asked == [(layer, "own.3.experts")]
    assert type(layer.quant_method) is Halves is type(layer.base_quant_method)
    assert layer.quant_config is config and layer.runner.quant_method is layer.quant_method
    vllm.process_weights_after_loading(torch.nn.Sequential(layer))
    hidden, logits = tokens()
    assert torch.equal(layer(hidden, logits), made()(hidden, logits))
    assert config.log[0] == ("create", 8, ["global_num_experts", "weight_loader"])
    assert config.log[1:] == [("process",), ("apply", 11)]
    assert layer.moe_quant_config is layer.moe_quant_config is vllm.FUSED_MOE_UNQUANTIZED_CONFIG
    assert config.log.count(("config",)) == 1  # asked once
    assert torch.equal(layer.runner.forward(hidden, logits), layer(hidden, logits))


def test_a_method_of_your_own_over_ranks_scaled_and_joined():
    hidden, logits = tokens()
    more = {
        "routed_scaling_factor": 2.5,
        "apply_routed_scale_to_output": True,
        "shared_experts": torch.nn.Identity(),
    }
    whole = made(**more)(hidden, logits)
    for split in ({"tp_size": 2}, {"ep_size": 2, "use_ep": True}):
        total = 0
        for rank in range(2):
            axis = "ep" if "use_ep" in split else "tp"
            part = vllm.FusedMoEParallelConfig(**split, **{f"{axis}_rank": rank})
            parts = {**more, "shared_experts": None} if rank else more
            layer = made(2.0, quant_config=Config(), moe_parallel_config=part, **parts)
            layer.quant_method.process_weights_after_loading(layer)
            total = total + layer(hidden, logits)
        assert worst_error(total, whole.double()) <= 1e-5


class ByLogits(Halves):
    supports_eplb = False

    def apply(self, layer, x, router_logits, top_k, renormalize, scoring_func="softmax", **kwargs):
        assert (top_k, renormalize, scoring_func) == (2, True, "softmax")
        assert kwargs["expert_map"] is None and kwargs["activation"] == "silu"
        weights, ids = layer.select_experts(hidden_states=x, router_logits=router_logits)
        return super().apply(layer, x, weights, ids)


class Whole(Halves):
    is_monolithic = True

    def apply_monolithic(self, layer, x, router_logits, input_ids=None):
        weights, ids = layer.select_experts(x, router_logits)
        return Halves.apply(self, layer, x, weights, ids)


@pytest.mark.parametrize("method", [ByLogits, Whole])
def test_methods_that_choose_experts(method):
    hidden, logits = tokens()
    plain = made(routed_scaling_factor=2.0, apply_routed_scale_to_output=True)
    layer = made(quant_config=Config(method), routed_scaling_factor=2.0,
                 apply_routed_scale_to_output=True)  # fmt: skip
    seen = []
    layer.set_capture_fn(seen.append)
    assert worst_error(layer(hidden, logits), plain(hidden, logits).double()) <= FLOAT32_BAR
    assert len(seen) == 1
    with pytest.raises(ConclaveUnsupportedError, match="padding_mask"):
        layer(hidden, logits, padding_mask=torch.ones(11, dtype=torch.bool))
    with pytest.raises(ConclaveUnsupportedError, match="zero_expert_type"):
        made(quant_config=Config(method), zero_expert_type="identity",
             e_score_correction_bias=torch.zeros(9))  # fmt: skip


def test_methods_without_replicas_are_refused_with_them():
    with pytest.raises(NotImplementedError, match="EPLB is not supported ByLogits"):
        made(quant_config=Config(ByLogits), enable_eplb=True)
    made(quant_config=Config(), enable_eplb=True)


class NeedsMore(Halves):
    def apply(self, layer, x, topk_weights, topk_ids, stream):
        return x


def returning(value):
    class Returns(Halves):
        def apply(self, layer, x, topk_weights, topk_ids):
            return value(x)

    return Returns


@pytest.mark.parametrize(
    ("method", "error", "text"),
    [
        (object(), ConclaveTypeError, "FusedMoEMethodBase"),
        (torch.nn.Identity(), ConclaveTypeError, "Identity"),
        (NeedsMore, ConclaveTypeError, "stream"),
        (returning(lambda x: None), ConclaveTypeError, "NoneType"),
        (returning(lambda x: (x, x)), ConclaveUnsupportedError, "2 tensors"),
        (returning(lambda x: x[1:]), ConclaveValueError, "shape"),
        (returning(lambda x: x.int()), ConclaveTypeError, "int32"),
    ],
)
def test_methods_are_checked(method, error, text):
    with pytest.raises(error, match=text):
        made(quant_config=Config(method))(*tokens())


def test_none_of_a_method_means_plain_or_ours():
    unknown = made(quant_config=Config(None))
    assert type(unknown.quant_method) is vllm.UnquantizedFusedMoEMethod

    class Fp8(Config):
        activation_scheme = "dynamic"
        weight_block_size = (128, 128)

    ours = vllm.FusedMoE(4, 2, 128, 128, quant_config=Fp8(None, "fp8"))
    assert type(ours.quant_method) is vllm.SchemeFusedMoEMethod
    assert ours.w13_weight.dtype == torch.float8_e4m3fn
    Fp8.__module__ = "vllm.model_executor.layers.quantization.fp8"
    theirs = vllm.FusedMoE(4, 2, 128, 128, quant_config=Fp8(object(), "fp8"))
    assert theirs.w13_weight.dtype == torch.float8_e4m3fn  # read, and not asked
    with pytest.raises(Error, match="mlx"):
        made(quant_config=Config(None, "mlx"))


class Doubled(vllm.UnquantizedFusedMoEMethod):
    def apply(self, layer, x, topk_weights, topk_ids):
        return 2 * super().apply(layer, x, topk_weights, topk_ids)


def test_the_plain_method_can_be_derived_from_and_swapped_in():
    hidden, logits = tokens()
    layer = made()
    assert type(layer.quant_method) is vllm.UnquantizedFusedMoEMethod
    out, before = layer(hidden, logits), layer.runner
    layer._replace_quant_method(Doubled(layer.moe_config))
    assert layer.runner is not before and layer.runner.quant_method is layer.quant_method
    assert torch.equal(layer(hidden, logits), 2 * out)
    twin = copy.deepcopy(layer)
    twin.w2_weight.data.zero_()
    assert not twin(hidden, logits).any() and twin.runner.layer is twin
    for wrong in (None, object()):
        with pytest.raises(ConclaveTypeError, match="quant_method"):
            layer._replace_quant_method(wrong)


class Modular(vllm.UnquantizedFusedMoEMethod):
    """Moves tokens by modular pieces."""

    def maybe_make_prepare_finalize(self, routing_tables=None):
        self.tables = routing_tables
        return vllm.MoEPrepareAndFinalizeNoEP()

    def select_gemm_impl(self, prepare_finalize, layer):
        return vllm.ConclaveExperts(self.moe_quant_config)


def test_modular_pieces_take_the_place_of_a_method():
    hidden, logits = tokens()
    layer = made()
    layer.maybe_init_modular_kernel()
    assert type(layer.quant_method) is vllm.UnquantizedFusedMoEMethod  # nothing to move
    out = layer(hidden, logits)
    first = Modular(layer.moe_config)
    layer._replace_quant_method(first)
    layer.maybe_init_modular_kernel()
    assert type(layer.quant_method) is vllm.FusedMoEModularMethod
    assert layer.base_quant_method is layer.quant_method.old_quant_method is first
    assert first.tables is None
    assert worst_error(layer(hidden, logits), out.double()) <= FLOAT32_BAR
    layer.maybe_init_modular_kernel()  # once
    assert layer.base_quant_method is first
    with pytest.raises(ConclaveUnsupportedError, match="create_weights"):
        layer.quant_method.create_weights(layer)


def test_sizes_of_all_ranks_are_told_where_they_are_asked_for():
    told = {}

    class Asks(Halves):
        def create_weights(self, layer, intermediate_size_full, **more):
            told["full"] = intermediate_size_full
            super().create_weights(layer, **more)

    class GPTQMarlinMoEMethod(Halves):
        def create_weights(self, layer, **more):
            told["by name"] = more.pop("intermediate_size_full")
            super().create_weights(layer, **more)

    split = vllm.FusedMoEParallelConfig(tp_size=2)
    for method in (Asks, GPTQMarlinMoEMethod):
        layer = made(quant_config=Config(method), moe_parallel_config=split)
        assert layer.w2_weight.shape[2] == 20
    assert told == {"full": 40, "by name": 40}
    with pytest.raises(ConclaveValueError, match="weight_loader"):
        vllm.set_weight_attrs(layer.w2_weight, {"weight_loader": None})


def test_parameters_are_those_that_the_reference_reads():
    layer = made(has_bias=True)
    layer.w13_bias.data.copy_(torch.randn(8, 80, generator=seeded(5)))
    layer.w2_bias.data.copy_(torch.randn(8, 48, generator=seeded(6)))
    hidden, logits = tokens()
    weights, ids = layer.select_experts(hidden, logits)
    expected = experts_reference(
        hidden, layer.w13_weight, layer.w2_weight, weights.double(), ids.long(), "silu",
        layer.w13_bias, layer.w2_bias,
    )  # fmt: skip
    assert worst_error(layer(hidden, logits), expected) <= FLOAT32_BAR
    assert layer.moe_quant_config.w1_bias is layer.w13_bias
