"""Tensors that require gradients are refused by name, whichever argument they are."""

from __future__ import annotations

import re

import pytest

import conclave
from conclave import _gradients, vllm
from conclave.errors import ConclaveValueError

torch = pytest.importorskip("torch", reason="torch is not installed")


def wanted(*shape, dtype=torch.float32):
    return torch.rand(*shape, dtype=torch.float32).to(dtype).requires_grad_()


@pytest.mark.parametrize("kind", [list, tuple])
def test_the_first_tensor_that_requires_gradients_is_named(kind):
    plain = torch.rand(2)
    given = {"a": plain, "b": None, "c": 1.0, "d": kind([plain, wanted(2)]), "e": wanted(2)}
    with pytest.raises(ConclaveValueError, match=re.escape("d[1]: it requires gradients")):
        _gradients.refuse(given)
    _gradients.refuse({"a": plain, "b": None, "c": [plain], "d": "text"})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_refused_where_torch_does_not_record(mode):
    with mode():
        _gradients.refuse({"a": wanted(2)})
        assert _gradients.first_that_requires({"a": wanted(2)}) is None


# Every call of vLLM's names, each tensor of it. Under no_grad the same call runs.


def refused(name, call):
    with pytest.raises(ConclaveValueError, match=rf"^{re.escape(name)}: it requires gradients"):
        call()
    with torch.no_grad():
        call()


def experts_case():
    return {
        "hidden_states": torch.rand(3, 8),
        "w1": torch.rand(4, 12, 8),
        "w2": torch.rand(4, 8, 6),
        "topk_weights": torch.rand(3, 2),
        "topk_ids": torch.tensor([[0, 1], [2, 3], [1, 0]]),
    }


@pytest.mark.parametrize("name", ["hidden_states", "w1", "w2", "topk_weights", "out"])
def test_arguments_of_fused_experts(name):
    given = {**experts_case(), "out": torch.rand(3, 8)}
    given[name].requires_grad_()
    refused(name, lambda: vllm.fused_experts(**given))


@pytest.mark.parametrize("name", ["w1_bias", "w2_bias"])
def test_biases_of_fused_experts(name):
    biases = {"w1_bias": torch.rand(4, 12), "w2_bias": torch.rand(4, 8)}
    biases[name].requires_grad_()
    config = vllm.biased_moe_quant_config(**biases)
    refused(name, lambda: vllm.fused_experts(**experts_case(), quant_config=config))


@pytest.mark.parametrize("name", ["w1_scale", "w2_scale", "a1_scale", "a2_scale"])
def test_scales_of_fused_experts(name):
    scales = {n: torch.ones(4 if n[0] == "w" else 1) for n in
              ("w1_scale", "w2_scale", "a1_scale", "a2_scale")}  # fmt: skip
    scales[name].requires_grad_()
    case = experts_case()
    case["w1"], case["w2"] = (case[w].to(torch.float8_e4m3fn) for w in ("w1", "w2"))
    config = vllm.fp8_w8a8_moe_quant_config(**scales)
    refused(name, lambda: vllm.fused_experts(**case, quant_config=config))


def test_routing_functions():
    plain, bias = torch.rand(3, 8), torch.rand(8)
    logits, wanted_bias = wanted(3, 8), wanted(8)
    hidden = wanted(3, 5)  # only its number of rows is read
    calls = {
        "gating_output": (
            lambda: vllm.fused_topk(hidden, logits, 2, True),
            lambda: vllm.fused_topk_bias(hidden, logits, bias, 2, True),
            lambda: vllm.grouped_topk(hidden, logits, 2, True, 2, 1),
            lambda: conclave.route(logits, 2, conclave.RouterSpec()),
        ),
        "e_score_correction_bias": (
            lambda: vllm.fused_topk_bias(hidden, plain, wanted_bias, 2, True),
            lambda: vllm.grouped_topk(
                hidden, plain, 2, True, 2, 1, e_score_correction_bias=wanted_bias
            ),
        ),
        "selection_bias": (
            lambda: conclave.route(
                plain,
                2,
                conclave.RouterSpec(has_selection_bias=True),
                selection_bias=wanted_bias,
            ),
        ),
    }
    for name, functions in calls.items():
        for call in functions:
            refused(name, call)
    vllm.fused_topk(hidden, plain, 2, True)


def layer_of(**arguments):
    layer = vllm.FusedMoE(4, 2, 8, 6, has_bias=True, **arguments)
    for param in layer.parameters():
        torch.nn.init.normal_(param)
    return layer


@pytest.mark.parametrize("name", ["w13_weight", "w2_weight", "w13_bias", "w2_bias"])
def test_parameters_of_a_layer(name):
    layer = layer_of()
    getattr(layer, name).requires_grad_()
    refused(name, lambda: layer(torch.rand(3, 8), torch.rand(3, 4)))


def test_arguments_of_a_layer():
    hidden, logits = torch.rand(3, 8), torch.rand(3, 4)
    refused("hidden_states", lambda: layer_of()(wanted(3, 8), logits))
    refused("router_logits", lambda: layer_of()(hidden, wanted(3, 4)))
    gated = layer_of(gate=torch.nn.Linear(8, 4))
    refused("router_logits", lambda: gated(hidden))
    biased = layer_of(e_score_correction_bias=wanted(4), scoring_func="sigmoid")
    refused("e_score_correction_bias", lambda: biased(hidden, logits))
    custom = layer_of(
        custom_routing_function=lambda hidden_states, gating_output, topk, renormalize: (
            gating_output[:, :topk].softmax(-1),
            torch.zeros(len(hidden_states), topk, dtype=torch.int32),
        )
    )
    refused("topk_weights", lambda: custom(hidden, wanted(3, 4)))
    latent = layer_of(routed_input_transform=torch.nn.Linear(8, 8))
    refused("hidden_states", lambda: latent(hidden, logits))


def test_gradients_of_what_runs_in_torch_are_kept():
    """Shared experts and an output transform are torch's own: nothing of theirs is dropped."""
    shared, transform = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    layer = layer_of(shared_experts=shared, routed_output_transform=transform)
    hidden, logits = torch.rand(3, 8), torch.rand(3, 4)
    layer(hidden, logits).sum().backward()
    torch.testing.assert_close(shared.weight.grad, hidden.sum(0).expand(8, 8))
    assert transform.weight.grad.abs().sum() > 0


def test_permutations():
    hidden, ids = torch.rand(3, 8), torch.tensor([[0, 1], [2, 3], [1, 0]])
    refused("hidden_states", lambda: vllm.moe_permute(wanted(3, 8), None, ids, 4))
    refused("a1q_scale", lambda: vllm.moe_permute(hidden, wanted(3, 1), ids, 4))
    rows, _, _, inverse, _ = vllm.moe_permute(hidden, None, ids, 4)
    out, weights = torch.zeros(3, 8), torch.rand(3, 2)
    refused(
        "permuted_hidden_states",
        lambda: vllm.moe_unpermute(out, rows.clone().requires_grad_(), weights, inverse),
    )
    refused("topk_weights", lambda: vllm.moe_unpermute(out, rows, wanted(3, 2), inverse))


def test_experts_of_the_modular_kernel():
    case = experts_case()
    experts = vllm.ConclaveExperts(vllm.FUSED_MOE_UNQUANTIZED_CONFIG)
    kernel = vllm.FusedMoEModularKernel(vllm.MoEPrepareAndFinalizeNoEP(), experts)
    for name in ("hidden_states", "w1", "w2", "topk_weights"):
        given = {**case, name: case[name].clone().requires_grad_()}
        refused(name, lambda given=given: kernel(**given))
