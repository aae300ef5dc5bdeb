"""conclave.vllm.install: what `import vllm` finds, and the way back."""

from __future__ import annotations

import importlib
import sys
import threading
import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import conclave  # noqa: E402
from conclave import vllm as ours  # noqa: E402
from conclave.vllm.engine import _names, runner  # noqa: E402
from conclave.vllm.engine._absent import Absent  # noqa: E402
from support.devices import seeded  # noqa: E402
from support.problems import FLOAT32_BAR, worst_error  # noqa: E402
from support.process_ranks import run_ranks  # noqa: E402
from support.vllm_reference import experts_reference, random_case  # noqa: E402

MOE = "vllm.model_executor.layers.fused_moe"
ROWS = [
    (module, name)
    for module in _names.TREE
    for _, names in _names.TREE[module]
    for name in names.split()
]


def loaded():
    return [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]


@pytest.fixture
def installed():
    with ours.install() as handle:
        yield handle
    assert loaded() == []


def test_names_are_this_packages_and_go_away():
    with ours.install():
        from vllm.model_executor.layers.fused_moe import FusedMoE, MoEActivation, fused_topk
        from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

        assert ours.is_installed()
        assert FusedMoE is ours.FusedMoE and FusedMoEQuantConfig is ours.FusedMoEQuantConfig
        assert fused_topk is conclave.fused_topk and MoEActivation is ours.MoEActivation
    assert not ours.is_installed() and loaded() == []
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("vllm")
    assert fused_topk(None, torch.zeros(1, 4), 2, True)[1].tolist() == [[0, 1]]


def test_every_name_is_real_or_says_why_not(installed):
    absent = 0
    for module, row in ROWS:
        name = row.partition("=")[0]
        found = getattr(importlib.import_module(module), name)
        if isinstance(found, Absent):
            absent += 1
            with pytest.raises(NotImplementedError, match=rf"{module}.{name}: \w"):
                found()
        elif isinstance(found, type):
            assert found.__module__.startswith("conclave.") or name == "PrepareResultType"
        else:
            assert found is not None
    assert 0 < absent < len(ROWS) / 3


def test_a_name_without_a_meaning_can_be_named_alone(installed):
    from vllm.model_executor.layers.fused_moe import MarlinExperts

    def annotated(experts: MarlinExperts | None) -> MarlinExperts | None:
        return experts

    assert not isinstance(annotated(None), MarlinExperts)
    assert not hasattr(MarlinExperts, "workspace_shapes")
    for use in (
        lambda: MarlinExperts(1),
        lambda: MarlinExperts.apply,
        lambda: MarlinExperts[int],
        lambda: types.new_class("Mine", (MarlinExperts,)),
    ):
        with pytest.raises(
            conclave.errors.ConclaveUnsupportedError, match="MarlinExperts: a kernel"
        ):
            use()


def test_modules_and_names_that_are_not_known(installed):
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("vllm.attention")
    with pytest.raises(ImportError, match="no_such_name"):
        from vllm.config import no_such_name  # noqa: F401


def test_installing_nests_and_the_last_one_takes_it_away():
    outer, inner = ours.install(), ours.install()
    assert outer is not inner
    inner.uninstall()
    assert ours.is_installed()
    with pytest.raises(conclave.errors.ConclaveRuntimeError, match="already"):
        ours.install(overlay=True)
    ours.uninstall()
    assert not ours.is_installed()
    ours.uninstall()


def test_a_handle_takes_back_its_own_installation_once():
    with ours.install() as outer:
        with ours.install() as inner:
            inner.uninstall()
            inner.uninstall()
            assert ours.is_installed()
        assert ours.is_installed()
        again = ours.install()
        outer.uninstall()
        assert ours.is_installed()
        again.uninstall()
        assert not ours.is_installed()


def test_groups_that_are_none_leave_nothing_behind():
    with pytest.raises(TypeError, match="tp_group: expected a ProcessGroup"):
        ours.install(tp_group="all")
    assert not ours.is_installed()


def test_a_real_vllm_is_left_alone(monkeypatch):
    real = types.ModuleType("vllm")
    monkeypatch.setitem(sys.modules, "vllm", real)
    with pytest.raises(conclave.errors.ConclaveRuntimeError, match="imported already"):
        ours.install()
    assert sys.modules["vllm"] is real and not ours.is_installed()


def test_overlay_needs_a_vllm():
    with pytest.raises(conclave.errors.ConclaveRuntimeError, match="overlay: expected vllm"):
        ours.install(overlay=True)


