"""What becomes of a model class: blocks replaced, and results against its own code."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch

import conclave.transformers
from support import survey_models
from support.survey_models import NotTried, line_of

BAR = 2e-5  # float32, through two or three layers: a layer's own bar is 5e-6
NEW_TOKENS = 6
_HOLDER = re.compile(r"(Experts|Mo[eE]|Mo[eE]Block|SparseMLP)$")


@dataclasses.dataclass
class Outcome:
    """The row of one class."""

    family: str
    cls: str
    blocks: int = 0
    experts: int = 0  # blocks whose experts alone were replaced
    left: int = 0
    reasons: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()  # modules that hold experts and are in no row of the report
    error: float = 0.0  # the largest of a row of any result, relative
    generates: str = "-"  # "same", "other tokens", "-": it does not generate
    gradient: str = "-"  # "same", "differs by ..."; "-": it has none
    eager: tuple[str, ...] = ()  # why blocks that were replaced ran their own code

    @property
    def is_good(self) -> bool:
        return (
            self.error <= BAR
            and self.generates in ("same", "-")
            and self.gradient in ("same", "-")
            and not self.silent
            and not self.eager
        )


def inputs_of(model: Any) -> dict[str, Any]:
    """What a model's forward is given: tokens, or patches of an image. Raises NotTried."""
    names = inspect.signature(model.forward).parameters
    numbers = torch.Generator("cpu").manual_seed(3)
    if "input_ids" in names:
        ids = torch.randint(3, 60, (2, 9), generator=numbers)
        given = {"input_ids": ids}
        if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
            given["decoder_input_ids"] = ids[:, :5]
        return given
    if "inputs_embeds" in names and "pixel_values" not in names:
        width = model.config.hidden_size
        return {"inputs_embeds": torch.randn(2, 9, width, generator=numbers)}
    return _image_of(model, names, numbers)


def _image_of(model: Any, names: Any, numbers: torch.Generator) -> dict[str, Any]:
    config = model.config
    if "grid_thw" in names:
        width = 3 * config.patch_size**2 * getattr(config, "temporal_patch_size", 1)
        first = next(iter(names))
        return {
            first: torch.randn(16, width, generator=numbers),
            "grid_thw": torch.tensor([[1, 4, 4]]),
        }
    size = getattr(config, "image_size", None)
    if "pixel_values" not in names or size is None:
        raise NotTried(f"it takes {', '.join(list(names)[:3])}")
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    given = {"pixel_values": torch.randn(2, 3, height, width, generator=numbers)}
    if "dataset_index" in names:
        given["dataset_index"] = torch.tensor([0, 1])
    return given


def _run(model: Any, given: dict[str, Any]) -> Any:
    torch.manual_seed(11)  # a model may draw numbers
    try:
        return model(**given)
    except ValueError:  # of a cache, where a tiny model has no layer that it expects
        return model(**given, use_cache=False)


def _tensors(out: Any) -> Iterator[torch.Tensor]:
    values = out.values() if hasattr(out, "values") else out if isinstance(out, tuple) else (out,)
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim():
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _difference(actual: Any, expected: Any) -> float:
    worst = 0.0
    for a, e in zip(_tensors(actual), _tensors(expected), strict=True):
        far = (a.double() - e.double()).norm(dim=-1) / e.double().norm(dim=-1).clamp(min=1e-30)
        worst = max(worst, float(far.nan_to_num(nan=float("inf")).max()) if far.numel() else 0.0)
    return worst


def _generated(model: Any, given: dict[str, Any]) -> Any:
    """Greedy tokens; None where a class has no such way."""
    if "input_ids" not in given or not getattr(model, "can_generate", lambda: False)():
        return None
    ids = given["input_ids"]
    try:
        torch.manual_seed(11)
        out = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    except Exception:
        return None
    return getattr(out, "sequences", out).tolist() if not isinstance(out, tuple) else None


def _gradients(model: Any, given: dict[str, Any]) -> dict[str, torch.Tensor] | None:
    model.zero_grad()
    try:
        out = _run(model, given)
        sum(t.double().square().sum() for t in _tensors(out) if t.requires_grad).backward()
    except Exception:
        return None
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def _compare_gradients(actual: Any, expected: Any) -> str:
    if expected is None:
        return "-"
    if actual is None or actual.keys() != expected.keys():
        return "others have gradients"
    worst = max(
        float((actual[n] - e).norm() / e.norm().clamp(min=1e-30)) for n, e in expected.items()
    )
    return "same" if worst <= BAR else f"differs by {worst:.1e}"


def silent_modules(model: Any, report: Any) -> tuple[str, ...]:
    """Modules that by their name hold experts, but stand below no path of a report."""
    paths = [m.path for m in report.modules]
    found = []
    for path, module in model.named_modules():
        if _HOLDER.search(type(module).__name__) and any(True for _ in module.parameters()):
            if not any(f"{path}.".startswith(f"{p}.") for p in paths):
                found.append(f"{path} ({type(module).__name__})")
    return tuple(found)


def _note_report(outcome: Outcome, report: Any) -> None:
    kinds = [m.replaced for m in report.modules]
    outcome.blocks, outcome.experts = kinds.count("block"), kinds.count("experts")
    outcome.left = kinds.count("")
    outcome.reasons = tuple(
        dict.fromkeys(f"{m.module}: {m.reason}" for m in report.modules if m.reason)
    )


def try_class(family: str, cls: type) -> Outcome | None:
    """None for a class without experts. Raises NotTried."""
    try:
        model = survey_models.build(cls)
    except survey_models.NoExperts:
        return None
    outcome = Outcome(family, cls.__name__)
    given = inputs_of(model)
    try:
        with torch.no_grad():
            expected = _run(model, given)
    except Exception as error:
        raise NotTried(f"it does not run by itself: {line_of(error)}") from error
    tokens, gradients = _generated(model, given), _gradients(model, given)
    report = conclave.transformers.patch(model)
    _note_report(outcome, report)
    outcome.silent = silent_modules(model, report)
    with torch.no_grad():
        outcome.error = _difference(_run(model, given), expected)
        if tokens is not None:
            outcome.generates = "same" if _generated(model, given) == tokens else "other tokens"
    ran = conclave.transformers.backend_report(model)
    outcome.eager = tuple(str(m) for m in ran.modules if m.selected and m.reasons)
    outcome.gradient = _compare_gradients(_gradients(model, given), gradients)
    conclave.transformers.unpatch(model)
    return outcome
