"""Every model family of testdata that transformers has: eager against the library, by logits.

Two ways in: the experts backend, and whole blocks by `patch`. tools/python_models.py writes the
list of outcomes, docs/python-models.md, with the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")

import conclave.transformers  # noqa: E402
from conclave.errors import ConclaveUnsupportedError  # noqa: E402
from conclave.transformers import _block, _experts  # noqa: E402
from support import models  # noqa: E402
from support.devices import DEVICES  # noqa: E402

BAR = 2e-5  # float32, through two or three layers: the layer's own bar is 5e-6

EAGER_IS_WRONG = {"hunyuan_v1_moe"}  # 5.0: weights [T, E] are indexed by slot; grouped_mm is right
# 5.0 scores masked groups 0, not -inf: that differs for a token in thousands, all of whose biased
# scores are negative. The library goes by the published formula, which later versions have too.
MASKS_WITH_ZERO = {"solar_open"}


@pytest.fixture(scope="module", params=DEVICES)
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device of the models."""
    torch.set_default_device(request.param)
    yield request.param
    torch.set_default_device(None)


@pytest.fixture(scope="module", params=models.folders())
def family(request: pytest.FixtureRequest, place: str) -> tuple[str, object, models.Run]:
    """A folder, its model, and what that does by itself."""
    try:
        model = models.load(request.param)
    except models.NoClass as error:
        pytest.skip(f"transformers {transformers.__version__}: {error}")
    if not models.IS_NEWEST and request.param in EAGER_IS_WRONG:
        pytest.skip("eager experts of this version read the wrong routing weights")
    try:
        expected = models.run(model, models.prompt())
    except (AttributeError, ImportError, RuntimeError, TypeError) as error:  # or without scipy
        pytest.skip(f"transformers {transformers.__version__} does not run it: {error}")
    return request.param, model, expected


def check(model: object, expected: models.Run, record: Callable) -> None:
    _experts._warned.clear()
    _block._warned.clear()
    actual = models.run(model, models.prompt())
    distance = models.worst_difference(actual, expected)
    record("class", type(model).__name__)
    record("distance", distance)
    assert actual.tokens == expected.tokens
    assert distance <= BAR
    assert not _experts._warned and not _block._warned  # nothing ran eagerly


def test_model_with_experts_backend_has_eager_logits(
    family: tuple, record_property: Callable
) -> None:
    _, model, expected = family
    if not models.dispatches(model):
        with pytest.raises(ConclaveUnsupportedError, match=r"conclave\.transformers\.patch"):
            conclave.transformers.set_implementation(model)
        return
    conclave.transformers.set_implementation(model)
    try:
        check(model, expected, record_property)
        report = conclave.transformers.backend_report(model)
        assert report.ours == report.modules != (), str(report)
    finally:
        conclave.transformers.set_implementation(model, "eager")


def test_model_with_patched_blocks_has_eager_logits(
    family: tuple, record_property: Callable
) -> None:
    name, model, expected = family
    if not models.IS_NEWEST and name in MASKS_WITH_ZERO:
        pytest.skip("this version of transformers masks groups with 0")
    report = conclave.transformers.patch(model)
    try:
        assert report.replaced or not models.IS_NEWEST
        if models.IS_NEWEST:
            assert {m.replaced for m in report.replaced} == {"block"}, str(report)
            assert all("attention" in m.reason for m in report.not_replaced)
        record_property("replaced", ",".join(sorted({m.replaced for m in report.replaced})))
        check(model, expected, record_property)
        if models.IS_NEWEST:
            report = conclave.transformers.backend_report(model)
            assert report.ours == report.modules != (), str(report)
    finally:
        conclave.transformers.unpatch(model)


def test_families_are_at_least_25() -> None:
    known = 0
    for name in models.folders():
        try:
            models.config_of(name)
            known += 1
        except models.NoClass:
            continue
    assert known >= 25