def test_overlay_replaces_the_modules_of_fused_moe_and_gives_them_back(monkeypatch):
    parts = MOE.split(".")
    theirs = {}
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        theirs[name] = types.ModuleType(name)
        theirs[name].__path__ = []
        monkeypatch.setitem(sys.modules, name, theirs[name])
        if end > 1:
            setattr(theirs[".".join(parts[: end - 1])], parts[end - 1], theirs[name])
    own = f"{MOE}.experts.their_kernel"
    monkeypatch.setitem(sys.modules, own, types.ModuleType(own))
    with ours.install(overlay=True):
        from vllm.model_executor.layers import fused_moe

        assert fused_moe.FusedMoE is ours.FusedMoE
        assert sys.modules["vllm"] is theirs["vllm"] and own not in sys.modules
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("vllm.config")
    assert sys.modules[MOE] is theirs[MOE]
    assert theirs["vllm.model_executor.layers"].fused_moe is theirs[MOE]
    assert own in sys.modules and f"{MOE}.layer" not in sys.modules


def filled(factory, **options):
    made = factory(
        num_experts=4, top_k=2, hidden_size=24, intermediate_size=20, renormalize=True, **options
    )
    generator = seeded(3)
    for param in made.parameters():
        param.data.copy_(torch.randn(param.shape, generator=generator) / 4)
    return made


def test_the_factory_makes_a_runner_that_computes(installed):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory, MoERunner

    config = VllmConfig()
    with set_current_vllm_config(config):
        made = filled(FusedMoEFactory, prefix="model.layers.7.mlp.experts", swiglu_limit=None)
    assert isinstance(made, MoERunner) and made.layer_id == 7
    assert config.compilation_config.static_forward_context == {"model.layers.7.mlp.experts": made}
    assert {name for name, _ in made.named_parameters()} == {
        "routed_experts.w13_weight",
        "routed_experts.w2_weight",
    }
    hidden, logits = torch.randn(5, 24), torch.randn(5, 4)
    weights, ids = made.select_experts(hidden, logits)
    wanted = experts_reference(hidden, made.w13_weight, made.w2_weight, weights, ids, "silu")
    assert worst_error(made(hidden, logits), wanted) <= FLOAT32_BAR


def test_the_factory_refuses_what_it_would_drop(installed):
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory

    for options, error, text in (
        ({"bias_vl": torch.ones(4)}, NotImplementedError, "bias_vl"),
        ({"fuse_shared_experts": True}, NotImplementedError, "fuse_shared_experts"),
        ({"ckpt_names": ("w1", "w2", None)}, ValueError, "ckpt_names: expected a name"),
        ({"ckpt_names": ("w1", "", "w3")}, ValueError, "ckpt_names"),
        ({"routed_experts_cls": torch.nn.Linear}, TypeError, "routed_experts_cls"),
        ({"no_such_option": None}, TypeError, "no_such_option"),
        ({"runner_cls": torch.nn.Linear}, TypeError, "runner_cls"),
    ):
        with pytest.raises(error, match=text) as caught:
            filled(FusedMoEFactory, **options)
        assert isinstance(caught.value, conclave.Error)
    plain = {"bias_vl": None, "fuse_shared_experts": False, "intermediate_pad": 0}
    filled(FusedMoEFactory, **plain)


def test_classes_that_derive_from_ours_are_used(installed):
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory, MoERunner, RoutedExperts

    class Owner(RoutedExperts):
        def weight_loader(self, *_, **__):
            return "mine"

    class Runner(MoERunner):
        pass

    made = filled(FusedMoEFactory, routed_experts_cls=Owner, runner_cls=Runner)
    assert type(made) is Runner and type(made.routed_experts) is Owner
    assert made.w13_weight.weight_loader() == "mine"


def test_a_gate_computes_logits_of_any_type(installed):
    from vllm.model_executor.layers.fused_moe import GateLinear

    gate = GateLinear(16, 4, bias=True, params_dtype=torch.bfloat16, out_dtype=torch.float32)
    weight, bias = torch.randn(4, 16).bfloat16(), torch.randn(4).bfloat16()
    gate.weight.weight_loader(gate.weight, weight)
    gate.bias.weight_loader(gate.bias, bias)
    rows = torch.randn(3, 16).bfloat16()
    logits, none = gate(rows)
    assert none is None and logits.dtype == torch.float32
    torch.testing.assert_close(logits, rows.float() @ weight.float().T + bias.float())
    apart = GateLinear(16, 4, bias=True, skip_bias_add=True)
    assert apart(torch.zeros(2, 16))[1] is apart.bias
    with pytest.raises(ValueError, match="loaded_weight"):
        gate.weight.weight_loader(gate.weight, weight.T)
    with pytest.raises(ValueError, match="out_dtype"):
        gate.set_out_dtype(torch.bfloat16)


