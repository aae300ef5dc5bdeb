"""`patch` on models whose experts are modules of a list, as transformers 4 and remote code have."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")

import conclave.transformers as library  # noqa: E402
from conclave.errors import ConclaveRuntimeError, ConclaveUnsupportedError  # noqa: E402
from conclave.transformers import _block, _dispatch  # noqa: E402
from conclave.transformers._list_experts import read_list  # noqa: E402
from conclave.transformers._traits import NotOurs  # noqa: E402
from support import compilers  # noqa: E402
from support import remote_code as remote  # noqa: E402

pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture(autouse=True)
def forget_warnings() -> Iterator[None]:
    _block._warned.clear()
    _dispatch._warned.clear()
    yield


def mixtral() -> Any:
    config = remote.config("MixtralConfig", num_local_experts=remote.E)
    return remote.Model(config, remote.MixtralBlock, "block_sparse_moe")


def qwen() -> Any:
    config = remote.config(
        "Qwen2MoeConfig",
        num_experts=remote.E,
        shared_expert_intermediate_size=remote.INNER + 8,
        norm_topk_prob=False,
    )
    return remote.Model(config, remote.QwenBlock)


def deepseek() -> Any:
    config = remote.config(
        "DeepseekV3Config",
        n_routed_experts=remote.E,
        n_shared_experts=1,
        first_k_dense_replace=0,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    return remote.Model(config, remote.DeepseekBlock)


FAMILIES = {"mixtral": mixtral, "qwen": qwen, "deepseek": deepseek}


def unknown(block: type, **fields: Any) -> Any:
    fields = {"hidden_act": "silu", "routed_scaling_factor": 2.5} | fields
    return remote.Model(remote.config("unknown", **fields), block)


def with_mlp(mlp: type, block: type = remote.MixtralBlock) -> type:
    return type(f"{mlp.__name__}Block", (block,), {"mlp": mlp})


class SigmoidBlock(remote.MixtralBlock):
    """Sigmoid scores, as they are, times a constant; a shared expert without a gate."""

    mlp = remote.Mlp

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.routed_scaling_factor = config.routed_scaling_factor
        self.shared_mlp = remote.Mlp(config)

    def forward(self, hidden_states: Any) -> Any:
        rows = hidden_states.view(-1, remote.H)
        weights, ids = torch.topk(self.gate(rows).float().sigmoid(), self.top_k, dim=-1)
        out = remote.loop(self.experts, rows, ids, weights * self.routed_scaling_factor)
        return out.view(hidden_states.shape) + self.shared_mlp(hidden_states)


UNKNOWN: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: unknown(remote.MixtralBlock),
    "qwen": lambda: unknown(remote.QwenBlock),
    "deepseek": lambda: unknown(remote.DeepseekBlock),
    "sigmoid": lambda: unknown(SigmoidBlock),
    "gelu": lambda: unknown(remote.MixtralBlock, hidden_act="gelu"),
    "gelu_tanh": lambda: unknown(remote.MixtralBlock, hidden_act="gelu_pytorch_tanh"),
    "fused": lambda: unknown(with_mlp(remote.FusedMlp)),
    "non_gated": lambda: unknown(with_mlp(remote.NonGatedMlp)),
}


def rows(seed: int = 3, *shape: int) -> Any:
    numbers = torch.Generator("cpu").manual_seed(seed)
    values = torch.randn(*(shape or (2, 7)), remote.H, generator=numbers, device="cpu")
    return values.to(torch.get_default_device())


def results(block: Any, hidden: Any) -> tuple[Any, ...]:
    with torch.no_grad():
        found = block(hidden)
    return found if isinstance(found, tuple) else (found,)


def require_equal(actual: tuple[Any, ...], expected: tuple[Any, ...], bar: float = 1e-5) -> None:
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape
        error = (a.double() - e.double()).norm() / e.double().norm()
        assert float(error) <= bar


def ids() -> Any:
    return torch.arange(12, device=torch.get_default_device()).view(2, 6)


@pytest.mark.parametrize("name", FAMILIES)
def test_block_of_a_published_family_is_replaced(name: str) -> None:
    model = FAMILIES[name]()
    expected, of_block = model(ids()), results(model.block, rows())
    report = library.patch(model)
    assert [m.replaced for m in report.modules] == ["block"], str(report)
    require_equal(results(model.block, rows()), of_block)
    with torch.no_grad():
        require_equal((model(ids()),), (expected,))
    library.unpatch(model)
    assert torch.equal(model(ids()), expected)


@pytest.mark.parametrize("name", UNKNOWN)
def test_experts_of_an_unknown_family_are_stacked(name: str) -> None:
    model = UNKNOWN[name]()
    expected = results(model.block, rows())
    report = library.patch(model)
    assert [m.replaced for m in report.modules] == ["experts"], str(report)
    assert "unheard_of" in report.modules[0].reason
    require_equal(results(model.block, rows()), expected)
    library.unpatch(model)
    assert torch.equal(results(model.block, rows())[0], expected[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_of_short_types_are_stacked(dtype: Any) -> None:
    model = unknown(remote.QwenBlock).to(dtype)
    expected = results(model.block, rows().to(dtype))
    assert library.patch(model).replaced[0].replaced == "experts"
    require_equal(results(model.block, rows().to(dtype)), expected, 2e-2)


class Odd(remote.MixtralBlock):
    """One expert is built otherwise."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.experts[3] = remote.Mlp(config)


