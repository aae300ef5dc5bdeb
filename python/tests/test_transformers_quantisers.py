"""Lists of experts whose matrices are modules of other quantisers: values are taken by what these
do, or the report says why not."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")

import conclave.transformers as library  # noqa: E402
from support import remote_code as remote  # noqa: E402


class Codes(torch.nn.Module):
    """int8 by row, in buffers."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        steps = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (linear.weight / steps).round().to(torch.int8))
        self.register_buffer("steps", steps)

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.linear(x, (self.codes * self.steps).to(x.dtype))


class Bent(Codes):
    """Not linear."""

    def forward(self, x: Any) -> Any:
        return super().forward(torch.where(x > 1, 2 * x, x))


class Nameless(Codes):
    """Without sizes."""

    def __init__(self, linear: Any) -> None:
        super().__init__(linear)
        del self.in_features, self.out_features


def by_module(kind: type) -> Callable[[Any], None]:
    def quantise(experts: Any) -> None:
        for expert in experts:
            for name, child in list(expert.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(expert, name, kind(child))

    return quantise


def by_torch(experts: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ao.quantization.quantize_dynamic(
            experts, {torch.nn.Linear}, dtype=torch.qint8, inplace=True
        )


def by_torchao(experts: Any) -> None:
    found = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    found.quantize_(experts, found.Int8WeightOnlyConfig())


def by_quanto(experts: Any) -> None:
    found = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    found.quantize(experts, weights=found.qint8)
    found.freeze(experts)


def by_hqq(experts: Any) -> None:
    found = pytest.importorskip("hqq.core.quantize", reason="hqq is not installed")
    config = found.BaseQuantizeConfig(nbits=4, group_size=8)
    kind: Any = found.HQQLinear

    def make(linear: Any) -> Any:
        return kind(linear, config, compute_dtype=torch.float32, device="cpu")

    by_module(make)(experts)  # type: ignore[arg-type]


def made(quantise: Callable[[Any], None]) -> Any:
    config = remote.config("unknown", hidden_act="silu")
    model = remote.Model(config, remote.MixtralBlock)
    quantise(model.block.experts)
    return model


def rows() -> Any:
    return torch.randn(2, 7, remote.H, generator=torch.Generator().manual_seed(3))


def run(model: Any) -> Any:
    with torch.no_grad():
        return model.block(rows())[0]


RUN = {"module": by_module(Codes), "torchao": by_torchao, "quanto": by_quanto, "hqq": by_hqq}


@pytest.mark.parametrize("kind", RUN)
def test_values_of_a_quantiser_are_packed(kind: str) -> None:
    model = made(RUN[kind])
    expected = run(model)
    report = library.patch(model)
    assert [m.replaced for m in report.modules] == ["experts"], str(report)
    assert float((run(model) - expected).norm() / expected.norm()) <= 1e-5
    (calls,) = library.backend_report(model).ours
    assert calls.calls == 1
    library.unpatch(model)
    assert torch.equal(run(model), expected)


def test_new_codes_are_seen_and_stay_when_released() -> None:
    model = made(by_module(Codes))
    library.patch(model, release=True)
    run(model)
    with torch.no_grad():
        for expert in model.block.experts:
            expert.w2.steps.mul_(-3)
    changed = run(model)
    library.unpatch(model)  # nothing was released: modules hold more than parameters
    expected = run(model)
    assert float((changed - expected).norm() / expected.norm()) <= 1e-5


REFUSED = {
    "bent": (by_module(Bent), "another formula"),
    "nameless": (by_module(Nameless), "besides its matrices"),
    "dynamic rows": (by_torch, "another formula|formulas"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_is_listed_with_its_reason(kind: str) -> None:
    quantise, reason = REFUSED[kind]
    model = made(quantise)
    expected = run(model)
    report = library.patch(model)
    assert [m.replaced for m in report.modules] == [""], str(report)
    assert re.search(reason, report.modules[0].reason), report.modules[0].reason[-300:]
    assert torch.equal(run(model), expected)
