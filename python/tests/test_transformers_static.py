"""Greedy tokens with a static cache and a compiled forward, as serving code has them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")

import conclave.transformers  # noqa: E402
from support import models  # noqa: E402

NEW = 3


def tokens(model: Any, step: Any) -> list[list[int]]:
    """Prefill by the model itself, then one token at a time by `step`."""
    ids = models.prompt()
    length = ids.shape[1] + NEW
    cache = transformers.StaticCache(config=model.config, max_cache_len=length)
    place = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        out = model(ids, past_key_values=cache, position_ids=place, use_cache=True)
        found = [out.logits[:, -1].argmax(-1)]
        for position in range(ids.shape[1], length - 1):
            place = torch.tensor([[position]])
            out = step(
                found[-1][:, None], past_key_values=cache, position_ids=place, use_cache=True
            )
            found.append(out.logits[:, -1].argmax(-1))
    return torch.stack(found).tolist()


@pytest.mark.parametrize(
    ("name", "way"), [("qwen3_moe", "backend"), ("qwen3_moe", "patch"), ("gpt_oss", "patch")]
)
def test_static_cache_and_whole_graph_have_the_same_tokens(name: str, way: str) -> None:
    try:
        model = models.load(name)
    except models.NoClass as error:
        pytest.skip(str(error))
    expected = tokens(model, model)
    if way == "patch":
        report = conclave.transformers.patch(model)
        assert report.replaced and not report.not_replaced
    else:
        conclave.transformers.set_implementation(model)
    assert tokens(model, model) == expected
    torch._dynamo.reset()
    step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert tokens(model, step) == expected
    calls = conclave.transformers.backend_report(model)
    assert calls.ours == calls.modules, str(calls)
    # Two prefills by the model itself, and as many steps with and without a graph.
    assert {m.calls for m in calls.modules} == {2 + 2 * (NEW - 1)}