class Missing(remote.MixtralBlock):
    """One expert is another process's."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.experts._modules["3"] = None


class Capped(remote.MixtralBlock):
    """What it does with the sum is none of the ways that are known."""

    def forward(self, hidden_states: Any) -> Any:
        out, logits = super().forward(hidden_states)
        return torch.tanh(out), logits


class NoRouter(remote.MixtralBlock):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.chooser = self.gate
        del self.gate

    def forward(self, hidden_states: Any) -> Any:
        self.__dict__["gate"] = self.chooser
        return super().forward(hidden_states)


NOT_OURS = {
    "norm": (with_mlp(remote.NormedMlp), "NormedMlp has norm.weight besides its matrices"),
    "formula": (with_mlp(remote.SineMlp), "SineMlp computes none of the library's formulas"),
    "odd": (Odd, "expert 3 is built otherwise than expert 0"),
    "missing": (Missing, "expert 3 is not here"),
    "capped": (Capped, "another formula"),
    "no router": (NoRouter, "no router"),
}


@pytest.mark.parametrize("name", NOT_OURS)
def test_what_cannot_be_replaced_is_listed_with_its_reason(name: str) -> None:
    block, reason = NOT_OURS[name]
    model = unknown(block)
    report = library.patch(model)
    assert report.replaced == () and len(report.not_replaced) == 1, str(report)
    found = report.not_replaced[0]
    assert found.path == "model.layers.0.mlp" and reason in found.reason
    assert reason in str(report)
    if name != "missing":
        expected = results(unknown(block).block, rows())
        assert torch.equal(results(model.block, rows())[0], expected[0])


class Switch(torch.nn.Module):
    """Experts in a dictionary beside their router, called by a name of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        experts = {f"expert_{i}": remote.Mlp(config) for i in range(remote.E)}
        self.moe_experts = torch.nn.ModuleDict(experts)

    def forward(self, hidden_states: Any) -> Any:
        return self.moe_experts["expert_0"](hidden_states)


def test_experts_by_other_names_are_listed_too() -> None:
    report = library.patch(unknown(Switch))
    assert [m.replaced for m in report.modules] == [""] and "router" in report.modules[0].reason


@pytest.mark.parametrize("make", [mixtral, UNKNOWN["qwen"]])
def test_update_of_a_list_is_seen(make: Callable[[], Any]) -> None:
    model = make()
    before = results(model.block, rows())
    library.patch(model)
    with torch.no_grad():
        for name, weights in model.block.experts.named_parameters():
            if name.startswith("2.") or "down" in name:
                weights.mul_(0.5)
        model.block.gate.weight.mul_(-1.0)
    actual = results(model.block, rows())
    library.unpatch(model)
    require_equal(actual, results(model.block, rows()))
    assert not torch.allclose(actual[0], before[0], rtol=1e-2)


