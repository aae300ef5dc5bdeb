"""Model classes of every kind through `patch`: a part of what tools/transformers_survey.py tries,
and what that found."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")

import conclave.transformers  # noqa: E402
from support import models, survey, survey_models  # noqa: E402

# Class: blocks replaced, experts alone, not replaced.
TRIED = {
    "DbrxModel": (1, 0, 0),
    "DogeForCausalLM": (0, 0, 2),
    "Dots3NoteForConditionalGeneration": (1, 1, 0),
    "JetMoeForSequenceClassification": (1, 0, 1),
    "LaraMiniForCausalLM": (0, 2, 0),
    "MixtralForTokenClassification": (2, 0, 0),
    "MuseSparkTextModel": (0, 0, 2),
    "NllbMoeForConditionalGeneration": (0, 0, 2),
    "Qwen2MoeForQuestionAnswering": (1, 0, 0),
    "VitPoseBackbone": (0, 0, 2),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", TRIED)
def test_class_agrees_with_its_own_code(name: str) -> None:
    cls: Any = getattr(transformers, name, None)
    if cls is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    if not models.IS_NEWEST:
        pytest.skip("other versions have other formulas and configurations")
    outcome = survey.try_class(cls.__module__.split(".")[-2], cls)
    assert outcome is not None
    assert outcome.is_good, outcome
    assert (outcome.blocks, outcome.experts, outcome.left) == TRIED[name]
    assert bool(outcome.reasons) == (outcome.experts + outcome.left > 0)


def test_survey_finds_the_families() -> None:
    assert len(survey_models.families()) >= (60 if models.IS_NEWEST else 25)
    heads = [c.__name__ for c in survey_models.classes_of("mixtral")]
    assert {"MixtralModel", "MixtralForCausalLM", "MixtralForTokenClassification"} <= set(heads)


def mixtral() -> Any:
    cls, config = models.config_of("mixtral")
    config = type(config).from_dict(config.to_dict())
    config._experts_implementation = "eager"
    torch.manual_seed(3)
    return cls._from_config(config, dtype=torch.bfloat16)


def run(model: Any) -> Any:
    with torch.no_grad():
        return model(models.prompt().cpu()).logits


def test_type_of_the_values_counts_not_that_of_the_configuration() -> None:
    model = mixtral().float().eval()  # the configuration goes on saying bfloat16
    for name, weights in model.named_parameters():
        if "gate.weight" in name:
            torch.nn.init.normal_(weights)
    expected = run(model)
    report = conclave.transformers.patch(model)
    assert {m.replaced for m in report.modules} == {"block"}, str(report)
    assert (run(model) - expected).norm() <= survey.BAR * expected.norm()


def test_experts_with_a_weight_that_nobody_knows_run_by_themselves() -> None:
    model = mixtral().float().eval()
    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            module.post_expert_norm = torch.nn.LayerNorm(module.down_proj.shape[1])
    expected = run(model)
    conclave.transformers.set_implementation(model)
    assert torch.equal(run(model), expected)
    report = conclave.transformers.backend_report(model)
    assert report.fell_back == report.modules
    assert all("post_expert_norm.weight besides its matrices" in str(m) for m in report.modules)


class Unheard(torch.nn.Module):
    """Experts that no rule finds but by the name of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = torch.nn.Embedding(16, 8)

    def forward(self, hidden: Any) -> Any:
        return hidden + self.keys.weight.sum(0)


def test_what_only_a_name_shows_is_listed() -> None:
    model = mixtral().float().eval()
    block = type("OddMoE", (Unheard,), {})()
    model.model.layers[0].odd = block
    report = conclave.transformers.patch(model)
    (left,) = report.not_replaced
    assert (left.path, left.module) == ("model.layers.0.odd", "OddMoE")
    assert "not stacks of matrices" in left.reason
