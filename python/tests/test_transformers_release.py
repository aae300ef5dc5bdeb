"""Models whose own copy of the experts is freed, and weights whose changes must be seen."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")

import conclave.transformers  # noqa: E402
from conclave.errors import ConclaveRuntimeError, ConclaveValueError  # noqa: E402
from conclave.transformers import _experts  # noqa: E402
from support import models  # noqa: E402
from support.devices import host_only, is_on_gpu  # noqa: E402

pytestmark = pytest.mark.usefixtures("device")


def load(name: str) -> Any:
    try:
        return models.load(name)
    except models.NoClass as error:
        pytest.skip(f"transformers {transformers.__version__}: {error}")


def with_backend(model: Any) -> None:
    conclave.transformers.set_implementation(model, release=True)


def with_patch(model: Any) -> None:
    conclave.transformers.patch(model, release=True)


# In Gemma 4 the decoder layer calls router and experts one after the other.
WAYS = pytest.mark.parametrize("release", [with_backend, with_patch])
NAMES = pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "gemma4_text"])


def require_a_copy(name: str, release: Callable) -> None:
    if is_on_gpu() and release is with_backend and name != "gpt_oss":
        pytest.skip("a GPU reads these weights where the model has them: nothing can be freed")


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=models.prompt()).logits


def weight_bytes(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def state_of(model: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def close(actual: Any, expected: Any) -> bool:
    return bool(torch.allclose(actual, expected, rtol=1e-4, atol=1e-4))


@NAMES
@WAYS
def test_released_model_is_smaller_and_is_not_saved(name: str, release: Callable) -> None:
    require_a_copy(name, release)
    model = load(name)
    expected, before = logits(model), weight_bytes(model)
    release(model)
    assert close(logits(model), expected)
    assert weight_bytes(model) < 0.8 * before
    with pytest.raises(ConclaveRuntimeError, match="released"):
        model.state_dict()
    _experts._warned.clear()
    assert close(logits(model), expected) and not _experts._warned


@NAMES
@WAYS
def test_released_model_takes_new_weights(name: str, release: Callable) -> None:
    require_a_copy(name, release)
    model = load(name)
    state = state_of(model)
    changed = {n: t * 1.25 if "experts" in n else t for n, t in state.items()}
    model.load_state_dict(changed)
    expected = logits(model)
    model.load_state_dict(state)
    release(model)
    logits(model)
    size = weight_bytes(model)
    model.load_state_dict(changed)
    assert close(logits(model), expected)
    assert weight_bytes(model) == size  # released again
    model.load_state_dict(state, assign=True)  # other parameters
    assert not close(logits(model), expected)


def released_module() -> Any:
    model = load("mixtral")
    with_backend(model)
    logits(model)
    return model


@host_only
def test_released_weights_are_not_read() -> None:
    model = released_module()
    experts = model.model.layers[0].mlp.experts
    for call in (
        lambda: model(input_ids=models.prompt()),  # with gradients
        lambda: conclave.transformers.set_implementation(model, "eager"),
        lambda: conclave.transformers.forget(experts),
        lambda: logits(copy.deepcopy(model)),  # a copy has no packed layer
    ):
        with pytest.raises(ConclaveRuntimeError, match="released"):
            call()
    with pytest.raises(ConclaveValueError, match="release"):
        conclave.transformers.set_implementation(model, "eager", release=True)


@host_only
def test_a_part_of_the_weights_is_not_enough() -> None:
    model = released_module()
    experts = model.model.layers[0].mlp.experts
    with pytest.raises(RuntimeError):  # of torch: the other is missing
        experts.load_state_dict({"down_proj": torch.zeros(experts_shape(model))})
    with pytest.raises(ConclaveRuntimeError, match="gate_up_proj was released"):
        logits(model)


@host_only
@WAYS
def test_released_model_is_not_moved_copied_or_written(release: Callable) -> None:
    model = load("mixtral")
    state, expected = state_of(model), logits(model)
    release(model)
    logits(model)
    for call in (
        lambda: model.double(),
        lambda: model.to("meta"),
        lambda: model.model.layers[0].mlp.experts.half(),
        lambda: model.share_memory(),
        lambda: torch.save(model, io.BytesIO()),
        lambda: torch.save(model.model.layers[0].mlp.experts, io.BytesIO()),
        lambda: copy.deepcopy(model.model.layers[0].mlp.experts),
    ):
        with pytest.raises(ConclaveRuntimeError, match=r"released|patched"):
            call()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.device.type for p in model.parameters()} == {"cpu"}  # nothing was half done
    assert close(logits(model), expected)
    model.load_state_dict(state)
    model.bfloat16().load_state_dict(state)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}  # not what it was when freed
    error = (logits(model).float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.median()) <= 3e-2


@host_only
def test_model_with_its_weights_back_is_copied_and_written() -> None:
    model = released_module()
    expected = logits(model)
    model.load_state_dict(state_of(load("mixtral")))
    conclave.transformers.set_implementation(model)  # stays in memory from now on
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert close(logits(other), expected)
        assert other.double()._apply._module() is other and other.dtype == torch.float64
    assert model.dtype == torch.float32


@host_only
@WAYS
@pytest.mark.parametrize("kind", ["meta", "sparse"])
def test_values_that_cannot_be_copied_leave_no_weights(release: Callable, kind: str) -> None:
    model = load("mixtral")
    state, expected = state_of(model), logits(model)
    release(model)
    logits(model)
    name = "model.layers.0.mlp.experts.down_proj"
    bad = state[name].to_sparse() if kind == "sparse" else state[name].to("meta")
    with pytest.raises(RuntimeError, match="down_proj"):
        model.load_state_dict(state | {name: bad})
    assert model.get_parameter(name).numel() == 0
    for call in (lambda: logits(model), model.state_dict):
        with pytest.raises(ConclaveRuntimeError, match="released"):
            call()
    model.load_state_dict(state)
    assert close(logits(model), expected)


@host_only
def test_backend_of_transformers_is_not_selected_without_weights() -> None:
    model = released_module()
    if not hasattr(model, "set_experts_implementation"):
        pytest.skip(f"transformers {transformers.__version__} cannot select one")
    with pytest.raises(ConclaveRuntimeError, match="released"):
        model.set_experts_implementation("eager")
    model.set_experts_implementation("conclave")
    logits(model)


def experts_shape(model: Any) -> tuple[int, int, int]:
    config = model.config
    return config.num_local_experts, config.hidden_size, config.intermediate_size


@host_only
def test_experts_alone_are_released_at_their_first_call() -> None:
    model = load("mixtral")
    expected, before = logits(model), weight_bytes(model)
    model.config.__class__ = type("Other", (type(model.config),), {"model_type": "unheard_of"})
    conclave.transformers.patch(model, release=True)
    conclave.transformers.unpatch(model)  # not called yet
    conclave.transformers.patch(model)
    assert close(logits(model), expected) and weight_bytes(model) == before
    conclave.transformers.unpatch(model)
    report = conclave.transformers.patch(model, release=True)
    assert {m.replaced for m in report.replaced} == {"experts"}
    assert close(logits(model), expected) and weight_bytes(model) < 0.8 * before
    with pytest.raises(ConclaveValueError, match="released"):
        conclave.transformers.unpatch(model)


@host_only
def test_released_model_compiles() -> None:
    model = load("mixtral")
    expected = logits(model)
    with_backend(model)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):  # the first call packs and frees
        assert close(logits(compiled), expected)
    assert model.model.layers[0].mlp.experts.down_proj.numel() == 0


@host_only
def test_compiled_gradients_of_released_weights_are_refused() -> None:
    model = load("mixtral")
    with_backend(model)
    expected = logits(model)
    compiled = torch.compile(model, backend="aot_eager")
    ids = torch.zeros((1, 4), dtype=torch.int64, device=model.device)
    with torch.enable_grad(), pytest.raises(ConclaveRuntimeError, match="was released"):
        compiled(ids)
    assert close(logits(compiled), expected)


@host_only
def test_tied_weights_are_kept() -> None:
    model = load("mixtral")
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.down_proj = first.down_proj
    expected = logits(model)
    with_backend(model)
    assert close(logits(model), expected)
    assert first.down_proj.numel() > 0 and second.gate_up_proj.numel() > 0


# Changes that must be seen.


@pytest.mark.parametrize("patched", [False, True])
def test_another_parameter_is_seen(patched: bool) -> None:
    model = load("mixtral")
    experts = model.model.layers[0].mlp.experts
    other = torch.nn.Parameter(experts.down_proj.detach() * -3.0)
    with torch.no_grad():
        reference = copy.deepcopy(model)
        reference.model.layers[0].mlp.experts.down_proj = other
        expected = logits(reference)
    if patched:
        conclave.transformers.patch(model)
    else:
        conclave.transformers.set_implementation(model)
    logits(model)
    experts.down_proj = other
    assert close(logits(model), expected)


@host_only
def test_other_memory_at_the_same_address_is_seen() -> None:
    """A parameter that was freed may leave its address, and its version, to the next one."""
    model = load("mixtral")
    conclave.transformers.set_implementation(model)
    experts = model.model.layers[0].mlp.experts
    memory = experts.down_proj.detach().numpy().copy()
    experts.down_proj = torch.nn.Parameter(torch.from_numpy(memory), requires_grad=False)
    first = logits(model)
    memory *= 2  # no tensor counts this
    former = experts.down_proj
    experts.down_proj = torch.nn.Parameter(torch.from_numpy(memory), requires_grad=False)
    assert former.data_ptr() == experts.down_proj.data_ptr()
    assert former._version == experts.down_proj._version
    changed = logits(model)
    conclave.transformers.set_implementation(model, "eager")
    assert close(changed, logits(model)) and not close(changed, first)


def inference_model() -> Any:
    with torch.inference_mode():
        model = load("mixtral")
        for module in model.modules():
            for name, weights in module._parameters.items():
                if weights is not None:
                    module._parameters[name] = torch.nn.Parameter(weights.clone(), False)
    assert all(weights.is_inference() for weights in model.parameters())
    return model


@host_only
def test_weights_of_inference_mode_run_eagerly_unless_released(caplog: Any) -> None:
    model = inference_model()
    expected = logits(model)
    _experts._warned.clear()
    conclave.transformers.set_implementation(model)
    assert torch.equal(logits(model), expected) and "inference_mode" in caplog.text
    report = conclave.transformers.patch(model)
    assert not report.replaced and "inference_mode" in report.not_replaced[0].reason
    with_backend(model)
    _experts._warned.clear()
    assert close(logits(model), expected) and not _experts._warned


def test_writes_in_inference_mode_are_seen() -> None:
    model = load("mixtral")
    conclave.transformers.set_implementation(model)
    logits(model)
    with torch.inference_mode():
        model.model.layers[1].mlp.experts.down_proj.mul_(-0.5)
        changed = model(input_ids=models.prompt()).logits
    conclave.transformers.set_implementation(model, "eager")
    assert close(changed, logits(model))