def test_small_functions(installed):
    from vllm.logger import init_logger
    from vllm.utils.math_utils import cdiv, next_power_of_2, round_up

    assert [cdiv(7, 2), cdiv(8, 2), round_up(9, 4), round_up(8, 4)] == [4, 4, 12, 8]
    assert [next_power_of_2(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    init_logger("conclave.test").info_once("said once %d", 1)


def test_contexts_belong_to_their_thread(installed):
    from vllm.config import VllmConfig, get_current_vllm_config, set_current_vllm_config
    from vllm.forward_context import get_forward_context, set_forward_context

    config, seen = VllmConfig(), []
    with set_current_vllm_config(config), set_forward_context(None, config, num_tokens=3):
        assert get_current_vllm_config() is config and get_forward_context().num_tokens == 3
        other = threading.Thread(target=lambda: seen.append(get_current_vllm_config() is config))
        other.start()
        other.join()
    assert seen == [False]
    with pytest.raises(conclave.errors.ConclaveRuntimeError, match="no forward runs"):
        get_forward_context()


def rank_work(rank, _):
    """A layer by the factory over the installed groups, and what the groups do."""
    group = torch.distributed.group.WORLD
    hidden, logits = (torch.randn(4, n, generator=seeded(9)) for n in (24, 4))
    found = {}
    with ours.install(tp_group=group):
        from vllm.distributed import get_tp_group, tensor_model_parallel_all_gather
        from vllm.model_executor.layers.fused_moe import FusedMoEFactory

        made = FusedMoEFactory(4, 2, 24, 20, renormalize=True)
        load(made)
        found["sum"] = made(hidden, logits)
        own = torch.full((1, 2), float(rank))
        found["gathered"] = tensor_model_parallel_all_gather(own, dim=0)
        found["part"] = get_tp_group().reduce_scatter(torch.arange(4.0), dim=0)
    return found


def load(made):
    for expert in range(4):
        for shard, shape in (("w1", (20, 24)), ("w3", (20, 24)), ("w2", (24, 20))):
            number = 10 * expert + int(shard[1])
            tensor = torch.randn(shape, generator=seeded(number)) / 4
            name = "w2_weight" if shard == "w2" else "w13_weight"
            param = getattr(made.routed_experts, name)
            param.weight_loader(param, tensor, name, shard, expert)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no torch.distributed")
def test_layers_take_the_groups_of_the_process(tmp_path):
    with ours.install():
        alone = runner.FusedMoEFactory(4, 2, 24, 20, renormalize=True)
        load(alone)
        hidden, logits = (torch.randn(4, n, generator=seeded(9)) for n in (24, 4))
        wanted = alone(hidden, logits)
    for rank, found in enumerate(run_ranks(rank_work, 2, tmp_path)):
        assert isinstance(found, dict), found.trace
        assert worst_error(found["sum"], wanted.double()) <= FLOAT32_BAR
        assert found["gathered"].tolist() == [[0.0, 0.0], [1.0, 1.0]]
        assert found["part"].tolist() == [[0.0, 2.0], [4.0, 6.0]][rank]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_experts_in_the_place_of_vllms_kernels(installed, dtype):
    from vllm.model_executor.layers.fused_moe import FusedMoEConfig, FusedMoEParallelConfig
    from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
    from vllm.model_executor.layers.fused_moe.experts.fused_batched_moe import BatchedTritonExperts
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
    from vllm.model_executor.layers.fused_moe.prepare_finalize.batched import (
        BatchedPrepareAndFinalize,
    )
    from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input

    case = random_case(3, 9, 40, 48, 8, 3, torch.float32)
    config = FusedMoEConfig(8, 3, 48, 8, FusedMoEParallelConfig(), torch.float32)
    plain = ours.FUSED_MOE_UNQUANTIZED_CONFIG
    prepare = maybe_make_prepare_finalize(config, plain, allow_new_interface=True)
    assert maybe_make_prepare_finalize(config, plain) is None
    made = [
        FusedMoEKernel(prepare, TritonExperts(config, plain)),
        FusedMoEKernel(
            BatchedPrepareAndFinalize(64, 8), BatchedTritonExperts(config, plain, 64, 1)
        ),
    ]
    for kernel in made:
        assert worst_error(kernel.apply(*case), experts_reference(*case)) <= FLOAT32_BAR
    for block in (None, [16, 20]):
        codes, scale = moe_kernel_quantize_input(case[0], None, dtype, block is None, block)
        wide = 48 if block is None else 20
        values = codes.float() * scale.repeat_interleave(wide, -1)[:, :48]
        step = scale.repeat_interleave(wide, -1)[:, :48] * (16 if dtype != torch.int8 else 0.5)
        assert codes.dtype == dtype and ((values - case[0]).abs() <= 1.01 * step).all()
    codes, scale = moe_kernel_quantize_input(case[0], None, dtype, False)
    assert scale.shape == (1,) and codes.float().abs().max() in (448, 127)
    with pytest.raises(NotImplementedError, match="quant_dtype"):
        moe_kernel_quantize_input(case[0], None, "mxfp4", False)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_rows_are_quantised_whatever_their_number(installed, dtype):
    from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input

    for tokens in (0, 1, 3):
        rows = torch.randn(tokens, 40)
        for by_token, block, scales in (
            (False, None, (1,)),
            (True, None, (tokens, 1)),
            (False, [128, 16], (tokens, 3)),
        ):
            codes, scale = moe_kernel_quantize_input(rows, None, dtype, by_token, block)
            assert codes.shape == rows.shape and scale.shape == scales
            assert bool((scale > 0).all())
    with pytest.raises(conclave.errors.ConclaveValueError, match="block_shape"):
        moe_kernel_quantize_input(torch.randn(2, 8), None, dtype, False, [128, 0])


def test_replicas_are_chosen_and_counted(installed):
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.distributed.eplb.policy.default import DefaultEplbPolicy
    from vllm.model_executor.layers.fused_moe.router.base_router import (
        eplb_map_to_physical_and_record,
    )

    ids = torch.tensor([[0, 1], [0, 2], [1, 2], [0, 3]], dtype=torch.int32)
    table = torch.tensor([[0, 4], [1, 5], [2, -1], [3, -1]])
    count = torch.tensor([2, 2, 1, 1])
    for unpadded, tokens in ((None, 4), (torch.tensor(0), 4), (torch.tensor(2), 2)):
        load = torch.zeros(6, dtype=torch.int32)
        out = eplb_map_to_physical_and_record(ids, load, table, count, torch.tensor(True), unpadded)
        assert out.dtype == torch.int32 and torch.equal(out % 4, ids % 4)
        assert out[1, 0] != out[0, 0] and load.sum() == 2 * tokens
    of = EplbState.build_initial_global_physical_to_logical_map(3, 2)
    assert of == [0, 1, 2, 0, 1]
    slots = DefaultEplbPolicy.rebalance_experts(torch.tensor([[9.0, 1.0, 1.0]]), 4, 1, 1, 2)
    assert slots.shape == (1, 4) and sorted(slots[0].tolist()) == [0, 0, 1, 2]


def test_activations_with_parameters(installed):
    from vllm.model_executor.layers.fused_moe.activation import (
        ApplyMoEActivationConfig,
        MoEActivation,
        apply_moe_activation,
    )

    rows = 6 * torch.randn(5, 16, generator=seeded(2))
    gate, up = rows.double().chunk(2, -1)
    low, clamped = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)
    sigmoid, tanh = torch.sigmoid, torch.tanh
    cases = {
        "silu": ({"clamp_limit": 2.0}, low * sigmoid(low) * clamped),
        "swigluoai_uninterleave": (
            {"clamp_limit": 2.0, "alpha": 1.5, "beta": 0.5},
            low * sigmoid(1.5 * low) * (clamped + 0.5),
        ),
        "situ": (
            {"activation_situ_beta": 3.0, "activation_situ_linear_beta": 9.0},
            3 * tanh(gate / 3) * sigmoid(gate) * 9 * tanh(up / 9),
        ),
        "gelu": ({}, torch.nn.functional.gelu(gate) * up),
    }
    for name, (parameters, wanted) in cases.items():
        out = torch.empty(5, 8)
        given = ApplyMoEActivationConfig(**parameters)
        apply_moe_activation(MoEActivation(name), out, rows, activation_config=given)
        torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
