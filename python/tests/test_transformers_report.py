"""What `backend_report` says of forwards, and models on which the backend has no effect."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")

import conclave.transformers as library  # noqa: E402
from conclave.errors import ConclaveUnsupportedError  # noqa: E402
from conclave.transformers import _block, _dispatch, _experts, _pair, _patch  # noqa: E402
from support import compilers, models  # noqa: E402

pytestmark = pytest.mark.usefixtures("device")

SILENT = ["llama4_text", "dbrx", "longcat_flash", "jetmoe"]  # families without an interface


@pytest.fixture(autouse=True)
def forget_warnings() -> Iterator[None]:
    for module in (_experts, _block, _dispatch):
        module._warned.clear()
    yield


def load(name: str, **kwargs: Any) -> Any:
    try:
        return models.load(name, **kwargs)
    except models.NoClass as error:
        pytest.skip(f"transformers {transformers.__version__}: {error}")


def silent(name: str, **kwargs: Any) -> Any:
    model = load(name, **kwargs)
    if any(_dispatch.dispatches(c.experts) for c in _dispatch.experts_of(model)):
        pytest.skip("this version dispatches")
    return model


def call(model: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=models.prompt(), **kwargs).logits


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("name", SILENT)
def test_backend_without_effect_is_refused(name: str, release: bool) -> None:
    model = silent(name)
    before = sum(p.numel() for p in model.parameters())
    with pytest.raises(ConclaveUnsupportedError, match=r"conclave\.transformers\.patch"):
        library.set_implementation(model, release=release)
    assert sum(p.numel() for p in model.parameters()) == before
    library.set_implementation(model, "eager")


@pytest.mark.parametrize("name", SILENT)
@pytest.mark.parametrize("way", ["from_pretrained", "set_experts_implementation"])
def test_backend_without_effect_is_warned_of(name: str, way: str, caplog: Any) -> None:
    silent(name)
    with caplog.at_level(logging.WARNING, logger="conclave.transformers"):
        if way == "from_pretrained":
            load(name, experts="conclave")
        else:
            load(name).set_experts_implementation("conclave")
    assert len(caplog.records) == 1
    assert "does not dispatch" in caplog.text and "transformers.patch(model)" in caplog.text


def test_backend_with_effect_is_not_warned_of(caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, logger="conclave.transformers"):
        load("mixtral", experts="conclave")
        library.set_implementation(load("qwen2_moe"))
        load("llama4_text")
    assert not caplog.records


def test_model_of_which_a_part_dispatches_is_warned_of(caplog: Any) -> None:
    model = load("mixtral")
    first = model.model.layers[0].mlp.experts
    plain = type("Plain", (type(first),), {"forward": type(first).forward.__wrapped__})
    first.__class__ = plain
    with caplog.at_level(logging.WARNING, logger="conclave.transformers"):
        library.set_implementation(model)
    assert len(caplog.records) == 1 and "Plain (model.layers.0.mlp)" in caplog.text
    call(model)
    report = library.backend_report(model)
    assert [m.path for m in report.not_reached] == ["model.layers.0.mlp.experts"]
    assert [m.path for m in report.ours] == ["model.layers.1.mlp.experts"]


def test_report_counts_forwards() -> None:
    model = load("mixtral")
    report = library.backend_report(model)
    assert len(report.not_reached) == 2 and '"eager"' in report.not_reached[0].reasons[0]
    library.set_implementation(model)
    report = library.backend_report(model)
    assert [m.runs for m in report.modules] == ["", ""] and "not called yet" in str(report)
    call(model)
    call(model)
    report = library.backend_report(model)
    assert report.ours == report.modules and report.fell_back == ()
    assert [(m.calls, m.eager_calls, m.runs) for m in report.modules] == [(2, 0, "conclave")] * 2
    library.set_implementation(model)  # counts from here
    assert [m.calls for m in library.backend_report(model).modules] == [0, 0]


def test_report_has_the_reasons_of_what_fell_back() -> None:
    model = load("mixtral")
    library.set_implementation(model)
    call(model)
    model(input_ids=models.prompt())
    report = library.backend_report(model)
    assert report.ours == () and report.fell_back == report.modules
    for found in report.modules:
        assert (found.calls, found.eager_calls, found.runs) == (1, 1, "both")
        assert "1 x gradients are required (hidden_states)" in found.reasons[0]
    assert "gradients are required" in str(report)


def test_report_tells_of_an_activation_that_is_none_of_ours() -> None:
    model = load("mixtral")
    model.model.layers[1].mlp.experts.act_fn = torch.nn.Tanh()
    library.set_implementation(model)
    call(model)
    report = library.backend_report(model)
    assert [m.runs for m in report.modules] == ["conclave", "eager"]
    assert "activation" in report.fell_back[0].reasons[0]


@pytest.mark.parametrize("name", ["mixtral", "llama4_text", "gemma4_text"])
def test_report_of_patched_blocks(name: str) -> None:
    model = load(name)
    if not library.patch(model).replaced:
        pytest.skip("this version's blocks are not replaced")
    call(model)
    report = library.backend_report(model)
    assert report.ours == report.modules and {m.selected for m in report.modules} == {"block"}
    model(input_ids=models.prompt())
    report = library.backend_report(model)
    assert {m.runs for m in report.modules} == {"both"}
    assert all("gradients are required" in m.reasons[0] for m in report.modules)


@pytest.mark.parametrize("backend", compilers.BACKENDS)
@pytest.mark.parametrize("way", ["set_implementation", "patch"])
def test_report_of_a_compiled_block(way: str, backend: str) -> None:
    model = load("mixtral")
    getattr(library, way)(model)
    compiled = torch.compile(model.model.layers[0].mlp, backend=backend)
    hidden = torch.randn(1, 4, model.config.hidden_size)
    with torch.no_grad():
        compiled(hidden)
        compiled(hidden)
    report = library.backend_report(model)
    assert [(m.calls, m.runs) for m in report.modules] == [(2, "conclave"), (0, "")], str(report)
    compiled(hidden.requires_grad_())
    found = library.backend_report(model).fell_back
    assert len(found) == 1 and "compiled graphs" in found[0].reasons[0], str(found)


# Gradients of other arguments than the hidden states


def experts_call(model: Any) -> tuple[Any, tuple[Any, ...]]:
    """The first experts module, with what the router gives it."""
    block = model.model.layers[0].mlp
    hidden = torch.randn(5, model.config.hidden_size)
    ids = torch.arange(10).view(5, 2) % model.config.num_local_experts
    return block.experts, (hidden, ids, torch.rand(5, 2))


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_routing_weights_reach_the_router(compiled: bool) -> None:
    model = load("mixtral").requires_grad_(False)
    experts, (hidden, ids, weights) = experts_call(model)
    wanted = weights.clone().requires_grad_()
    experts(hidden, ids, wanted).square().sum().backward()
    library.set_implementation(model)
    actual = weights.clone().requires_grad_()
    run = torch.compile(experts, backend="aot_eager") if compiled else experts
    run(hidden, ids, actual).square().sum().backward()
    assert actual.grad is not None and torch.allclose(actual.grad, wanted.grad, rtol=1e-4)
    reasons = library.backend_report(model).modules[0].reasons
    assert "top_k_weights" in reasons[0]


def test_gate_alone_is_trained_with_frozen_experts() -> None:
    grads = []
    for selected in (False, True):
        model = load("mixtral").requires_grad_(False)
        gate = model.model.layers[1].mlp.gate.weight.requires_grad_()
        if selected:
            library.set_implementation(model)
        model(input_ids=models.prompt(), labels=models.prompt()).loss.backward()
        grads.append(gate.grad)
    assert grads[1] is not None and torch.allclose(grads[1], grads[0], rtol=1e-3, atol=1e-7)


def test_norm_before_paired_experts_gets_its_gradients() -> None:
    """The router reads other rows, which require none."""
    grads = []
    for selected in (False, True):
        model = load("gemma4_text").requires_grad_(False)
        if selected:
            library.patch(model)
            if not any(isinstance(r, _pair.PatchedPair) for r in _patch._patches[model]):
                pytest.skip("this version's experts have no router beside them")
        norm = model.model.layers[0].pre_feedforward_layernorm_2.weight.requires_grad_()
        model(input_ids=models.prompt(), labels=models.prompt()).loss.backward()
        grads.append(norm.grad)
    assert grads[0].abs().sum() > 0
    assert grads[1] is not None and torch.allclose(grads[1], grads[0], rtol=1e-3, atol=1e-7)
