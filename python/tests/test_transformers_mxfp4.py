"""gpt-oss in mxfp4 as transformers loads it, with its own blocks, which route for Triton's kernels.

The kernels are stood in for in torch; everything else is transformers' own.
"""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")
mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
storage = pytest.importorskip("safetensors.torch")

import conclave.transformers as library  # noqa: E402
from conclave.errors import ConclaveUnsupportedError  # noqa: E402
from conclave.transformers import _probe, _traits  # noqa: E402
from support import triton_kernels  # noqa: E402
from support.coded import Coder  # noqa: E402
from support.problems import FLOAT32_BAR, worst_error  # noqa: E402

E, H, INNER, LAYERS = 4, 64, 96, 2
PARTS = ("gate_up_proj", "down_proj")


def config(dtype: Any) -> Any:
    return transformers.GptOssConfig(
        hidden_size=H,
        intermediate_size=INNER,
        num_local_experts=E,
        num_experts_per_tok=2,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
        pad_token_id=0,
        dtype=str(dtype).removeprefix("torch."),
    )


def checkpoint(dtype: Any) -> dict[str, Any]:
    """Random tensors by the published names. Values of experts stand beside their codes."""
    torch.manual_seed(3)
    coder, found = Coder(8), {}
    for name, parameter in transformers.GptOssForCausalLM(config(dtype)).named_parameters():
        if name.endswith(PARTS):
            experts, columns, rows = parameter.shape
            blocks = coder.whole(0, 256, (experts, rows, columns // 32, 16)).to(torch.uint8)
            scales = coder.whole(122, 125, (experts, rows, columns // 32)).to(torch.uint8)
            found |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        elif "norm" in name:
            found[name] = torch.ones(parameter.shape, dtype=dtype)
        else:
            found[name] = (torch.randn(parameter.shape) * 0.1).to(dtype)
    return found


class Kernels:
    """What transformers finds in place of Triton's kernels, and how often it multiplied there."""

    def __init__(self) -> None:
        self.calls = 0
        self.hub = triton_kernels.kernels()
        self.hub.matmul_ogs.matmul_ogs = self._multiply

    def _multiply(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return triton_kernels.matmul_ogs(*args, **kwargs)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """transformers loads codes as on a GPU with Triton, and keeps them on the CPU."""
    from transformers.integrations import hub_kernels
    from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

    def exchange(self: Any, model: Any, **_: Any) -> None:
        kept = self.get_modules_to_not_convert(
            model, self.quantization_config.modules_to_not_convert, model._keep_in_fp32_modules
        )
        mxfp4.replace_with_mxfp4_linear(
            model, modules_to_not_convert=kept, quantization_config=self.quantization_config
        )

    found = Kernels()
    monkeypatch.setattr(mxfp4, "triton_kernels_hub", found.hub, raising=False)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *_, **__: found.hub)
    monkeypatch.setattr(Mxfp4HfQuantizer, "validate_environment", lambda *_, **__: None)
    monkeypatch.setattr(Mxfp4HfQuantizer, "_process_model_before_weight_loading", exchange)
    return found


Load = Callable[..., Any]


@pytest.fixture
def load(kernels: Kernels, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """A model of codes, as `from_pretrained` makes it, and that of the same values in float32."""

    def make(dtype: Any = torch.float32) -> tuple[Any, Any]:
        tensors, written = checkpoint(dtype), config(dtype)
        written.architectures = ["GptOssForCausalLM"]
        written.quantization_config = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        }
        written.save_pretrained(tmp_path)
        storage.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with monkeypatch.context() as patched:
            # Codes go there. The oldest versions take "cpu" for "cuda".
            device = SimpleNamespace(type="cpu:0")
            patched.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: device)
            packed = transformers.GptOssForCausalLM.from_pretrained(
                tmp_path, dtype=dtype, attn_implementation="eager"
            )
        exact = transformers.GptOssForCausalLM(config(torch.float32)).float()
        for name in exact.state_dict():
            if name not in tensors:
                codes = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
                tensors[name] = mxfp4.convert_moe_packed_tensors(*codes, dtype=torch.float32)
        exact.load_state_dict({name: tensors[name] for name in exact.state_dict()})
        return packed.eval(), exact.eval()

    return make


def blocks(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.model.layers]


def rows(seed: int = 1, count: int = 11) -> Any:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(1, count, H, generator=numbers)


def check_blocks(packed: Any, exact: Any) -> None:
    """Every block of codes against the block of their values in float64."""
    for block, values in zip(blocks(packed), blocks(exact), strict=True):
        wide = copy.deepcopy(values).double()
        wide.experts.config._experts_implementation = "eager"  # grouped products have no float64
        with torch.no_grad():
            actual, logits = block(rows())
            expected, _ = wide(rows().double())
            expected_logits = wide.router(rows().double()[0])[0]
        assert worst_error(actual[0], expected[0]) <= FLOAT32_BAR
        assert worst_error(logits, expected_logits) <= FLOAT32_BAR


def logits(model: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 12)[None].to(model.device), **kwargs)


def replaced(report: Any) -> list[str]:
    return [module.replaced for module in report.modules]


@pytest.mark.usefixtures("float32_products")
def test_loaded_blocks_are_ours(load: Load, kernels: Kernels) -> None:
    packed, exact = load()
    assert isinstance(blocks(packed)[0].experts, mxfp4.Mxfp4GptOssExperts)
    check_blocks(packed, exact)  # by the kernels
    before = logits(packed).logits
    assert kernels.calls == 2 * 2 * LAYERS

    report = library.patch(packed)
    assert replaced(report) == ["block"] * LAYERS, str(report)
    kernels.calls = 0
    check_blocks(packed, exact)
    assert worst_error(logits(packed).logits[0], logits(exact).logits[0]) <= 1e-4
    calls = library.backend_report(packed)
    assert len(calls.ours) == LAYERS and not calls.fell_back, str(calls)
    assert kernels.calls == 0

    library.unpatch(packed)
    assert torch.equal(logits(packed).logits, before)
    assert kernels.calls == 2 * LAYERS


def assert_close_in_bf16(before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
    """By the median of tokens: scores in bf16 that tie choose other experts."""
    for expected, actual in zip(before, after, strict=True):
        errors = (actual - expected).norm(dim=1) / expected.norm(dim=1)
        assert errors.median() <= 2e-2


def test_loaded_blocks_of_a_half_type_are_ours(load: Load, kernels: Kernels) -> None:
    """As released models are, with the arithmetic that a layer of codes has by itself."""
    packed, _ = load(torch.bfloat16)
    hidden = rows(count=32).bfloat16()
    with torch.no_grad():
        before = [block(hidden)[0][0].double() for block in blocks(packed)]
        report = library.patch(packed)
        assert replaced(report) == ["block"] * LAYERS, str(report)
        kernels.calls = 0
        after = [block(hidden)[0][0].double() for block in blocks(packed)]
    assert kernels.calls == 0
    assert_close_in_bf16(before, after)


@pytest.mark.usefixtures("float32_products")
def test_weights_that_change_are_packed_again(load: Load, kernels: Kernels) -> None:
    packed, exact = load()
    library.patch(packed)
    first, second = blocks(packed)
    values, others = blocks(exact)
    kernels.calls = 0
    with torch.no_grad():
        for router in (first.router, values.router):
            router.bias.add_(torch.arange(E))
        for experts in (second.experts, others.experts):
            experts.down_proj_bias.add_(1)
        check_blocks(packed, exact)
        # Codes are no parameters: what lies there, and what else is put there.
        first.experts.down_proj.storage.data.zero_()
        values.experts.down_proj.zero_()
        check_blocks(packed, exact)
        second.experts.gate_up_proj = copy.deepcopy(first.experts.gate_up_proj)
        second.experts.gate_up_proj_precision_config = first.experts.gate_up_proj_precision_config
        others.experts.gate_up_proj.copy_(values.experts.gate_up_proj)
        check_blocks(packed, exact)
        second.experts.gate_up_proj_precision_config.weight_scale.storage.data.sub_(1)
        for experts in (values.experts, others.experts):
            experts.gate_up_proj.mul_(0.5)
        check_blocks(packed, exact)
    state = {name: tensor + 0.5 for name, tensor in packed.state_dict().items() if "mlp" in name}
    assert len(state) == 4 * LAYERS
    for model in (packed, exact):
        model.load_state_dict(state, strict=False)
    check_blocks(packed, exact)
    assert kernels.calls == 0 and len(library.backend_report(packed).ours) == LAYERS


@pytest.mark.usefixtures("float32_products")
def test_codes_stay_with_release(load: Load) -> None:
    packed, exact = load()
    before = logits(packed).logits
    report = library.patch(packed, release=True)
    assert replaced(report) == ["block"] * LAYERS, str(report)
    check_blocks(packed, exact)
    experts = blocks(packed)[0].experts
    assert experts.gate_up_proj.storage.data.numel() == E * (2 * INNER + 4) * H // 2
    assert experts.gate_up_proj_bias.shape == (E, 2 * INNER)
    state = {name: -tensor for name, tensor in packed.state_dict().items()}
    for model in (packed, exact):
        model.load_state_dict(state, strict=False)
    check_blocks(packed, exact)
    library.unpatch(packed)
    packed.load_state_dict({name: -tensor for name, tensor in state.items()})
    assert torch.equal(logits(packed).logits, before)


@pytest.mark.usefixtures("float32_products")
def test_experts_that_no_block_calls_are_not_replaced(load: Load, kernels: Kernels) -> None:
    """Where the block's formula is another than the library reads."""
    packed, _ = load()
    before = logits(packed).logits
    packed.config.swiglu_limit = 0.5
    report = library.patch(packed)
    assert replaced(report) == ["", ""], str(report)
    for module in report.modules:
        assert "another formula" in module.reason
        assert "does not call the forward of Mxfp4GptOssExperts" in module.reason
    assert "forward" not in blocks(packed)[0].experts.__dict__
    kernels.calls = 0
    assert torch.equal(logits(packed).logits, before)
    assert kernels.calls == 2 * LAYERS
    assert not library.backend_report(packed).ours


class Router(torch.nn.Module):
    """Weights of float32 say which type the rows have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(E, H))


class Block(torch.nn.Module):
    """Calls what it has as experts in one of the ways that blocks do."""

    def __init__(self, experts: Any, call: Callable[..., Any]) -> None:
        super().__init__()
        self.router, self.experts, self.call = Router(), experts, call

    def forward(self, hidden_states: Any) -> Any:
        flat = hidden_states.reshape(-1, H)
        return self.call(self.experts, flat, torch.zeros(len(flat), 2).long(), flat[:, :2])


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda e, rows, ids, weights: e(rows, ids, weights), ""),
        (lambda e, rows, ids, weights: e(rows, top_k_index=ids, top_k_weights=weights), ""),
        (lambda e, rows, ids, weights: e.forward_routed(rows, ids, weights), "the forward of"),
        (lambda e, rows, ids, weights: e(rows, {}, ids, scatter_idx=ids), "with ids and weights"),
        (lambda e, rows, ids, weights: e(rows, {}, ids, ids), "with ids and weights"),
        (lambda e, rows, ids, weights: e(rows, weights, ids), "with ids and weights"),
        (lambda e, rows, ids, weights: e(rows, ids[:1], weights[:1]), "with ids and weights"),
        (lambda e, rows, ids, weights: e.missing(rows), "does not run by itself"),
    ],
)
def test_experts_alone_must_be_called_with_choices(call: Callable[..., Any], reason: str) -> None:
    experts = mxfp4.Mxfp4GptOssExperts(config(torch.float32))
    experts.forward_routed = lambda rows, *_: rows
    block = Block(experts, call)
    hidden = _probe.probe_hidden(block, H)
    if reason:
        with pytest.raises(_traits.NotOurs, match=reason):
            _probe.require_called(block, experts, hidden)
    else:
        _probe.require_called(block, experts, hidden)
    assert "forward" not in experts.__dict__


@pytest.mark.usefixtures("float32_products")
def test_codes_that_are_not_loaded_say_so(load: Load) -> None:
    packed, _ = load()
    blocks(packed)[1].experts.down_proj_precision_config = None
    report = library.patch(packed)
    assert replaced(report) == ["block", ""], str(report)
    assert "down_proj_precision_config is not loaded" in report.not_replaced[0].reason


def test_blocks_that_transformers_exchanged_are_not_ours(load: Load) -> None:
    packed, _ = load()
    logits(packed)
    report = library.backend_report(packed)
    assert len(report.not_reached) == LAYERS and "patch" in str(report), str(report)
    with pytest.raises(ConclaveUnsupportedError, match=r"Mxfp4GptOssExperts.*patch"):
        library.set_implementation(packed)


@pytest.mark.usefixtures("float32_products")
def test_router_logits_are_recorded(load: Load) -> None:
    packed, exact = load()
    library.patch(packed)
    found = logits(packed, output_router_logits=True).router_logits
    expected = logits(exact, output_router_logits=True).router_logits
    assert len(found) == len(expected) == LAYERS
    for actual, reference in zip(found, expected, strict=True):
        assert worst_error(actual, reference) <= 1e-4


@pytest.mark.usefixtures("float32_products")
def test_gradients_and_graphs(load: Load, kernels: Kernels) -> None:
    packed, _ = load()
    library.patch(packed)
    block = blocks(packed)[0]
    with torch.no_grad():
        expected = block(rows())
        compiled = torch.compile(block, backend="eager", fullgraph=True)(rows())
    for actual, reference in zip(compiled, expected, strict=True):
        assert torch.equal(actual, reference)
    assert kernels.calls == 2 * LAYERS  # to compare, when they were patched
    block(rows())
    assert kernels.calls == 2 * LAYERS + 2
    calls = library.backend_report(packed).modules[0]
    assert (calls.calls, calls.eager_calls) == (2, 1) and "gradients" in calls.reasons[0]


@pytest.mark.cuda
def test_loaded_blocks_are_ours_on_a_gpu(load: Load, kernels: Kernels) -> None:
    packed, _ = load(torch.bfloat16)
    for block in blocks(packed):
        for part in PARTS:
            scale = getattr(block.experts, f"{part}_precision_config").weight_scale
            for tensor in (getattr(block.experts, part), scale):
                tensor.storage.data = tensor.storage.data.cuda()
    torch.nn.Module.cuda(packed)
    hidden = rows(count=32).bfloat16().cuda()
    with torch.no_grad():
        before = [block(hidden)[0][0].double() for block in blocks(packed)]
        report = library.patch(packed)
        assert replaced(report) == ["block"] * LAYERS, str(report)
        kernels.calls = 0
        after = [block(hidden)[0][0].double() for block in blocks(packed)]
        assert kernels.calls == 0
        assert_close_in_bf16(before, after)
        for block in blocks(packed):
            block.experts.down_proj.storage.data.zero_()
            block.experts.down_proj_bias.zero_()
            assert not block(hidden)[0].any()
    assert kernels.calls == 0
