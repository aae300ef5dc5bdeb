"""Static steps of rows over expert-parallel ranks: rows are those of a layer on one rank."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors.torch")

from conclave import vllm  # noqa: E402
from conclave.errors import Error  # noqa: E402
from support.coded import rows_in_groups  # noqa: E402
from support.method_layers import (  # noqa: E402
    bar_of,
    config_of,
    expert_tensors,
    golden_of,
    layer_of,
    logits_for,
)
from support.problems import HALF_BAR, worst_error  # noqa: E402
from support.vllm_reference import experts_reference  # noqa: E402

pytestmark = pytest.mark.usefixtures("float32_products")

# Checkpoints whose rows have static steps, and what a step's tensor is called.
STEPS = {
    "qwen3_moe-modelopt-nvfp4": "input_scale",
    "mixtral-modelopt-nvfp4": "input_scale",
    "qwen3_moe-compressed-nvfp4-rows": "input_global_scale",
    "qwen3_moe-compressed-tensor-static": "input_scale",
    "mixtral-modelopt-fp8": "input_scale",
}
NVFP4 = [name for name in STEPS if "nvfp4" in name]


def spread_steps(name):
    """The tensors of a file, whose experts' steps are 1, 2, 3, ... times what they were: the last
    expert's is the largest by far."""
    tensors = {}
    for key, tensor in expert_tensors(name).items():
        if key.endswith(STEPS[name]):
            factor = 1 + int(key.partition(".")[0])
            tensor = tensor / factor if "global" in STEPS[name] else tensor * factor
        tensors[key] = tensor
    return tensors


def filled(name, tensors, quantization=None, **arguments):
    layer, hidden, expected = layer_of(name, quantization, **arguments)
    layer.layer_name = "model.layers.0.mlp.experts"
    return layer, layer.load_weights(tensors.items()), hidden, expected


def ranks_of(name, tensors, size, quantization=None, **arguments):
    for rank in range(size):
        split = vllm.FusedMoEParallelConfig(ep_size=size, ep_rank=rank, use_ep=True)
        yield filled(name, tensors, quantization, moe_parallel_config=split, **arguments)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", STEPS)
def test_ranks_have_the_rows_of_one(name, size):
    tensors = spread_steps(name)
    whole, _, hidden, _ = filled(name, tensors)
    logits = logits_for(whole, hidden)
    parts = [layer(hidden, logits) for layer, *_ in ranks_of(name, tensors, size)]
    assert worst_error(sum(parts), whole(hidden, logits).double()) <= 1e-6


@pytest.mark.parametrize("name", STEPS)
def test_ranks_match_float64(name):
    hidden, *_, expected = golden_of(name)
    parts = [
        layer(hidden, logits_for(layer, hidden))
        for layer, *_ in ranks_of(name, expert_tensors(name), 2)
    ]
    assert worst_error(sum(parts), expected) <= bar_of(name)


