"""Experts of patched models that follow their load, on one rank and between ranks of a plan."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")
if not torch.distributed.is_available():
    pytest.skip("this build of torch has no torch.distributed", allow_module_level=True)

import conclave  # noqa: E402
import conclave.transformers  # noqa: E402
from conclave.transformers import EplbOptions, balancer_of  # noqa: E402
from support import eplb_work as work  # noqa: E402
from support import models, sharded_work, survey  # noqa: E402
from support.process_ranks import Failed, run_ranks  # noqa: E402

if not models.IS_NEWEST:
    pytest.skip("plans of this version are of other kinds", allow_module_level=True)


@pytest.fixture(scope="module")
def alone() -> Any:
    """What one process computes, and counts."""
    return of_one_process(work.NAME)


@pytest.fixture(scope="module")
def ranks(alone: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes found, by part."""
    folder = tmp_path_factory.mktemp("eplb") / "ranks"
    found = run_ranks(work.every_part, 2, folder, alone[1], timeout=400)
    for one in found:
        assert not isinstance(one, Failed), one.trace
    return found


def of_part(ranks: list[dict[str, Any]], name: str) -> list[Any]:
    return [found[name] for found in ranks]


def of_one_process(name: str) -> tuple[list[Any], dict[str, tuple[int, ...]], Any]:
    """Results of blocks, loads of a prompt and its tokens, and the results of the whole model."""
    model = sharded_work.made(name)
    conclave.transformers.patch(model, eplb=True)
    result = sharded_work.results(model)
    loads = balancer_of(model).loads()
    return work.block_results(model, list(loads)), loads, result


def require_equal(actual: Any, expected: Any) -> None:
    assert (actual[0] - expected[0]).norm() <= survey.BAR * expected[0].norm()
    assert actual[1] == expected[1]


def test_experts_move_at_once_and_results_keep_their_bits(alone: Any, ranks: Any) -> None:
    blocks, loads, _ = alone
    ranks = of_part(ranks, "at once")
    for found in ranks:
        assert set(found["kinds"]) == {"block"}
        assert found["steps"] == 1 + 4  # a prompt, and the tokens that follow it
        require_equal(found["first"], found["own"])
        assert work.is_same(found["blocks"], blocks)  # those of one process, bit for bit
        # Beside the model's tokens the blocks' own, of which most went to the same experts.
        for path, load in loads.items():
            extra = (1 + 9 + 130) * 3
            assert sum(found["loads"][path]) == sum(load) + extra
        assert found["is_same"]
        assert torch.equal(found["moved"][0], found["first"][0])
        assert found["moved"][1] == found["first"][1]
        require_equal(found["changed"], found["given_back"])
        assert work.held(found["before"]) != work.held(found["after"]) == work.held(found["kept"])
        assert found["status"].experts_moved > 0
        assert not found["status"].is_moving
        before, after = found["balancedness"]
        assert before < after <= 1.0
        assert all(
            len(slots.logical_of) == 12 + work.REDUNDANT for slots in found["after"].values()
        )
    for name in ("loads", "after", "balancedness"):
        assert ranks[0][name] == ranks[1][name]


def test_experts_move_beside_forwards(alone: Any, ranks: Any) -> None:
    blocks, loads, _ = alone
    ranks = of_part(ranks, "beside forwards")
    for found in ranks:
        assert found["same"]
        assert work.is_same(found["blocks"], blocks)
        assert found["status"].rebalances == 1
        assert not found["status"].is_moving
        assert found["status"].experts_moved > 0
        for path, load in loads.items():
            first = conclave.balance_experts(
                load, num_ranks=2, num_redundant_experts=work.REDUNDANT
            )
            assert work.held(found["placed"])[path] == work.held({path: first})[path]
        assert work.held(found["after"]) != work.held(found["placed"])
    assert ranks[0]["after"] == ranks[1]["after"]


def test_slices_of_experts_are_counted_and_stay(ranks: Any) -> None:
    for found in of_part(ranks, "slices"):
        assert found["same"]
        assert all(any(load) for load in found["loads"].values())
        assert found["moved"] == 0
        assert set(found["ranks"]) == {1}
        assert found["balancedness"] == 1.0


