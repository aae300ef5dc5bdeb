"""`patch`, `unpatch`, and whole models with the backend: generate, compile, updates, release."""

from __future__ import annotations

import copy
import gc
import io
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")

import conclave.transformers  # noqa: E402
from conclave import _locks  # noqa: E402
from conclave.errors import ConclaveRuntimeError, ConclaveValueError  # noqa: E402
from conclave.transformers import _block, _experts, _packed, _pair, _patch  # noqa: E402
from support import compilers, models  # noqa: E402
from support.devices import host_only  # noqa: E402
from support.optimisers import FUSED, fused_step  # noqa: E402

pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture(autouse=True)
def forget_warnings() -> Iterator[None]:
    _experts._warned.clear()
    _block._warned.clear()
    yield


def load(name: str, **kwargs: Any) -> Any:
    try:
        return models.load(name, **kwargs)
    except models.NoClass as error:
        pytest.skip(f"transformers {transformers.__version__}: {error}")


def generate(model: Any, tokens: int = 16) -> list[list[int]]:
    with torch.no_grad():
        out = model.generate(
            models.prompt(), max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
    return out.tolist()


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=models.prompt()).logits


@pytest.fixture
def model(device: str) -> Any:
    return load("mixtral")


def test_from_pretrained_takes_the_name() -> None:
    expected = load("mixtral")
    model = load("mixtral", experts="conclave")
    assert generate(model) == generate(expected)
    packed = [module for module in model.modules() if module in _packed._packed]
    assert len(packed) == 2  # generate() kept the name, in prefill and in decode


@host_only
def test_unknown_name_is_still_refused(model: Any) -> None:
    with pytest.raises((ValueError, KeyError)):
        model.set_experts_implementation("conclav")


def test_name_of_the_backend_is_reported(model: Any) -> None:
    conclave.transformers.set_implementation(model)
    assert model.config._experts_implementation == "conclave"


