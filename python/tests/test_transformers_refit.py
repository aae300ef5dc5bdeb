"""New weights for patched models while they serve: one transaction for all layers."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")

from conclave import errors  # noqa: E402
from conclave.transformers import patch, refit, refit_epoch, unpatch  # noqa: E402
from conclave.transformers._turns import Turns  # noqa: E402
from support import models  # noqa: E402
from support.devices import host_only  # noqa: E402

pytestmark = pytest.mark.usefixtures("device")

# Whole blocks, and whether they are released: without and with shared experts; a pair that a
# decoder layer calls.
WHOLE = [("mixtral", False), ("mixtral", True), ("qwen2_moe", False), ("gemma4", True)]


def load(name: str, factor: float = 1.0) -> Any:
    try:
        model = models.load(name)
    except models.NoClass as error:
        pytest.skip(f"transformers {transformers.__version__}: {error}")
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.mul_(factor)
    return model


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=models.prompt()).logits


def copied(model: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def served(name: str, factor: float) -> Any:
    """What a patched model of these weights computes."""
    model = load(name, factor)
    patch(model)
    return logits(model)


@pytest.mark.parametrize(("name", "release"), WHOLE)
def test_a_state_dict_becomes_the_models(name: str, release: bool) -> None:
    state = copied(load(name, 1.25))
    expected = served(name, 1.25)
    model = load(name)
    report = patch(model, release=release)
    assert {m.replaced for m in report.modules} == {"block"}
    before = logits(model)
    size = sum(p.numel() for p in model.parameters())
    with refit(model, epoch=7, threads=2) as new:
        new.stage(state)
        assert new.is_staged
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), expected)
    assert refit_epoch(model) == 7
    assert sum(p.numel() for p in model.parameters()) == size  # released stays released
    if release:
        return
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[key]), key
    unpatch(model)
    assert torch.allclose(logits(model), logits(load(name, 1.25)), rtol=1e-4, atol=1e-4)


def test_tensors_come_in_pieces_and_of_chosen_blocks() -> None:
    state = copied(load("mixtral", 0.5))
    model = load("mixtral")
    path, *others = [m.path for m in patch(model, release=True).replaced]
    assert others
    before = logits(model)
    with refit(model, paths=[path]) as new:
        names = sorted(name for name in state if name.startswith(path))
        for name in names[:-1]:
            new.stage({name: state[name].double()})  # of another type
            assert not new.is_staged
        with pytest.raises(errors.ConclaveRuntimeError, match=names[-1]):
            new.commit()
        assert torch.equal(logits(model), before)
        new.stage({names[-1]: state[names[-1]]})
    expected = load("mixtral")
    expected.load_state_dict({name: state[name] for name in names}, strict=False)
    patch(expected)
    assert torch.equal(logits(model), logits(expected))
    assert refit_epoch(model) == 1


def test_forwards_wait_while_weights_are_exchanged() -> None:
    turns, entered = Turns(), threading.Event()

    def forward() -> None:
        with turns.running():
            entered.set()

    late = threading.Thread(target=forward)
    with turns.closed():
        late.start()
        assert not entered.wait(0.1)
    late.join(20)
    assert entered.is_set()


@host_only
def test_a_directory_that_lacks_a_tensor_is_refused(tmp_path: Any) -> None:
    files = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    directory = tmp_path / "mixtral"
    shutil.copytree(models.MODELS / "mixtral", directory)
    for path in directory.glob("model*.safetensors"):
        held = files.load_file(path)
        held = {name: tensor for name, tensor in held.items() if "q_proj" not in name}
        files.save_file(held, path, metadata={"format": "pt"})
    model = load("mixtral")
    patch(model)
    before = logits(model)
    with pytest.raises(errors.ConclaveCheckpointError, match="lacks"), refit(model) as new:
        new.stage(directory)
    assert torch.equal(logits(model), before)


@host_only
def test_a_directory_becomes_the_models(tmp_path: Any) -> None:
    model = load("mixtral", 1.5)
    patch(model, release=True)
    assert not torch.equal(logits(model), served("mixtral", 1.0))
    with refit(model) as new:
        new.stage(models.MODELS / "mixtral")
    assert torch.equal(logits(model), served("mixtral", 1.0))
    for directory, kind in (
        (tmp_path, errors.ConclaveCheckpointError),
        (tmp_path / "none", errors.ConclaveFileNotFoundError),
        (models.MODELS / "qwen2_moe", errors.Error),
    ):
        with pytest.raises(kind), refit(model) as new:
            new.stage(directory)
    assert torch.equal(logits(model), served("mixtral", 1.0))
    assert refit_epoch(model) == 1


@host_only
def test_forwards_beside_refits_see_one_of_both() -> None:
    states = [copied(load("mixtral", factor)) for factor in (1.0, 1.25)]
    expected = [served("mixtral", factor) for factor in (1.0, 1.25)]
    model = load("mixtral")
    patch(model)
    wrong: list[Any] = []
    stopped = threading.Event()

    def serve() -> None:
        while not stopped.is_set():
            out = logits(model)
            if not any(torch.equal(out, one) for one in expected):
                wrong.append(out)

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for step in range(1, 9):
            with refit(model, keeps_memory=step % 2 == 0) as new:
                new.stage(states[step % 2])
            assert torch.equal(logits(model), expected[step % 2])
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert refit_epoch(model) == 8


def test_what_fails_keeps_the_old_weights() -> None:
    model = load("mixtral")
    state = copied(load("mixtral", 1.25))
    for call in (refit, refit_epoch):
        with pytest.raises(errors.ConclaveValueError, match="patched"):
            call(model)
    path = patch(model).replaced[0].path
    before = logits(model)
    name = next(n for n in state if n.startswith(path))
    with pytest.raises(ZeroDivisionError), refit(model) as new:
        new.stage(state)
        raise ZeroDivisionError
    for bad, kind in (
        ({"lm_head.wait": state[name]}, errors.ConclaveValueError),
        ({name: state[name][:-1]}, errors.ConclaveValueError),
        ({name: state[name].to("meta")}, errors.ConclaveValueError),
        ({name: state[name].long()}, errors.ConclaveValueError),
        ({name: state[name].tolist()}, errors.ConclaveTypeError),
    ):
        with pytest.raises(kind), refit(model) as new:
            new.stage(state)
            new.stage(bad)
    for arguments in ({"paths": ["model.layers.9"]}, {"mode": "in_place"}, {"epoch": 0}):
        with pytest.raises(errors.ConclaveValueError, match=next(iter(arguments))):
            refit(model, **arguments)
    for arguments in ({"paths": path}, {"epoch": "7"}, {"threads": None}, {"keeps_memory": 1}):
        with pytest.raises(errors.ConclaveTypeError, match=next(iter(arguments))):
            refit(model, **arguments)
    first = refit(model)
    with pytest.raises(errors.ConclaveTypeError, match="weights"):
        first.stage([state])
    with pytest.raises(errors.ConclaveRuntimeError, match="under way"):
        refit(model)
    first.stage(state)
    if torch.get_default_device().type == "cpu":  # on a GPU they are packed from the new values
        with torch.no_grad():
            next(model.get_submodule(path).parameters()).mul_(1)
        with pytest.raises(errors.ConclaveRuntimeError, match="changed while"):
            first.commit()
    first.rollback()
    for call in (first.commit, lambda: first.stage(state)):
        with pytest.raises(errors.ConclaveRuntimeError, match="rolled back"):
            call()
    assert torch.equal(logits(model), before)
    assert refit_epoch(model) == 0
    unpatch(model)
    assert "forward" not in model.__dict__


def test_a_commit_within_a_forward_is_refused() -> None:
    model = load("mixtral")
    patch(model)
    state = copied(model)
    new = refit(model)
    new.stage(state)
    block = model.model.layers[0].self_attn
    handle = block.register_forward_hook(lambda *_: new.commit())
    with pytest.raises(errors.ConclaveRuntimeError, match="within a forward"):
        logits(model)
    handle.remove()
    new.commit()
    assert refit_epoch(model) == 1


def test_experts_that_were_replaced_alone_change_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from conclave.transformers import _patch
    from conclave.transformers._traits import NotOurs

    def refuse(*_: Any) -> None:
        raise NotOurs("told to")

    state, model = copied(load("mixtral", 1.25)), load("mixtral")
    other = load("mixtral", 1.25)
    monkeypatch.setattr(_patch, "_replace_block", refuse)
    for one in (model, other):
        assert {m.replaced for m in patch(one, release=one is model).modules} == {"experts"}
    before = logits(model)
    with contextlib.suppress(ZeroDivisionError), refit(model) as new:
        new.stage(state)
        raise ZeroDivisionError
    assert torch.equal(logits(model), before)
    size = sum(p.numel() for p in model.parameters())
    with refit(model) as new:
        new.stage(state)
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), logits(other))
    assert sum(p.numel() for p in model.parameters()) == size


def test_models_with_a_balancer_are_refused() -> None:
    model = load("mixtral")
    patch(model, eplb=True)
    with pytest.raises(errors.ConclaveUnsupportedError, match="eplb"):
        refit(model)
    unpatch(model)


@host_only
@pytest.mark.skipif(not models.IS_NEWEST, reason="plans of this version are of other kinds")
def test_ranks_commit_together_or_not_at_all(tmp_path: Any) -> None:
    from support import sharded_work as work
    from support.process_ranks import Failed, run_ranks

    plans = [("qwen2_moe", {"tp_size": 2}), ("mixtral", {"tp_size": 2, "ep_size": 2})]
    ranks = run_ranks(work.refitted, 2, tmp_path, plans, timeout=200)
    logging.disable(logging.WARNING)
    for rank, found in enumerate(ranks):
        assert not isinstance(found, Failed), found.trace
        for (name, _), of_plan in zip(plans, found, strict=True):
            raised, peer, refused, kept, changed, given_back = of_plan
            assert (raised, peer) == (("ConclaveCommError", 1), ("ZeroDivisionError", -1))[rank]
            assert len(refused) == 4
            for error, of_rank, text in refused:
                if rank == 1:
                    assert of_rank == -1
                    continue
                assert (error, of_rank) == ("ConclaveCommError", 1)
                assert "whether the refit goes on: " in text  # not a deadline, and why
            expected = work.made(name)
            assert torch.allclose(kept, work.logits_of(expected), rtol=1e-3, atol=1e-3)
            with torch.no_grad():
                for weights in expected.parameters():
                    weights.mul_(1.25)
            for actual in (changed, given_back):
                assert torch.allclose(actual, work.logits_of(expected), rtol=1e-3, atol=1e-3)
    logging.disable(logging.NOTSET)
