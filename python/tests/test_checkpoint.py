"""Model directories: every bundled one, described and run."""

from __future__ import annotations

import json
import shutil

import numpy
import pytest

import conclave
from conclave.errors import ConclaveCheckpointError, ConclaveValueError
from support import safetensors
from support.problems import FLOAT32_BAR, HALF_BAR, worst_error

TINY = ["mixtral-tiny", "qwen2-moe-tiny", "qwen3-moe-tiny", "olmoe-tiny"]


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_match_their_reference(testdata, name):
    info = conclave.inspect(testdata / name)
    reference = safetensors.read(testdata / name / "reference.safetensors")
    assert info.layers and all(layer.supported for layer in info.layers)
    for layer in info.layers:
        run = conclave.Layer.from_checkpoint(testdata / name, layer.index)
        key = f"layers.{layer.index}."
        ids = numpy.empty_like(reference[key + "topk_ids"])
        out = run(reference[key + "hidden_states"], captured_ids=ids)
        numpy.testing.assert_array_equal(ids, reference[key + "topk_ids"])
        bar = FLOAT32_BAR if layer.spec.weight_dtype == "float32" else HALF_BAR
        assert worst_error(out, reference[key + "output"]) <= bar
        assert run.spec == layer.spec


def test_every_golden_family_matches_float64(testdata):
    """The first MoE layer of each family, float32, by the recorded ids and weights."""
    worst = {}
    for folder in sorted((testdata / "models").iterdir()):
        if not (folder / "config.json").is_file():
            continue
        experts = "vision" if folder.name.endswith("-vision") else "text"
        checkpoint = conclave.Checkpoint(folder, experts=experts)
        golden = safetensors.read(folder / "golden.safetensors")
        layer = next(
            layer
            for layer in checkpoint.info.layers
            if f"layers.{layer.index}.f32.hidden_states" in golden
        )
        key = f"layers.{layer.index}.f32."
        run = conclave.Layer.from_checkpoint(
            checkpoint, layer.index, options=conclave.LayerOptions(arithmetic="f32_fma")
        )
        arguments = {"topk_ids": golden[key + "topk_ids"]}
        if layer.spec.shared.mode == "router_weight":
            # Weights are of shared experts too: the router forms them from the logits.
            arguments["router_logits"] = golden[key + "router_logits"]
        else:
            weights = golden[key + "float64.topk_weights"]
            arguments["topk_weights"] = weights.astype("float32")
        if key + "residual_input" in golden:
            arguments["residual_input"] = golden[key + "residual_input"]
        out = run(golden[key + "hidden_states"], **arguments)
        worst[folder.name] = worst_error(out, golden[key + "float64.output"])
    assert len(worst) >= 80
    wrong = {name: error for name, error in worst.items() if not error <= FLOAT32_BAR}
    assert not wrong


def test_layers_by_number(testdata):
    checkpoint = conclave.Checkpoint(testdata / "qwen2-moe-tiny")
    assert [layer.index for layer in checkpoint.info.layers] == [0, 2, 3]
    assert checkpoint.info.layer(2).index == 2
    with pytest.raises(KeyError, match="layer 1"):
        checkpoint.info.layer(1)
    with pytest.raises(ConclaveCheckpointError, match="1"):
        conclave.Layer.from_checkpoint(checkpoint, 1)


def test_reload_from_a_checkpoint(testdata):
    checkpoint = conclave.Checkpoint(testdata / "mixtral-tiny")
    reference = safetensors.read(testdata / "mixtral-tiny" / "reference.safetensors")
    layer = conclave.Layer.from_checkpoint(checkpoint, 0)
    layer.reload(checkpoint, 1)
    out = layer(reference["layers.1.hidden_states"])
    assert worst_error(out, reference["layers.1.output"]) <= HALF_BAR
    with pytest.raises(TypeError, match="number"):
        layer.reload(checkpoint)


def test_damage_is_named(testdata, tmp_path):
    broken = tmp_path / "model"
    shutil.copytree(testdata / "mixtral-tiny", broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
    with pytest.raises(ConclaveCheckpointError, match="unheard_of") as caught:
        conclave.inspect(broken)
    assert caught.value.name == "kUnknownArchitecture"
    (broken / "config.json").write_text(json.dumps(config))
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:-5])
    with pytest.raises(ConclaveCheckpointError, match=r"model\.safetensors"):
        conclave.inspect(broken)
    with pytest.raises(ConclaveValueError, match="experts"):
        conclave.inspect(testdata / "mixtral-tiny", experts="audio")


def test_feed_takes_tensors_in_any_order(testdata, torch):
    folder = testdata / "qwen3-moe-tiny"
    tensors = {}
    for shard in sorted(folder.glob("model-*.safetensors")):
        tensors.update(safetensors.read(shard))
    feed = conclave.Feed((folder / "config.json").read_text())
    assert feed.layers == (0, 1, 2) and not feed.is_complete(0) and len(feed.missing(3)) == 3
    used = 0
    for name in sorted(tensors, reverse=True):
        used += feed.put(name, torch.tensor(tensors[name]).bfloat16())
    assert 0 < used < len(tensors) and feed.missing() == [] and feed.is_complete(2)
    reference = safetensors.read(folder / "reference.safetensors")
    layer = conclave.Layer.from_checkpoint(feed, 1)
    assert layer.spec == feed.layer(1).spec
    out = layer(reference["layers.1.hidden_states"])
    assert worst_error(out, reference["layers.1.output"]) <= HALF_BAR
    layer.reload(feed, 2)
    out = layer(reference["layers.2.hidden_states"])
    assert worst_error(out, reference["layers.2.output"]) <= HALF_BAR
    feed.release(1)
    assert not feed.is_complete(1)
    name = next(iter(tensors))
    with pytest.raises(conclave.Error, match=r"dense|lie apart"):
        conclave.Feed((folder / "config.json").read_text()).put(name, torch.zeros(8, 8).T[:, ::2])


def test_feed_of_a_spec(problem):
    spec = conclave.spec.to_dict(problem.layer().spec)
    feed = conclave.Feed(spec={**spec, "has_gate": True}, model_type="mixtral", layers=[3])
    prefix = "model.layers.3.block_sparse_moe."
    feed.put(prefix + "gate.weight", problem.router)
    for expert in range(6):
        gate, up = numpy.split(problem.gate_up[expert], 2)
        for name, weight in (("w1", gate), ("w3", up), ("w2", problem.down[expert])):
            assert feed.put(f"{prefix}experts.{expert}.{name}.weight", weight)
    layer = conclave.Layer.from_checkpoint(feed, 3)
    numpy.testing.assert_array_equal(
        layer(problem.hidden, **problem.routing), problem.layer()(problem.hidden, **problem.routing)
    )
    with pytest.raises(TypeError, match="config_json"):
        conclave.Feed()
    with pytest.raises(TypeError, match="config_json"):
        conclave.Feed("{}", spec=spec, model_type="mixtral", layers=[3])