def weights_in_float64(name):
    """What a layer without codes of rows makes of the file's weights: each expert alone, by rows of
    the identity."""
    stated = config_of(name)[1]
    algorithm = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
    tensors = expert_tensors(name)
    config = {**stated, **algorithm}
    layer, _, _, _ = filled(name, tensors, config)
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    table = torch.cat([codes, -codes])

    def values(key, halves):
        packed = getattr(layer, f"{key}_weight").int()
        found = table[torch.stack([packed & 15, packed >> 4], -1).flatten(-2)]
        scales = getattr(layer, f"{key}_weight_scale").double().repeat_interleave(16, 2)
        whole = getattr(layer, f"{key}_weight_scale_2").double().reshape(len(packed), halves)
        rows = whole.repeat_interleave(found.shape[1] // halves, 1)
        return found * scales * rows[..., None]

    return values("w13", 2), values("w2", 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_takes_the_largest_step_of_all(rank):
    """Against float64 of codes of rows by the last expert's steps, which are the second rank's."""
    name = "qwen3_moe-modelopt-nvfp4"
    tensors = spread_steps(name)
    layer, _, hidden, _ = list(ranks_of(name, tensors, 2))[rank]
    steps = [
        max(float(tensor) for key, tensor in tensors.items() if key.endswith(suffixes))
        for suffixes in (
            ("gate_proj.input_scale", "up_proj.input_scale"),
            ("down_proj.input_scale",),
        )
    ]
    w13, w2 = weights_in_float64(name)
    _, ids, shares, _ = golden_of(name)
    local = layer.local_num_experts
    own = torch.where(ids.long() // local == rank, ids.long(), -1)
    expected = experts_reference(
        hidden,
        w13,
        w2,
        shares,
        own,
        quantise=lambda rows: rows_in_groups(rows, "nvfp4", steps[0]),
        quantise_inner=lambda rows: rows_in_groups(rows, "nvfp4", steps[1]),
    )
    used = (own >= 0).any(1)
    out = layer(hidden, logits_for(layer, hidden))
    assert worst_error(out[used], expected[used]) <= HALF_BAR


@pytest.mark.parametrize("name", STEPS)
def test_parameters_of_steps_hold_all_ranks_experts(name):
    tensors = spread_steps(name)
    steps = [key for key in tensors if key.endswith(STEPS[name])]
    whole, *_ = filled(name, tensors)
    for layer, taken, _, _ in ranks_of(name, tensors, 2):
        for key in ("w13", "w2"):
            own = getattr(layer, f"{key}_{STEPS[name]}")
            assert own.shape[0] == layer.global_num_experts
            assert torch.equal(own, getattr(whole, f"{key}_{STEPS[name]}"))
        assert sum(entry.endswith(STEPS[name]) for entry in taken) == len(steps)
        local = layer.local_num_experts
        views = layer.get_expert_weights()
        assert {view.shape[0] for view in views} == {local}
        assert len(views) == len(list(layer.parameters())) - 2


@pytest.mark.parametrize("name", STEPS)
def test_experts_of_other_ranks_may_be_left_out(name):
    """An engine may load a rank's own experts alone: then their largest step counts, as in vLLM."""
    tensors = spread_steps(name)
    whole, _, hidden, _ = filled(name, tensors)
    count = whole.global_num_experts // 2
    last = {key: t for key, t in tensors.items() if int(key.partition(".")[0]) >= count}
    found, expected = [], []
    for given, results in ((tensors, expected), (last, found)):
        layer, _, _, _ = list(ranks_of(name, given, 2))[1]
        results.append(layer(hidden, logits_for(layer, hidden)))
    assert torch.equal(found[0], expected[0])  # the second rank has the largest anyway


@pytest.mark.parametrize("name", NVFP4)
def test_steps_that_are_written_later_are_seen(name):
    """Also one of another rank's expert."""
    tensors = expert_tensors(name)
    layer, _, hidden, _ = next(ranks_of(name, tensors, 2))
    logits = logits_for(layer, hidden)
    before = layer(hidden, logits)
    with torch.no_grad():
        steps = getattr(layer, f"w2_{STEPS[name]}")
        steps[-1] = steps[-1] / 512 if "global" in STEPS[name] else steps[-1] * 512
    assert not torch.equal(layer(hidden, logits), before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
@pytest.mark.parametrize("name", ["qwen3_moe-modelopt-nvfp4", "mixtral-modelopt-fp8"])
def test_a_step_that_is_no_number_is_named(name, value):
    layer, _, hidden, _ = next(ranks_of(name, expert_tensors(name), 2))
    with torch.no_grad():
        layer.w13_input_scale[:] = value
    with pytest.raises(Error, match="scale") as caught:
        layer(hidden, logits_for(layer, hidden))
    assert str(value).removesuffix(".0") in str(caught.value)


def test_use_global_sf_changes_nothing():
    name = "qwen3_moe-modelopt-nvfp4"
    tensors = spread_steps(name)
    config = {**config_of(name)[1], "use_global_sf": True}
    for (one, _, hidden, _), (other, *_) in zip(
        ranks_of(name, tensors, 2), ranks_of(name, tensors, 2, config), strict=True
    ):
        logits = logits_for(one, hidden)
        assert torch.equal(one(hidden, logits), other(hidden, logits))


def test_a_call_takes_static_scales_of_all_experts():
    generator = torch.Generator().manual_seed(4)
    w1 = torch.randn(2, 256, 128, generator=generator).to(torch.float8_e4m3fn)
    w2 = torch.randn(2, 128, 128, generator=generator).to(torch.float8_e4m3fn)
    hidden = torch.randn(5, 128, generator=generator)
    ids, shares = torch.tensor([[0, 3]] * 5, dtype=torch.int32), torch.ones(5, 2)
    steps = torch.tensor([0.01, 0.5, 0.02, 0.03])

    def run(a1, a2):
        config = vllm.fp8_w8a8_moe_quant_config(torch.ones(2), torch.ones(2), a1, a2)
        return vllm.fused_experts(
            hidden, w1, w2, shares, ids, expert_map=[0, -1, -1, 1], quant_config=config
        )

    assert torch.equal(run(steps, 9 * steps), run(torch.tensor(0.5), torch.tensor(4.5)))
    assert torch.equal(run(steps[:1], steps[3:]), run(steps[0].expand(4), steps[3]))
    # Those of experts elsewhere may be absent, those of its own not.
    assert torch.equal(
        run(torch.tensor([0.5, 0, 0, 0.1]), steps), run(torch.tensor(0.5), torch.tensor(0.5))
    )
    with pytest.raises(Error, match=r"a1_scale, expert 3: .*found 0"):
        run(torch.tensor([0.5, 0.1, 0.1, 0]), steps)
    with pytest.raises(Error, match=r"a1_scale: expected 1 or 2 or 4 numbers, found 3"):
        run(steps[:3], steps)
