"""The experts backend on single modules: layouts, types, ids, updates of weights."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")

from transformers.integrations.moe import use_experts_implementation  # noqa: E402

from conclave.transformers import _experts, _packed, _traits  # noqa: E402
from conclave.transformers._activation import identify_gated, identify_plain  # noqa: E402
from support import compilers  # noqa: E402
from support.devices import seeded  # noqa: E402
from support.vllm_reference import fp8_rows, worst_quantised_error  # noqa: E402

pytestmark = pytest.mark.usefixtures("device")

E, K, H, INNER, T = 6, 3, 40, 28, 11
BARS = {torch.float32: 5e-6, torch.float16: 6e-3, torch.bfloat16: 6e-3}


def config(name: str = "conclave") -> SimpleNamespace:
    return SimpleNamespace(_experts_implementation=name)


def decorate(**traits: bool) -> Any:
    """The decorator with those traits that this version knows; the class gets all of them."""
    import inspect

    known = inspect.signature(use_experts_implementation).parameters
    kept = {name: value for name, value in traits.items() if name in known}

    def wrap(cls: type) -> type:
        wrapped = use_experts_implementation(**kept)(cls)
        init = wrapped.__init__

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            for name, value in traits.items():
                setattr(self, name, value)

        wrapped.__init__ = __init__
        return wrapped

    return wrap


class Plain(torch.nn.Module):
    """Gate and up concatenated, rows first; the usual layout."""

    def __init__(self, config: Any, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.num_experts = E
        self.act_fn = torch.nn.SiLU()
        self.gate_up_proj = parameter(dtype, E, 2 * INNER, H)
        self.down_proj = parameter(dtype, E, H, INNER)

    def expert(self, e: int, x: Any) -> Any:
        return self._apply_gate(x @ self.gate_up_proj[e].double().T) @ self.down_proj[e].double().T

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        """The definition, in float64."""
        x = hidden_states.double()
        out = torch.zeros_like(x)
        for t, slot in itertools.product(range(len(x)), range(K)):
            e = int(top_k_index[t, slot])
            if 0 <= e < self.num_experts:
                out[t] += top_k_weights[t, slot].double() * self.expert(e, x[t])
        return out.to(hidden_states.dtype)


class Interleaved(Plain):
    """As gpt-oss: columns first, gate and up alternate, biases, clamped."""

    def __init__(self, config: Any, dtype: Any = torch.float32) -> None:
        super().__init__(config, dtype)
        self.alpha, self.limit = 1.702, 1.5
        self.gate_up_proj = parameter(dtype, E, H, 2 * INNER)
        self.down_proj = parameter(dtype, E, INNER, H)
        self.gate_up_proj_bias = parameter(dtype, E, 2 * INNER)
        self.down_proj_bias = parameter(dtype, E, H)

    def _apply_gate(self, both: Any) -> Any:
        gate = both[..., ::2].clamp(max=self.limit)
        up = both[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)

    def expert(self, e: int, x: Any) -> Any:
        both = x @ self.gate_up_proj[e].double() + self.gate_up_proj_bias[e].double()
        return self._apply_gate(both) @ self.down_proj[e].double() + self.down_proj_bias[e].double()


class Transposed(Plain):
    """As Aria: columns first, gate before up."""

    def __init__(self, config: Any, dtype: Any = torch.float32) -> None:
        super().__init__(config, dtype)
        self.gate_up_proj = parameter(dtype, E, H, 2 * INNER)
        self.down_proj = parameter(dtype, E, INNER, H)

    def expert(self, e: int, x: Any) -> Any:
        return self._apply_gate(x @ self.gate_up_proj[e].double()) @ self.down_proj[e].double()


class Squared(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.relu(x) ** 2


class NonGated(Plain):
    """As Nemotron-H: one product, squared."""

    def __init__(self, config: Any, dtype: Any = torch.float32) -> None:
        super().__init__(config, dtype)
        del self.gate_up_proj
        self.up_proj = parameter(dtype, E, INNER, H)
        self.act_fn = Squared()

    def expert(self, e: int, x: Any) -> Any:
        return self.act_fn(x @ self.up_proj[e].double().T) @ self.down_proj[e].double().T


LAYOUTS = {
    "plain": decorate()(Plain),
    "interleaved": decorate(is_transposed=True, has_bias=True, is_concatenated=False)(Interleaved),
    "transposed": decorate(is_transposed=True)(Transposed),
    "non_gated": decorate(has_gate=False)(NonGated),
}


def parameter(dtype: Any, *shape: int) -> Any:
    numbers = seeded(sum(shape))
    return torch.nn.Parameter((torch.randn(*shape, generator=numbers) * 0.3).to(dtype))


def call(dtype: Any = torch.float32, tokens: int = T, seed: int = 3) -> tuple[Any, Any, Any]:
    numbers = seeded(seed)
    hidden = torch.randn(tokens, H, generator=numbers).to(dtype)
    ids = torch.stack([torch.randperm(E, generator=numbers)[:K] for _ in range(tokens)] or [])
    return hidden, ids, torch.rand(tokens, K, generator=numbers)


def check(module: Any, arguments: tuple, bar: float) -> None:
    hidden, ids, weights = arguments
    with torch.no_grad():
        actual = module(hidden, ids, weights)
        module.config._experts_implementation = "eager"
        expected = module(hidden.double(), ids, weights)
        module.config._experts_implementation = "conclave"
    assert actual.dtype == hidden.dtype and actual.shape == hidden.shape
    error = (actual.double() - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)
    assert float(error.max()) <= bar


@pytest.fixture(autouse=True)
def forget_warnings() -> Iterator[None]:
    _experts._warned.clear()
    yield


@pytest.fixture
def module(device: str) -> Any:
    return LAYOUTS["plain"](config())


@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_of_every_layout_and_type_equal_float64(layout: str, dtype: Any) -> None:
    module = LAYOUTS[layout](config(), dtype)
    check(module, call(dtype), BARS[dtype])
    assert not _experts._warned


@pytest.mark.parametrize("weights_dtype", BARS, ids=str)
def test_routing_weights_of_every_type_are_taken(module: Any, weights_dtype: Any) -> None:
    hidden, ids, weights = call()
    check(module, (hidden, ids, weights.to(weights_dtype)), BARS[torch.float32])
    check(module, (hidden, ids.int(), weights.to(weights_dtype)), BARS[torch.float32])


def test_weights_of_all_experts_are_gathered(module: Any) -> None:
    hidden, ids, weights = call()
    spread = torch.zeros(T, E).scatter(1, ids, weights)
    with torch.no_grad():
        assert torch.equal(module(hidden, ids, spread), module(hidden, ids, weights))


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_token_counts_change_between_calls(module: Any, tokens: int) -> None:
    check(module, call(tokens=tokens), BARS[torch.float32])


@pytest.mark.parametrize(("tokens", "planned"), [(40, 2048), (3000, 4096), (5000, 8192)])
def test_long_prompts_grow_the_plan(module: Any, tokens: int, planned: int) -> None:
    check(module, call(tokens=tokens), BARS[torch.float32])
    first = _packed.max_tokens(module.down_proj.device)
    assert _packed.packed_experts(module, H).layer.plan["max_tokens"] == max(planned, first)


def test_no_tokens_give_no_rows(module: Any) -> None:
    empty = torch.empty(0, K)
    with torch.no_grad():
        assert module(torch.empty(0, H), empty.long(), empty).shape == (0, H)


def test_sentinel_ids_contribute_nothing(module: Any) -> None:
    hidden, ids, weights = call()
    ids[::2, 1] = E  # another rank's, as the expert-parallel router says it
    ids[1, :] = E + 5
    weights[::2, 1] = 0
    check(module, (hidden, ids, weights), BARS[torch.float32])
    with torch.no_grad():
        assert not module(hidden, ids, weights)[1].any()


def test_strided_inputs_are_taken(module: Any) -> None:
    hidden, ids, weights = call()
    wide = torch.cat([hidden, hidden], dim=1)[:, :H]
    check(module, (wide, ids.T.contiguous().T, weights.T.contiguous().T), BARS[torch.float32])


def test_further_arguments_are_accepted(module: Any) -> None:
    hidden, ids, weights = call()
    with torch.no_grad():
        plain = module(hidden, ids, weights)
        assert torch.equal(module(hidden, ids, weights, num_tokens_per_expert=None), plain)


def test_update_in_place_is_seen(module: Any) -> None:
    check(module, call(), BARS[torch.float32])
    layer = _packed.packed_experts(module, H).layer
    with torch.no_grad():
        module.down_proj.mul_(-2.0)
        module.gate_up_proj[1].zero_()
    check(module, call(), BARS[torch.float32])
    assert _packed.packed_experts(module, H).layer is layer  # packed into the same memory


def test_load_state_dict_is_seen(module: Any) -> None:
    check(module, call(), BARS[torch.float32])
    module.load_state_dict({k: v * 1.5 for k, v in module.state_dict().items()})
    check(module, call(), BARS[torch.float32])


def test_cast_makes_another_layer(module: Any) -> None:
    check(module, call(), BARS[torch.float32])
    module.to(torch.bfloat16)
    check(module, call(torch.bfloat16), BARS[torch.bfloat16])
    module.gate_up_proj = parameter(torch.bfloat16, E, 2 * INNER, H)
    check(module, call(torch.bfloat16), BARS[torch.bfloat16])


def test_float8_groups_of_another_size_are_not_ours_on_a_gpu() -> None:
    module = SimpleNamespace(block_size=(64, 64), activation_scheme="dynamic")
    scale = SimpleNamespace(dtype=torch.float32, is_cuda=True)
    with pytest.raises(_traits.NotOurs, match="64 columns"):
        _traits._quant_of(module, scale)


def test_refusal_ends_with_the_weights_that_it_was_for(module: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, logger="conclave.transformers"), torch.no_grad():
        hidden, ids, weights = call()
        module.double()(hidden.double(), ids, weights)
        assert len(caplog.records) == 1  # float64 is not ours
        assert _experts._why_refused(module)
        module.float()
        check(module, (hidden, ids, weights), BARS[torch.float32])
    assert not _experts._why_refused(module)
    assert _packed.packed_experts(module, H).layer is not None


def test_thread_between_does_not_bring_the_former_layer(module: Any, monkeypatch: Any) -> None:
    """Another thread packs new weights between two reads of a call that has begun."""
    check(module, call(), BARS[torch.float32])
    packed = _packed.packed_experts(module, H)
    former, serves, moved = packed.layer, packed._serves, []

    def packs_new_weights(*arguments: Any) -> bool:
        if not moved and threading.current_thread() is threading.main_thread():
            moved.append(True)
            module.down_proj = torch.nn.Parameter(module.down_proj.detach() * 2)
            other = threading.Thread(target=packed.layer_for, args=(module, K))
            other.start()
            other.join()
        return serves(*arguments)

    monkeypatch.setattr(packed, "_serves", packs_new_weights)
    assert packed.layer_for(module, K) is packed.layer is not former


def test_layer_of_another_top_k_is_not_taken_for_this(module: Any) -> None:
    hidden, ids, weights = call()
    check(module, (hidden, ids, weights), BARS[torch.float32])
    packed = _packed.packed_experts(module, H)
    assert packed.layer_for(module, K - 1).spec.top_k == K - 1
    assert packed.layer_for(module, K).spec.top_k == K


def test_layer_that_could_not_be_packed_is_not_served(module: Any, monkeypatch: Any) -> None:
    check(module, call(), BARS[torch.float32])

    def fails(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as context:
        context.setattr(_packed.PackedExperts, "_reload", fails)
        with torch.no_grad():
            module.down_proj.mul_(2.0)
            for _ in range(2):
                with pytest.raises(MemoryError):
                    module(*call())
                context.setattr(_packed.PackedExperts, "_make", fails)
    check(module, call(), BARS[torch.float32])


def test_unchanged_weights_are_packed_once(module: Any, monkeypatch: Any) -> None:
    check(module, call(), BARS[torch.float32])
    monkeypatch.setattr(_packed.PackedExperts, "_pack", lambda *_: pytest.fail("packed again"))
    check(module, call(seed=4), BARS[torch.float32])


def test_packed_layer_dies_with_its_module() -> None:
    gc.collect()  # modules of earlier tests may be in cycles, and must not die meanwhile
    before = len(_packed._packed)
    module = LAYOUTS["plain"](config())
    check(module, call(), BARS[torch.float32])
    assert len(_packed._packed) == before + 1
    del module
    assert len(_packed._packed) == before


def test_copy_of_a_module_has_its_own_layer(module: Any) -> None:
    check(module, call(), BARS[torch.float32])
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.down_proj.zero_()
        assert not other(*call()).any()
    check(module, call(), BARS[torch.float32])


def test_gradients_fall_back_with_one_warning(module: Any, caplog: Any) -> None:
    hidden, ids, weights = call()
    with caplog.at_level(logging.WARNING, logger="conclave.transformers"):
        for _ in range(3):
            module(hidden, ids, weights).sum().backward()
    assert module.down_proj.grad is not None
    assert len(caplog.records) == 1 and "gradients" in caplog.text
    module.requires_grad_(False)
    check(module, (hidden, ids, weights), BARS[torch.float32])


def test_unknown_activation_falls_back_with_its_reason(module: Any, caplog: Any) -> None:
    module.act_fn = torch.nn.Mish()
    with caplog.at_level(logging.WARNING, logger="conclave.transformers"):
        check(module, call(), BARS[torch.float32])
    assert "activation" in caplog.text


def test_shards_of_dtensors_are_used(device: str) -> None:
    distributed = pytest.importorskip("torch.distributed", reason="torch has no distributed")
    if not distributed.is_available():
        pytest.skip("torch has no distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    store = distributed.HashStore()
    backend = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device, (1,))
        module = LAYOUTS["plain"](config())
        whole = copy.deepcopy(module)
        for name in ("gate_up_proj", "down_proj"):
            sharded = distribute_tensor(getattr(module, name).detach(), mesh, [Shard(0)])
            setattr(module, name, torch.nn.Parameter(sharded))
        with torch.no_grad():
            assert torch.equal(module(*call()), whole(*call()))
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("backend", compilers.BACKENDS)
def test_compiled_module_is_one_graph(backend: str) -> None:
    module = LAYOUTS["interleaved"](config())
    hidden, ids, weights = call()
    with torch.no_grad():
        expected = module(hidden, ids, weights)
        fresh = LAYOUTS["interleaved"](config())  # its first call is traced
        compiled = torch.compile(fresh, fullgraph=True, backend=backend)
        assert torch.equal(compiled(hidden, ids, weights), expected)
        assert torch.equal(compiled(*call(tokens=5)), module(*call(tokens=5)))  # another length
        fresh.down_proj.mul_(2.0)
        fresh.down_proj_bias.mul_(2.0)
        doubled = compiled(hidden, ids, weights)
    assert torch.allclose(doubled, 2 * expected, rtol=1e-5, atol=1e-5)


def test_operator_passes_checks_of_torch(module: Any) -> None:
    module.requires_grad_(False)
    weights = [module.gate_up_proj, module.down_proj]
    torch.library.opcheck(
        torch.ops.conclave.experts,
        (*call(), weights, id(module), False),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize(
    ("act", "name"), [("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("silu", "silu")]
)
def test_activations_of_transformers_are_recognised(device: str, act: str, name: str) -> None:
    function = transformers.activations.ACT2FN[act]

    def gated(both: Any) -> Any:
        gate, up = both.chunk(2, dim=-1)
        return function(gate) * up

    assert identify_gated(gated, torch.device(device)).activation.name == name
    assert identify_plain(function, torch.device(device)).activation.name == f"{name}_no_mul"


def test_activation_with_values_of_its_own_type_is_recognised(device: str) -> None:
    weights = torch.ones(1, 1)  # products of two types are refused by torch

    def squared(x: Any) -> Any:
        return torch.relu(x.reshape(-1, 1) @ weights).reshape(x.shape) ** 2

    assert identify_plain(squared, torch.device(device)).activation.name == "relu2_no_mul"


@pytest.mark.parametrize("limit", [0.75, 7.0, 10.0])
def test_activations_with_limits_are_told_apart(limit: float) -> None:
    silu = torch.nn.functional.silu
    owner = SimpleNamespace(some_name=limit)

    def before(both: Any) -> Any:
        gate, up = both.chunk(2, dim=-1)
        return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)

    def after(both: Any) -> Any:
        gate, up = both.chunk(2, dim=-1)
        return silu(gate).clamp(max=limit) * up.clamp(-limit, limit)

    device = torch.get_default_device()
    assert identify_gated(before, device, owner).activation.name == "silu_clamp_before"
    assert identify_gated(after, device, owner).activation.name == "silu_clamp_after"
    assert identify_gated(before, device, owner).activation.limit == limit
    assert identify_gated(before, device) is None  # nothing says what the limit is
    assert identify_plain(torch.tanh, device) is None


def test_float8_experts_equal_their_dequantised_weights() -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(fp8, "ALL_FP8_EXPERTS_FUNCTIONS"):
        pytest.skip("this version dispatches no float8 experts")
    assert "conclave" in fp8.ALL_FP8_EXPERTS_FUNCTIONS
    rows, cols, inner, hidden_size = 128, 128, 128, 192
    fields = SimpleNamespace(
        hidden_size=hidden_size,
        moe_intermediate_size=inner,
        num_local_experts=E,
        num_experts=E,
        hidden_act="silu",
        hidden_activation="silu",
    )
    module = fp8.FP8Experts(fields, block_size=(rows, cols))
    numbers = seeded(2)
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            weight, scale = getattr(module, name), getattr(module, f"{name}_scale_inv")
            weight.copy_((torch.randn(weight.shape, generator=numbers)).to(weight.dtype))
            scale.copy_(0.01 + 0.05 * torch.rand(scale.shape, generator=numbers))
    hidden = torch.randn(T, hidden_size, generator=numbers).bfloat16()
    ids = torch.stack([torch.randperm(E, generator=numbers)[:K] for _ in range(T)])
    weights = torch.rand(T, K, generator=numbers)
    with torch.no_grad():
        actual = fp8.ALL_FP8_EXPERTS_FUNCTIONS["conclave"](module, hidden, ids, weights)
    exact = [dequantised(module, name, rows, cols) for name in ("gate_up_proj", "down_proj")]
    rule = {"quantise": lambda r: fp8_rows(r, cols)}
    assert worst_quantised_error(actual, hidden, *exact, weights, ids, **rule) <= 6e-3


def dequantised(module: Any, name: str, rows: int, cols: int) -> Any:
    """[E, R, C] float64 of blocks with a scale each."""
    weight = getattr(module, name).detach().double()
    scale = getattr(module, f"{name}_scale_inv").detach().double()
    scale = scale.repeat_interleave(rows, 1).repeat_interleave(cols, 2)
    return weight * scale[:, : weight.shape[1], : weight.shape[2]]
