"""Adapters over GGUF models: PEFT's names find the layers of a file, and results are those of the
file's own values with the factors added, in float64."""

from __future__ import annotations

import json
import pathlib

import numpy
import pytest

import conclave
from conclave import _conclave
from support.problems import FLOAT32_BAR, expected_output, worst_error

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
save_file = pytest.importorskip("safetensors.numpy").save_file

pytestmark = pytest.mark.usefixtures("float32_products")

TESTDATA = pathlib.Path(__file__).parents[2] / "testdata" / "gguf"
PREFIX = "base_model.model.model.layers"
RANK, ALPHA = 4, 6


def values_of(name):
    """What the file's blocks mean, by tensor."""
    tensors = gguf.GGUFReader(TESTDATA / name / "model.gguf").tensors
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("float64")
        for tensor in tensors
        if "_exps.weight" in tensor.name
    }


def factors_of(random, experts, rows, cols):
    """A [E, r, in] and B [E, out, r], which make about as much of a result as the weights."""
    a = random.standard_normal((experts, RANK, cols)) / cols**0.5
    return a.astype("float32"), (random.standard_normal((experts, rows, RANK)) / 2).astype(
        "float32"
    )


def by_expert(layer, factors):
    """Projections of single experts, as target_modules has them."""
    found = {}
    for matrix, (a, b) in factors.items():
        for expert in range(len(a)):
            at = f"{PREFIX}.{layer}.mlp.experts.{expert}.{matrix}_proj"
            found |= {f"{at}.lora_A.weight": a[expert], f"{at}.lora_B.weight": b[expert]}
    return found


def stacked(layer, factors):
    """All experts in one, as target_parameters has them: gate and up share A."""
    at = f"{PREFIX}.{layer}.mlp.experts"
    (a, gate), (_, up), (down_a, down) = (factors[name] for name in ("gate", "up", "down"))
    both = {"base_layer.": (a, numpy.concatenate([gate, up], 1)), "": (down_a, down)}
    return {
        f"{at}.{part}{name}": numpy.ascontiguousarray(tensor)
        for part, (first, second) in both.items()
        for name, tensor in (
            ("lora_A.weight", first.reshape(-1, first.shape[2])),
            ("lora_B.weight", second.transpose(1, 2, 0).reshape(second.shape[1], -1)),
        )
    }


def adapter_of(name, layers, form, folder):
    """A directory as PEFT writes it, and by layer the experts' gate and up, and down, with it."""
    random, values = numpy.random.default_rng(9), values_of(name)
    tensors, merged = {}, {}
    for layer in layers:
        exact = {m: values[f"blk.{layer}.ffn_{m}_exps.weight"] for m in ("gate", "up", "down")}
        factors = {m: factors_of(random, *weights.shape) for m, weights in exact.items()}
        if form is stacked:
            factors["up"] = (factors["gate"][0], factors["up"][1])
        tensors |= form(layer, factors)
        whole = {
            m: exact[m] + ALPHA / RANK * (b.astype("float64") @ a.astype("float64"))
            for m, (a, b) in factors.items()
        }
        merged[layer] = (numpy.concatenate([whole["gate"], whole["up"]], 1), whole["down"])
    config = {"peft_type": "LORA", "peft_version": "0.21.2", "r": RANK, "lora_alpha": ALPHA}
    if form is stacked:
        config["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    else:
        config["target_modules"] = ["gate_proj", "up_proj", "down_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return merged


CASES = [("qwen3moe-q4_k_m", by_expert), ("olmoe-iq4_nl", stacked)]


def inputs_of(spec, layers):
    """Rows and choices by the names that the tool reads."""
    random, found = numpy.random.default_rng(3), {}
    for index in layers:
        ids = [random.permutation(spec.num_experts)[: spec.top_k] for _ in range(9)]
        found |= {
            f"layers.{index}.hidden_states": random.standard_normal((9, spec.hidden_size)),
            f"layers.{index}.topk_weights": random.random((9, spec.top_k)),
        }
        found[f"layers.{index}.topk_ids"] = numpy.stack(ids).astype("int32")
    return {k: v.astype("float32") if v.dtype == "float64" else v for k, v in found.items()}


@pytest.mark.parametrize(("name", "form"), CASES)
def test_results_are_those_of_the_files_values_and_the_factors(name, form, tmp_path):
    model = TESTDATA / name / "model.gguf"
    checkpoint = conclave.Checkpoint(model)
    layers = [layer.index for layer in checkpoint.info.layers]
    given = inputs_of(checkpoint.info.layers[0].spec, layers)
    save_file(given, tmp_path / "input.safetensors")
    merged = adapter_of(name, layers, form, tmp_path)
    expected = {}
    for index in layers:
        layer = conclave.Layer.from_checkpoint(
            checkpoint, index, options={"max_adapter_rank": RANK}
        )
        hidden, ids, weights = (
            given[f"layers.{index}.{key}"] for key in ("hidden_states", "topk_ids", "topk_weights")
        )
        adapter = layer.load_adapter(tmp_path, index, checkpoint=checkpoint)
        exact = expected_output(hidden, *merged[index], ids, weights)
        out = layer(hidden, topk_ids=ids, topk_weights=weights, adapter_ids=adapter)
        assert worst_error(out, exact) <= FLOAT32_BAR
        plain = layer(hidden, topk_ids=ids, topk_weights=weights)
        assert worst_error(plain, exact) > 0.1
        expected[f"layers.{index}.output"] = exact
    reference = tmp_path / "reference.safetensors"
    save_file(expected, reference)
    run = ["conclave", "run", str(model), "--input", str(tmp_path / "input.safetensors")]
    run += ["--routing", "file", "--reference", str(reference), "--repetitions", "1"]
    assert _conclave.run_tool([*run, "--adapter", str(tmp_path)]) == 0
    assert _conclave.run_tool(run) != 0  # the reference has the adapter
    assert _conclave.run_tool(["conclave", "verify", str(model), "--adapter", str(tmp_path)]) == 0


def test_adapters_of_another_model_are_named(tmp_path, capfd):
    adapter_of("qwen3moe-q4_k_m", [0], by_expert, tmp_path)
    other = str(TESTDATA / "olmoe-iq4_nl" / "model.gguf")
    assert _conclave.run_tool(["conclave", "verify", other, "--adapter", str(tmp_path)]) != 0
    assert "lora_" in capfd.readouterr().err
