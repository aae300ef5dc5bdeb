"""`patch` in trees of modules of any shape, and on code that comes with a checkpoint."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")

import conclave.transformers as library  # noqa: E402
from conclave.errors import ConclaveRuntimeError  # noqa: E402
from support import models, trees  # noqa: E402

pytestmark = pytest.mark.usefixtures("device")
REMOTE = pathlib.Path(trees.__file__).with_name("remote_model.py")


def require_equal(actual: Any, expected: Any, bar: float = 2e-5) -> None:
    assert float((actual.double() - expected.double()).norm() / expected.double().norm()) <= bar


def run(model: Any, *given: Any) -> Any:
    with torch.no_grad():
        return model(*given)


# Code beside a checkpoint


def published(folder: pathlib.Path, **fields: Any) -> Any:
    """A model whose code lies in its folder, saved and loaded as such are."""
    config = {"model_type": "folder_moe", "num_hidden_layers": 2} | fields
    config["auto_map"] = {
        "AutoConfig": "remote_model.FolderConfig",
        "AutoModelForCausalLM": "remote_model.FolderForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "remote_model.py").write_text(REMOTE.read_text())
    made = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    torch.manual_seed(3)
    with torch.device("cpu"):
        model = transformers.AutoModelForCausalLM.from_config(made, trust_remote_code=True)
    for weights in model.parameters():
        torch.nn.init.normal_(weights, std=0.2)
    model.save_pretrained(folder)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    return loaded.to(torch.get_default_device()).eval()


STYLES = {
    "mixtral": {"names": "w", "router": "softmax"},
    "qwen": {"names": "proj", "router": "softmax", "shared": "gated"},
    "olmoe": {"names": "proj", "router": "softmax", "renormalize": False},
    "deepseek": {"names": "proj", "router": "sigmoid", "shared": "added"},
    "fused": {"names": "fused", "router": "softmax", "bias": True},
    "called": {"names": "proj", "router": "softmax", "calls": "ids"},
    "called_masks": {"names": "fused", "router": "softmax", "calls": "masks", "shared": "gated"},
    "called_odd": {"names": "w", "router": "noisy", "calls": "ids", "bias": True},
}


@pytest.mark.parametrize("style", STYLES)
def test_code_of_a_folder_runs_its_experts_here(style: str, tmp_path: pathlib.Path) -> None:
    model = published(tmp_path, **STYLES[style])
    ids = models.prompt()
    expected = run(model, ids).logits
    report = library.patch(model)
    assert [m.replaced for m in report.modules] == ["experts"] * 2, str(report)
    require_equal(run(model, ids).logits, expected)
    assert all(m.calls == 1 for m in library.backend_report(model).ours)
    assert len(library.backend_report(model).ours) == 2
    library.unpatch(model)
    assert torch.equal(run(model, ids).logits, expected)


def test_a_router_of_unknown_rule_is_left_with_its_reason(tmp_path: pathlib.Path) -> None:
    model = published(
        tmp_path, names="w", router="noisy"
    )  # nothing but the block knows the choices
    report = library.patch(model)
    assert [m.replaced for m in report.modules] == ["", ""]
    assert all("another formula" in m.reason for m in report.modules)


# Lists that are called with choices


@pytest.fixture
def called(tmp_path: pathlib.Path) -> Any:
    return published(tmp_path, **STYLES["called_odd"])


def test_update_of_a_called_list_is_seen(called: Any) -> None:
    library.patch(called)
    run(called, models.prompt())
    with torch.no_grad():
        for expert in called.model.layers[0].mlp.experts:
            expert.w2.weight.mul_(-2)
    actual = run(called, models.prompt()).logits
    library.unpatch(called)
    require_equal(actual, run(called, models.prompt()).logits)


def test_called_list_is_trained_with_its_own_code(called: Any) -> None:
    called(models.prompt()).logits.sum().backward()
    expected = {n: p.grad.clone() for n, p in called.named_parameters() if p.grad is not None}
    called.zero_grad()
    library.patch(called)
    called(models.prompt()).logits.sum().backward()
    assert expected and all(
        torch.equal(p.grad, expected[n]) for n, p in called.named_parameters() if p.grad is not None
    )


def test_released_called_list_works_and_refuses_gradients(called: Any) -> None:
    state = {name: tensor.clone() for name, tensor in called.state_dict().items()}
    expected = run(called, models.prompt()).logits
    report = library.patch(called, release=True)
    assert report.model_bytes_after < report.model_bytes_before / 2
    require_equal(run(called, models.prompt()).logits, expected)
    with pytest.raises(ConclaveRuntimeError, match="released"):
        called(models.prompt())
    called.load_state_dict(state)
    require_equal(run(called, models.prompt()).logits, expected)


# Trees


def language_model(name: str = "qwen2_moe") -> Any:
    try:
        model = models.load(name)
    except models.NoClass as error:
        pytest.skip(str(error))
    model.config._experts_implementation = "eager"
    return model


def test_wrapper_without_a_configuration() -> None:
    wrapper = torch.nn.ModuleDict({"inner": language_model()})
    expected = run(wrapper["inner"], models.prompt()).logits
    report = library.patch(wrapper)
    assert [m.replaced for m in report.modules] == ["block"], str(report)
    assert report.modules[0].path.startswith("inner.model.layers.")
    require_equal(run(wrapper["inner"], models.prompt()).logits, expected)
    library.unpatch(wrapper)
    assert torch.equal(run(wrapper["inner"], models.prompt()).logits, expected)


def test_two_models_of_two_families_in_one() -> None:
    pair = trees.Pair(language_model("mixtral"), language_model("qwen3_moe"))
    expected = run(pair, models.prompt())
    report = library.patch(pair)
    if models.IS_NEWEST:
        assert {m.replaced for m in report.modules} == {"block"}, str(report)
    assert not report.not_replaced, str(report)
    assert {m.path.split(".")[0] for m in report.modules} == {"first", "second"}
    require_equal(run(pair, models.prompt()), expected)


def test_block_that_stands_in_two_places_is_replaced_once() -> None:
    model = language_model("mixtral")
    layers = model.model.layers
    layers[1].mlp = layers[0].mlp
    expected = run(model, models.prompt()).logits
    report = library.patch(model)
    assert [m.replaced for m in report.modules] == ["block"]
    require_equal(run(model, models.prompt()).logits, expected)
    calls = library.backend_report(model).modules[0].calls
    assert calls == 2
    library.unpatch(model)
    assert torch.equal(run(model, models.prompt()).logits, expected)


def test_block_without_any_configuration_has_its_experts_replaced() -> None:
    model = torch.nn.Sequential(trees.stacked_block())
    rows = torch.randn(1, 6, trees.H)
    expected = run(model, rows)
    report = library.patch(model)
    assert [m.replaced for m in report.modules] == ["experts"], str(report)
    assert "no model with a configuration" in report.modules[0].reason
    require_equal(run(model, rows), expected)
