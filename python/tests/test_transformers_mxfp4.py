"""gpt-oss in mxfp4 as transformers loads it, with its own blocks, which route for Triton's kernels.

The kernels are stood in for in torch; everything else is transformers' own.
"""

from __future__ import annotations

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
            # Where codes go. The oldest versions take "cpu" for "cuda".
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


def logits(model: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 12)[None].to(model.device), **kwargs)


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


def test_blocks_that_transformers_exchanged_are_not_ours(load: Load) -> None:
    packed, _ = load()
    logits(packed)
    report = library.backend_report(packed)
    assert len(report.not_reached) == LAYERS and "patch" in str(report), str(report)
    with pytest.raises(ConclaveUnsupportedError, match=r"Mxfp4GptOssExperts.*patch"):
        library.set_implementation(packed)
