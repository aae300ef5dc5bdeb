"""Every model family of testdata in bfloat16 on a GPU; test_transformers_models.py has float32.

Routers choose by rounded scores, so that two good implementations part at near ties. Both are held
against the same weights in float32, and the library must be as near to that as eager experts are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")

import conclave.transformers  # noqa: E402
from conclave.transformers import _block, _experts  # noqa: E402
from support import models  # noqa: E402

pytestmark = pytest.mark.cuda

BAR = 1.1  # times the distance of eager experts


@pytest.fixture(autouse=True)
def on_the_gpu() -> Iterator[None]:
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


def logits(model: object) -> torch.Tensor:
    """Of enough tokens for a median that one choice of experts does not move."""
    prompts = torch.cat([models.prompt(seed) for seed in range(6)])
    return models.run(model, prompts, new_tokens=0).prefill.double()


def median_distance(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((actual - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-30)).median())


def holds(actual: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> float:
    found = median_distance(actual, exact)
    assert found <= BAR * median_distance(eager, exact)
    return found


@pytest.mark.parametrize("name", models.folders())
def test_bfloat16_model_is_as_near_to_float32_as_eager(
    name: str, record_property: Callable
) -> None:
    try:
        model = models.load(name, dtype=torch.bfloat16)
        eager = logits(model)
    except models.NoClass as error:
        pytest.skip(f"transformers {transformers.__version__}: {error}")
    except (AttributeError, RuntimeError, TypeError) as error:
        pytest.skip(f"transformers {transformers.__version__} does not run it: {error}")
    exact = logits(models.load(name, dtype=torch.bfloat16).float())
    _experts._warned.clear()
    _block._warned.clear()
    found = []
    if models.dispatches(model):
        conclave.transformers.set_implementation(model)
        found.append(holds(logits(model), eager, exact))
        conclave.transformers.set_implementation(model, "eager")
    conclave.transformers.patch(model)
    found.append(holds(logits(model), eager, exact))
    record_property("class", type(model).__name__)
    record_property("distance", max(found))
    record_property("eager", median_distance(eager, exact))
    assert not _experts._warned and not _block._warned
