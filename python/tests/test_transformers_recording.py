"""`record_routing` and `replay_routing`: a model that serves, and the same one that is trained."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")

import conclave.transformers  # noqa: E402
from conclave.errors import (  # noqa: E402
    ConclaveUnsupportedError,
    ConclaveValueError,
)
from conclave.transformers import record_routing, replay_routing  # noqa: E402
from support import models  # noqa: E402

# Plain softmax; groups with a bias; a router that chooses before it scores.
NAMES = ("mixtral", "deepseek_v3", "gpt_oss")
NEW = 3


def load(name: str) -> Any:
    try:
        return models.load(name)
    except models.NoClass as error:
        pytest.skip(f"transformers {transformers.__version__}: {error}")


def serve(model: Any, **arguments: Any) -> tuple[Any, Any]:
    """Tokens that were generated, and the record of that."""
    with torch.no_grad(), record_routing(model, **arguments) as recorded:
        tokens = model.generate(
            models.prompt(), max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
    return tokens, recorded


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The models are tiny: threads that wait for each other would take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("mixtral", "eager"),
        ("deepseek_v3", "conclave"),
        ("deepseek_v3", "patch"),
        ("gpt_oss", "patch"),
    ],
)
def test_generation_is_recorded_token_by_token(name, way):
    model = load(name)
    if way == "conclave":
        conclave.transformers.set_implementation(model)
    if way == "patch":
        conclave.transformers.patch(model)
    tokens, recorded = serve(model)
    record = recorded.snapshot()
    batch, length = tokens.shape
    assert record.model_type == model.config.model_type and record.layers
    for layer in record.layers:
        rows = record.rows(layer)
        keys = sorted(map(tuple, rows.tokens.tolist()))
        assert keys == [(b, s) for b in range(batch) for s in range(length - 1)]
        assert (rows.topk_ids >= 0).all()
    # Hooks are gone with the session.
    with torch.no_grad():
        model(input_ids=models.prompt())
    assert recorded.snapshot().rows(layer).tokens.shape == rows.tokens.shape


@pytest.mark.parametrize("name", NAMES)
def test_training_replays_the_bits_and_reaches_the_router(name):
    model = load(name)
    tokens, served = serve(model)
    inputs = tokens[:, :-1]
    # Other weights of the routers, as after a step: without a replay choices differ.
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith(("gate.weight", "router.weight")):
                parameter += 0.5 * torch.randn(parameter.shape, generator=torch.manual_seed(1))
    with record_routing(model) as alone:
        model(input_ids=inputs)
    assert not conclave.compare_routing(served, alone).equal
    model.train()
    model.zero_grad()
    with replay_routing(model, served), record_routing(model) as trained:
        logits = model(input_ids=inputs, use_cache=False).logits
        logits.float().square().mean().backward()
    found = conclave.compare_routing(served, trained)
    assert found.equal, found
    routers = [
        parameter
        for path, parameter in model.named_parameters()
        if path.endswith(("gate.weight", "router.weight")) and parameter.dim() == 2
    ]
    assert routers and all(float(r.grad.abs().max()) > 0 for r in routers)


@pytest.mark.parametrize("way", ["conclave", "patch"])
def test_the_library_computes_replayed_routing(way):
    model = load("mixtral")
    tokens, served = serve(model)
    inputs = tokens[:, :-1]
    with torch.no_grad(), replay_routing(model, served):
        expected = model(input_ids=inputs).logits
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith(("gate.weight", "router.weight")):
                parameter += torch.randn(parameter.shape, generator=torch.manual_seed(1))
    if way == "patch":
        conclave.transformers.patch(model)
    else:
        conclave.transformers.set_implementation(model)
    with torch.no_grad():
        with replay_routing(model, served):
            replayed = model(input_ids=inputs).logits
        alone = model(input_ids=inputs).logits
    distance = float((replayed - expected).norm() / expected.norm())
    assert distance < 2e-2 < float((alone - expected).norm() / expected.norm())


@pytest.mark.parametrize("way", ["eager", "patch"])
def test_tokens_that_were_not_recorded_route_themselves_if_asked_to(way):
    model = load("mixtral")
    if way == "patch":
        conclave.transformers.patch(model)
    tokens, served = serve(model)
    with torch.no_grad():
        plain = model(input_ids=tokens).logits
        with (
            pytest.raises(ConclaveValueError, match=f"position {tokens.shape[1] - 1}"),
            replay_routing(model, served),
        ):
            model(input_ids=tokens)
        with replay_routing(model, served, missing="route"):
            replayed = model(input_ids=tokens).logits
    numpy.testing.assert_allclose(replayed.float(), plain.float(), rtol=0.05, atol=0.05)


def without_last_slots(served: Any) -> Any:
    """A record as a call with a smaller top_k leaves it."""
    record = served.snapshot()
    rows = {layer: record.rows(layer) for layer in record.layers}
    slots = next(iter(rows.values())).topk_ids.shape[1]
    few = conclave.RoutingRecorder({n: {"num_experts": 64, "top_k": slots} for n in rows})
    for layer, recorded in rows.items():
        ids = recorded.topk_ids.copy()
        ids[:, -1] = -1
        few.record(layer, ids, recorded.topk_weights, recorded.tokens)
    return few


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_slots_without_an_expert_are_replayed_everywhere(name):
    outs = []
    for way in ("eager", "conclave", "patch"):
        model = load(name)
        with torch.no_grad(), record_routing(model) as served:
            model(input_ids=models.prompt())
        if way == "conclave":
            conclave.transformers.set_implementation(model)
        if way == "patch":
            conclave.transformers.patch(model)
        with torch.no_grad(), replay_routing(model, without_last_slots(served)):
            outs.append(model(input_ids=models.prompt()).logits.float())
        with torch.no_grad():
            assert not torch.allclose(model(input_ids=models.prompt()).logits.float(), outs[-1])
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=0.02, atol=0.02)
    model = load(name)
    with replay_routing(model, without_last_slots(served)):
        model(input_ids=models.prompt()).logits.float().square().mean().backward()


def test_sequences_have_numbers(tmp_path):
    model = load("mixtral")
    batch = len(models.prompt())
    numbers = [10 * n for n in range(1, batch + 1)]
    tokens, served = serve(model, sequences=numbers)
    served.write(tmp_path / "served")
    record = conclave.RoutingRecord.open(tmp_path / "served")
    layer = record.layers[0]
    assert set(record.rows(layer).tokens[:, 0].tolist()) == set(numbers)
    with torch.no_grad(), replay_routing(model, tmp_path / "served", sequences=numbers[::-1]):
        with record_routing(model, sequences=numbers[::-1]) as again:
            model(input_ids=tokens.flip(0)[:, :-1])
    assert conclave.compare_routing(record, again).equal
    with pytest.raises(ConclaveValueError, match="sequences"):
        serve(model, sequences=[1] * (batch + 1))


def test_what_cannot_be_is_refused():
    model = load("mixtral")
    _, served = serve(model)
    with (
        pytest.raises(ConclaveValueError, match="missing"),
        replay_routing(model, served, missing="x"),
    ):
        pass
    with (
        pytest.raises(ConclaveUnsupportedError, match="no MoE blocks"),
        record_routing(torch.nn.Linear(2, 2)),
    ):
        pass
    other = load("deepseek_v3")
    with pytest.raises(ConclaveValueError), torch.no_grad(), replay_routing(other, served):
        other(input_ids=models.prompt())
    conclave.transformers.patch(model)
    with record_routing(model), pytest.raises(ConclaveValueError, match="already"):
        with record_routing(model):
            pass
    with record_routing(model):
        pass