@pytest.mark.parametrize("backend", compilers.BACKENDS)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_compiled_model_with_backend_has_equal_logits(name: str, backend: str) -> None:
    model = load(name)
    expected = logits(model)
    conclave.transformers.set_implementation(model)
    compiled = torch.compile(model, backend=backend)
    assert torch.allclose(logits(compiled), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", compilers.BACKENDS)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_compiled_model_with_patched_blocks_has_equal_logits(name: str, backend: str) -> None:
    model = load(name)
    expected = logits(model)
    assert len(conclave.transformers.patch(model).replaced) == 2
    compiled = torch.compile(model, backend=backend)
    assert torch.allclose(logits(compiled), expected, rtol=1e-4, atol=1e-4)


def test_patched_model_generates_and_is_given_back(model: Any) -> None:
    expected = generate(model)
    own = [layer.mlp.forward for layer in model.model.layers]
    report = conclave.transformers.patch(model)
    assert [m.path for m in report.replaced] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert report.not_replaced == () and "block" in str(report)
    assert report.model_bytes_after == report.model_bytes_before > 0 < report.packed_bytes
    assert generate(model) == expected
    with pytest.raises(ConclaveValueError, match="unpatch"):
        conclave.transformers.patch(model)
    conclave.transformers.unpatch(model)
    conclave.transformers.unpatch(model)
    assert [layer.mlp.forward for layer in model.model.layers] == own
    assert generate(model) == expected


def test_released_model_is_smaller_and_works(model: Any) -> None:
    expected = generate(model)
    report = conclave.transformers.patch(model, release=True)
    assert report.model_bytes_after < report.model_bytes_before
    assert model.model.layers[0].mlp.experts.gate_up_proj.numel() == 0
    assert generate(model) == expected
    with pytest.raises(ConclaveValueError, match="released"):
        conclave.transformers.unpatch(model)


def test_released_block_refuses_gradients(model: Any) -> None:
    conclave.transformers.patch(model, release=True)
    with pytest.raises(ConclaveRuntimeError, match="released"):
        model(input_ids=models.prompt())


def test_update_of_a_patched_model_is_seen(model: Any) -> None:
    conclave.transformers.patch(model)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(0.5)
        model.model.layers[1].mlp.gate.weight.mul_(-1.0)
    actual = logits(model)
    conclave.transformers.unpatch(model)
    assert torch.allclose(actual, logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("way", ["set_implementation", "patch"])
def test_fused_step_is_seen(model: Any, way: str, name: str) -> None:
    before = logits(model)
    getattr(conclave.transformers, way)(model)
    logits(model)
    model(input_ids=models.prompt(), labels=models.prompt()).loss.backward()
    fused_step(name, list(model.parameters()))
    actual = logits(model)
    model.set_experts_implementation("eager")
    conclave.transformers.unpatch(model)
    assert torch.allclose(actual, logits(model), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(actual, before, rtol=1e-2, atol=1e-2)


def patched(name: str, kind: type) -> tuple[Any, Any]:
    """A model and the first of its replacements."""
    model = load(name)
    conclave.transformers.patch(model)
    found = [r for r in _patch._patches[model] if isinstance(r, kind)]
    if not found:
        pytest.skip(f"this version has no {kind.__name__} in {name}")
    return model, found[0]


KINDS = {"mixtral": _block.PatchedBlock, "gemma4_text": _pair.PatchedPair}


def change_experts(model: Any) -> None:
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "experts" in name and "down_proj" in name:
                # Not another size, which a norm behind would take away.
                weights.copy_(weights.roll(1, dims=1))


@pytest.mark.parametrize("name", KINDS)
def test_block_that_could_not_be_packed_is_not_served(name: str, monkeypatch: Any) -> None:
    model, block = patched(name, KINDS[name])
    change_experts(model)

    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as context:
        context.setattr(sys.modules[type(block).__module__], "make_layer", fails)
        for _ in range(2):
            with pytest.raises(MemoryError):
                logits(model)
    actual = logits(model)
    conclave.transformers.unpatch(model)
    assert torch.allclose(actual, logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_write_while_a_block_is_packed_is_seen(name: str, monkeypatch: Any) -> None:
    model, block = patched(name, KINDS[name])
    module = sys.modules[type(block).__module__]
    make = module.make_layer

    def late(*arguments: Any, **named: Any) -> Any:
        made = make(*arguments, **named)
        change_experts(model)
        return made

    change_experts(model)
    with monkeypatch.context() as context:
        context.setattr(module, "make_layer", late)
        logits(model)
    actual = logits(model)
    conclave.transformers.unpatch(model)
    assert torch.allclose(actual, logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_second_thread_waits_for_the_new_layer(name: str, monkeypatch: Any) -> None:
    model, block = patched(name, KINDS[name])
    module, rows = sys.modules[type(block).__module__], torch.zeros(1, 1)
    make, arguments = module.make_layer, (rows,) if KINDS[name] is _block.PatchedBlock else ()
    former, packs, found, threads = block.layer, threading.Event(), [], []

    def second() -> None:
        packs.wait(60)
        found.append(block._fresh_layer(*arguments))

    def slow(*given: Any, **named: Any) -> Any:
        packs.set()
        threads[0].join(0.2)  # it must not have got a layer by now
        assert not found
        return make(*given, **named)

    change_experts(model)
    monkeypatch.setattr(module, "make_layer", slow)
    threads.append(threading.Thread(target=second))
    threads[0].start()
    first = block._fresh_layer(*arguments)
    threads[0].join()
    assert found == [first] and first is not former


@host_only
@pytest.mark.parametrize("name", KINDS)
def test_locks_of_a_patched_model_are_free_in_a_child(name: str) -> None:
    """Without a fork, after which torch may not work: test_watched.py has some."""
    _, block = patched(name, KINDS[name])
    held = [block._lock, _packed._lock]
    for lock in held:
        before = lock.now
        with lock.now:
            _locks._renew_in_child()
            assert lock.now is not before and not lock.now.locked()


def test_gradients_of_a_patched_model_are_the_models_own(model: Any, caplog: Any) -> None:
    conclave.transformers.patch(model)
    with caplog.at_level(logging.WARNING, logger="conclave.transformers"):
        for _ in range(2):
            model(input_ids=models.prompt()).logits.sum().backward()
    assert model.model.layers[0].mlp.experts.down_proj.grad.abs().sum() > 0
    assert len(caplog.records) == 1


@host_only
@pytest.mark.parametrize("name", ["mixtral", "llama4_text"])
def test_compiled_block_leaves_gradients_of_weights_to_the_model(name: str) -> None:
    model = load(name)
    paths = [m.path for m in conclave.transformers.patch(model).replaced if m.replaced == "block"]
    block = model.get_submodule(paths[0])
    hidden = torch.randn(1, 4, model.config.hidden_size)
    compiled = torch.compile(block, backend="aot_eager")
    for run in (block, compiled):
        out = run(hidden)
        out = out[0] if isinstance(out, tuple) else out
        assert out.requires_grad
        out.sum().backward()
        assert block.experts.down_proj.grad.abs().sum() > 0
        block.zero_grad()


@host_only
def test_compiled_released_block_refuses_gradients(model: Any) -> None:
    hidden = torch.randn(1, 4, model.config.hidden_size)
    block = model.model.layers[0].mlp
    with torch.no_grad():
        expected = block(hidden)
    conclave.transformers.patch(model, release=True)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    with pytest.raises(ConclaveRuntimeError, match=r"gradients are required.*released"):
        compiled(hidden.clone().requires_grad_())
    with torch.no_grad():
        assert torch.allclose(compiled(hidden), expected, rtol=1e-4, atol=1e-4)


@host_only
@pytest.mark.parametrize("name", ["mixtral", "gemma4_text"])
def test_patched_model_is_not_copied(name: str) -> None:
    model = load(name)
    expected = logits(model)
    report = conclave.transformers.patch(model)
    for part in (model, model.get_submodule(report.replaced[0].path)):
        for call in (copy.deepcopy, lambda part: torch.save(part, io.BytesIO())):
            with pytest.raises(ConclaveRuntimeError, match="unpatch it first"):
                call(part)
    conclave.transformers.unpatch(model)
    assert torch.equal(logits(copy.deepcopy(model)), expected)


def test_who_listens_to_a_router_hears_its_choices() -> None:
    model, pair = patched("gemma4_text", _pair.PatchedPair)
    heard: list[Any] = []
    pair._router().register_forward_hook(lambda _, args, out: heard.append(out))
    logits(model)
    assert heard and not heard[0][2].is_floating_point()


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_router_logits_of_a_patched_model_are_recorded(name: str) -> None:
    model = load(name)
    with torch.no_grad():
        expected = model(input_ids=models.prompt(), output_router_logits=True).router_logits
        conclave.transformers.patch(model)
        actual = model(input_ids=models.prompt(), output_router_logits=True).router_logits
    assert len(actual) == len(expected) > 0
    for a, e in zip(actual, expected, strict=True):
        assert torch.allclose(a, e, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen2_moe", "deepseek_v3"])
def test_bfloat16_model_with_patched_blocks_is_near_eager(name: str) -> None:
    model = load(name, dtype=torch.bfloat16)
    expected = logits(model).float()
    report = conclave.transformers.patch(model)
    if models.IS_NEWEST:
        assert {m.replaced for m in report.modules} == {"block"}, str(report)
    error = (logits(model).float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.median()) <= 3e-2


def test_block_of_another_formula_keeps_its_routing(model: Any) -> None:
    """A model whose code is not what the published family does."""
    block = model.model.layers[0].mlp
    original = type(block).forward

    class Doubled(type(block)):
        def forward(self, hidden_states: Any) -> Any:
            return 2 * original(self, hidden_states)

    block.__class__ = Doubled
    expected = logits(model)
    report = conclave.transformers.patch(model)
    assert [m.replaced for m in report.modules] == ["experts", "block"]
    assert "another formula" in report.modules[0].reason
    assert torch.allclose(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_model_of_an_unknown_family_keeps_its_routing(model: Any) -> None:
    kind = type(model.config)
    model.config.__class__ = type("Other", (kind,), {"model_type": "never_heard_of"})
    expected = logits(model)
    report = conclave.transformers.patch(model)
    assert {m.replaced for m in report.modules} == {"experts"}
    assert "never_heard_of" in report.modules[0].reason
    assert torch.allclose(logits(model), expected, rtol=1e-4, atol=1e-4)


@host_only
def test_dense_model_is_left_alone() -> None:
    fields = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    report = conclave.transformers.patch(transformers.LlamaForCausalLM(fields))
    assert report.modules == ()


def test_forgotten_model_frees_its_patch() -> None:
    model = load("mixtral")
    conclave.transformers.patch(model)
    gc.collect()  # models of other tests
    count = len(_patch._patches)
    del model
    gc.collect()
    assert len(_patch._patches) == count - 1


def test_example_generates_the_same_tokens(device: str) -> None:
    load("qwen3_moe")  # or this version cannot read it
    example = models.ROOT / "examples" / "generate.py"
    command = [sys.executable, example, "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "16 of 16 greedy tokens" in done.stdout
    assert done.stdout.count("tokens/s") == 4
