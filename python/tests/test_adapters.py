"""Adapters of experts: from PEFT's directories and from arrays, and models that PEFT wrapped."""

from pathlib import Path

import pytest

import conclave
from conclave import ConclaveTypeError, ConclaveUnsupportedError, ConclaveValueError

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file

TESTDATA = Path(__file__).resolve().parents[2] / "testdata"
NAMES = ["mixtral-tiny", "qwen2-moe-tiny"]


def error_of(actual, expected):
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()


@pytest.mark.parametrize("name", NAMES)
def test_directory_results_are_those_of_peft(name):
    recorded = load_file(TESTDATA / name / "reference.safetensors")
    expected = load_file(TESTDATA / "adapters" / name / "reference.safetensors")
    checkpoint = conclave.Checkpoint(TESTDATA / name)
    for index in (0, 2) if name == "qwen2-moe-tiny" else (0, 1):
        layer = conclave.Layer.from_checkpoint(checkpoint, index, options={"max_adapter_rank": 4})
        given = {k: recorded[f"layers.{index}.{k}"] for k in ("topk_ids", "topk_weights")}
        hidden = recorded[f"layers.{index}.hidden_states"].float()
        plain = layer(hidden, **given)
        adapter = layer.load_adapter(TESTDATA / "adapters" / name, index, checkpoint=checkpoint)
        assert layer.adapters[0]["id"] == adapter and layer.adapters[0]["bytes"] > 0
        out = layer(hidden, adapter_ids=adapter, **given)
        bar = 6e-3 if name == "mixtral-tiny" else 5e-6
        assert error_of(out, expected[f"layers.{index}.output"]) < bar
        ids = torch.full((hidden.shape[0],), -1)
        ids[1::2] = adapter
        mixed = layer(hidden, adapter_ids=ids, **given)
        assert torch.equal(mixed[1::2], out[1::2]) and torch.equal(mixed[::2], plain[::2])
        layer.remove_adapter(adapter)
        assert layer.adapters == []
        with pytest.raises(ConclaveValueError, match="adapter"):
            layer(hidden, adapter_ids=adapter, **given)


def make_layer(**options):
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(3, 2 * 12, 16, generator=generator) / 4
    down = torch.randn(3, 16, 12, generator=generator) / 4
    spec = {"num_experts": 3, "top_k": 2}
    layer = conclave.Layer.from_tensors(spec, gate_up=gate_up, down=down, options=options)
    return layer, gate_up, down


def test_arrays_change_the_weights_that_they_name():
    layer, gate_up, down = make_layer(max_adapter_rank=4)
    up_a, up_b = torch.randn(3, 4, 16) / 4, torch.randn(3, 12, 4) / 4
    down_a, down_b = torch.randn(3, 2, 12) / 4, torch.randn(3, 16, 2) / 4
    adapter = layer.load_adapter(up_a=up_a, up_b=up_b, down_a=down_a, down_b=down_b, scale=0.5)
    merged = gate_up.clone()
    merged[:, 12:] += 0.5 * up_b @ up_a
    spec = {"num_experts": 3, "top_k": 2}
    other = conclave.Layer.from_tensors(spec, gate_up=merged, down=down + 0.5 * down_b @ down_a)
    hidden, ids = torch.randn(9, 16), torch.tensor([[0, 2]] * 9, dtype=torch.int32)
    given = {"topk_ids": ids, "topk_weights": torch.rand(9, 2)}
    assert error_of(layer(hidden, adapter_ids=adapter, **given), other(hidden, **given)) < 1e-5


@pytest.mark.parametrize(
    ("factors", "text"),
    [
        ({"up_a": torch.zeros(3, 4, 16)}, "up_b"),
        ({"w1_a": torch.zeros(3, 4, 16)}, "w1_a"),
        ({"up_a": torch.zeros(3, 4, 16), "up_b": torch.zeros(3, 12, 5)}, "lora_B"),
        ({"up_a": torch.zeros(4, 4, 16), "up_b": torch.zeros(4, 12, 4)}, "3 experts"),
        ({"up_a": torch.zeros(3, 5, 16), "up_b": torch.zeros(3, 12, 5)}, "max_adapter_rank"),
        ({"up_a": torch.zeros(16), "up_b": torch.zeros(3, 12, 5)}, "up_a"),
        ({}, "no factors"),
    ],
)
def test_wrong_arrays_are_named(factors, text):
    layer, _, _ = make_layer(max_adapter_rank=4)
    with pytest.raises(conclave.Error, match=text):
        layer.load_adapter(**factors)