@pytest.mark.parametrize("make", [mixtral, UNKNOWN["qwen"], UNKNOWN["deepseek"]])
def test_released_list_works_and_takes_new_weights(make: Callable[[], Any]) -> None:
    model, other = make(), make()
    expected = results(model.block, rows())
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    report = library.patch(model, release=True)
    assert report.model_bytes_after < report.model_bytes_before / 2
    assert all(p.numel() == 0 for p in model.block.experts.parameters())
    require_equal(results(model.block, rows()), expected)
    with pytest.raises(ConclaveRuntimeError, match="released"):
        model.block(rows().requires_grad_())
    for name in state:
        if "experts" in name and "shared" not in name:
            state[name] = state[name] * 0.5
    other.load_state_dict(state)
    model.load_state_dict(state)
    require_equal(results(model.block, rows()), results(other.block, rows()))


@pytest.mark.parametrize("part", ["gate", "experts", "shared_expert"])
def test_gradients_of_a_list_are_the_models_own(part: str) -> None:
    model = unknown(remote.QwenBlock)
    library.patch(model)
    model.requires_grad_(False)
    getattr(model.block, part).requires_grad_(True)
    model.block(rows())[0].sum().backward()
    assert all(p.grad is not None for p in getattr(model.block, part).parameters())
    assert library.backend_report(model).modules[0].runs == "eager"


@pytest.mark.parametrize("backend", compilers.BACKENDS)
@pytest.mark.parametrize("make", [mixtral, UNKNOWN["qwen"]])
def test_compiled_list_has_equal_results(make: Callable[[], Any], backend: str) -> None:
    model = make()
    expected = model(ids())
    assert library.patch(model).replaced
    with torch.no_grad():
        require_equal((torch.compile(model, backend=backend)(ids()),), (expected,))


def test_listeners_of_the_router_hear_it() -> None:
    model = unknown(remote.MixtralBlock)
    library.patch(model)
    heard: list[Any] = []
    model.block.gate.register_forward_hook(lambda _, args, out: heard.append(out))
    logits = results(model.block, rows())[1]
    assert len(heard) == 1 and torch.equal(heard[0].view(-1, remote.E), logits)


def test_backend_says_that_lists_do_not_dispatch(caplog: Any) -> None:
    model = mixtral()
    for release in (False, True):
        with pytest.raises(ConclaveUnsupportedError, match=r"ModuleList .*transformers\.patch"):
            library.set_implementation(model, release=release)
    report = library.backend_report(model)
    assert len(report.not_reached) == 1 and "patch" in report.not_reached[0].reasons[0]
    library.patch(model)
    results(model.block, rows())
    with caplog.at_level(logging.WARNING, logger="conclave.transformers"):
        library.set_implementation(model)  # its block is replaced: nothing is left to warn of
    assert not caplog.records


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_matrices_are_told_apart_by_what_they_do(act: str) -> None:
    config = remote.config("unknown", hidden_act=act)
    square = remote.MixtralBlock(config)  # INNER is not H: shapes say which is down
    assert read_list(square.experts).first == ("w1", "w3")
    for expert in square.experts:
        for name in ("w1", "w2", "w3"):
            setattr(expert, name, torch.nn.Linear(remote.H, remote.H, bias=False))
    found = read_list(square.experts)
    assert (found.first, found.down) == (("w1", "w3"), "w2")
    assert found.activation.name == {"gelu_pytorch_tanh": "gelu_tanh"}.get(act, act)


def test_experts_on_the_meta_device_are_refused() -> None:
    with torch.device("meta"):
        block = remote.MixtralBlock(remote.config("unknown", hidden_act="silu"))
    with pytest.raises(NotOurs, match="meta device"):
        read_list(block.experts)