def test_what_fits_no_block_is_refused_and_a_rank_that_leaves_is_named(ranks: Any) -> None:
    ranks = of_part(ranks, "faults")
    said = {
        "short": "initial_load: expected the rows of 12 experts",
        "negative": "load",
        "three ranks": "expected 12 experts on 2 ranks",
        "redundant": "num_redundant_experts: expected 0",
        "missing": "found none of expert 1",
        "path": "model.layers.77.mlp",
    }
    for found in ranks:
        for name, text in said.items():
            kind, message = found[name]
            assert kind == "ConclaveValueError", name
            assert text in message, name
        assert found["slots"]
    peer, text = ranks[0]["left"]
    assert peer == 1, text


def test_one_rank_counts_and_stays_as_it_is() -> None:
    plain = sharded_work.made("mixtral")
    conclave.transformers.patch(plain)
    expected = sharded_work.results(plain)
    model = sharded_work.made("mixtral")
    options = EplbOptions(num_redundant_experts=3, window_size=2, step_interval=2)
    conclave.transformers.patch(model, eplb=options)
    balancer = balancer_of(model)
    assert all(not any(load) for load in balancer.loads().values())  # the comparison does not count
    assert torch.equal(sharded_work.results(model)[0], expected[0])
    tokens = models.prompt().numel() + 4 * models.prompt().shape[0]
    tokens += models.prompt().numel() - models.prompt().shape[0]
    for load in balancer.loads().values():
        assert len(load) == 6
        assert sum(load) == 2 * tokens
    balancer.rebalance()
    assert balancer.balancedness() == 1.0
    assert balancer.status.steps == 6
    assert balancer.status.rebalances >= 2
    assert balancer.status.experts_moved == 0
    assert torch.equal(sharded_work.results(model)[0], expected[0])
    with torch.no_grad():  # what is packed again is counted anew
        for weights in model.parameters():
            weights.mul_(1.25)
        model(models.prompt())
    assert all(sum(load) == 2 * models.prompt().numel() for load in balancer.loads().values())
    assert balancer.status.steps > 6
    conclave.transformers.unpatch(model)
    with pytest.raises(conclave.ConclaveRuntimeError):
        balancer.step()
    with pytest.raises(conclave.ConclaveValueError, match="eplb"):
        balancer_of(model)
    with torch.no_grad():
        model(models.prompt())  # no hook is left


def test_a_compiled_model_counts_and_ends_no_steps_by_itself() -> None:
    model = sharded_work.made("mixtral")
    conclave.transformers.patch(model, eplb=True)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(models.prompt(), use_cache=False)
    balancer = balancer_of(model)
    assert balancer.status.steps == 0
    balancer.step()
    assert balancer.status.steps == 1
    assert all(sum(load) == 2 * models.prompt().numel() for load in balancer.loads().values())


def test_the_balancer_of_a_model_goes_with_it() -> None:
    model = sharded_work.made("mixtral")
    conclave.transformers.patch(model, eplb=True)
    balancer = weakref.ref(balancer_of(model))
    del model
    gc.collect()
    assert balancer() is None


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"num_redundant_experts": -1}, "num_redundant_experts"),
        ({"num_redundant_experts": 1024}, "num_redundant_experts"),
        ({"window_size": 0}, "window_size"),
        ({"step_interval": 0}, "step_interval"),
        ({"log_balancedness_interval": 0}, "log_balancedness_interval"),
        ({"num_nodes": 0}, "num_nodes"),
        ({"rule": "fair"}, "rule"),
        ({"placement": {}, "initial_load": [1.0]}, "placement"),
    ],
)
def test_options_name_the_field_that_is_wrong(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(conclave.ConclaveValueError, match=f"^{name}"):
        EplbOptions(**fields)


def test_a_model_without_whole_blocks_cannot_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from conclave.transformers import _patch
    from conclave.transformers._traits import NotOurs

    def refuse(*_: Any) -> Any:
        raise NotOurs("told to")

    monkeypatch.setattr(_patch, "_replace_block", refuse)
    model = sharded_work.made("mixtral")
    with pytest.raises(conclave.ConclaveUnsupportedError, match="told to"):
        conclave.transformers.patch(model, eplb=True)
    with pytest.raises(conclave.ConclaveTypeError, match="eplb"):
        conclave.transformers.patch(model, eplb="steady")  # type: ignore[arg-type]
    monkeypatch.undo()
    logging.disable(logging.NOTSET)
    conclave.transformers.patch(model)  # it was left as it had been