def test_ids_are_integers():
    layer, _, _ = make_layer(max_adapter_rank=4)
    zeros = {"up_a": torch.zeros(3, 4, 16), "up_b": torch.ones(3, 12, 4)}
    assert [layer.load_adapter(**zeros) for _ in range(2)] == [0, 1]
    given = {"topk_ids": torch.tensor([[0, 2]] * 5), "topk_weights": torch.rand(5, 2)}
    hidden = torch.randn(5, 16)
    plain = layer(hidden, **given)
    for one in (-1, 1, torch.tensor(1), torch.tensor(1).numpy()):
        assert torch.equal(layer(hidden, adapter_ids=one, **given), plain)
    calls = {
        "adapter_ids": lambda: layer(hidden, adapter_ids=True, **given),
        "adapter_id": lambda: layer.remove_adapter(True),
        "scale": lambda: layer.load_adapter(**zeros, scale="1"),
        "name": lambda: layer.load_adapter(**zeros, name=5),
        "layer": lambda: layer.load_adapter(TESTDATA / "adapters" / "mixtral-tiny", "0"),
        "checkpoint": lambda: layer.load_adapter(TESTDATA, 0, checkpoint=str(TESTDATA)),
    }
    for name, call in calls.items():
        with pytest.raises(ConclaveTypeError, match=name):
            call()
    for wrong in (2**40, -2):
        with pytest.raises(ConclaveValueError, match="adapter_id"):
            layer.remove_adapter(wrong)
    assert len(layer.adapters) == 2


def test_layers_without_room_refuse_adapters():
    layer, _, _ = make_layer()
    with pytest.raises(conclave.Error, match="max_adapter_rank"):
        layer.load_adapter(up_a=torch.zeros(3, 4, 16), up_b=torch.zeros(3, 12, 4))
    with pytest.raises(ConclaveUnsupportedError, match="use_dora"):
        broken_config(layer)


def broken_config(layer):
    import json
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "adapter"
        shutil.copytree(TESTDATA / "adapters" / "mixtral-tiny", copy)
        config = json.loads((copy / "adapter_config.json").read_text())
        (copy / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
        layer.load_adapter(copy, 0)


class Wrapper(torch.nn.Module):
    """Adds to what a module computes, as adapters do."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base

    def forward(self, hidden, *args, **kwargs):
        return self.base_layer(hidden, *args, **kwargs) + hidden


def tiny_mixtral(**settings):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(
        TESTDATA / "mixtral-tiny", dtype=torch.float32, **settings
    ).eval()


def test_modules_wrapped_after_patch_are_not_left_out():
    model = tiny_mixtral()
    import conclave.transformers as patching

    ids = torch.arange(12)[None]
    with torch.no_grad():
        patching.patch(model)
        for layer in model.model.layers:
            layer.mlp.experts = Wrapper(layer.mlp.experts)
        patched = model(ids).logits
        other = tiny_mixtral()
        for layer in other.model.layers:
            layer.mlp.experts = Wrapper(layer.mlp.experts)
        assert error_of(patched, other(ids).logits) < 1e-5
        patching.unpatch(model)


@pytest.mark.parametrize("first", ["patch", "adapter", "backend"])
def test_models_with_peft_run_their_adapters(first):
    peft = pytest.importorskip("peft")
    import conclave.transformers as patching

    directory = TESTDATA / "adapters" / "mixtral-tiny"
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(tiny_mixtral(), directory).eval()(ids).logits
        settings = {"experts_implementation": "conclave"} if first == "backend" else {}
        model = tiny_mixtral(**settings)
        if first == "patch":
            patching.patch(model)
        adapted = peft.PeftModel.from_pretrained(model, directory).eval()
        if first == "adapter":
            report = patching.patch(adapted)
            assert all("ParamWrapper" in m.reason for m in report.not_replaced)
        assert error_of(adapted(ids).logits, expected) < 1e-5
