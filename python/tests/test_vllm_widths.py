"""conclave.vllm.FusedMoE over tensor-parallel ranks that do not divide the columns."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from conclave import vllm  # noqa: E402
from conclave.errors import ConclaveValueError  # noqa: E402
from conclave.vllm.weights import Columns  # noqa: E402
from support.devices import seeded  # noqa: E402
from support.problems import FLOAT32_BAR, HALF_BAR, worst_error  # noqa: E402

E, H = 3, 64
BLOCK = {"quant_method": "fp8", "weight_block_size": [32, 64], "activation_scheme": "dynamic"}
CHANNEL = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {
    "weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}}}  # fmt: skip
ENCODED = {"quant_method": "experts_int8"}


def layer_of(width, ranks=1, rank=0, **more):
    split = vllm.FusedMoEParallelConfig(tp_size=ranks, tp_rank=rank)
    mapping = vllm.FusedMoE.make_expert_params_mapping(None, "gate_proj", "down_proj", "up_proj", E)
    return vllm.FusedMoE(E, 2, H, width, moe_parallel_config=split, expert_mapping=mapping, **more)


def tensors_of(width, quant, bias):
    generator = seeded(width)
    fill = lambda *shape: torch.randn(*shape, generator=generator) / 4  # noqa: E731
    found = {"gate_up_proj": fill(E, 2 * width, H), "down_proj": fill(E, H, width)}
    if quant in (BLOCK, CHANNEL):
        found = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in found.items()}
    if quant is BLOCK:
        high, wide = -(-width // 32), -(-width // 64)
        found["gate_up_proj_weight_scale_inv"] = fill(E, 2 * high, 1).abs()
        found["down_proj_weight_scale_inv"] = fill(E, 2, wide).abs()
    if quant is CHANNEL:
        found["gate_up_proj_weight_scale"] = fill(E, 2 * width, 1).abs()
        found["down_proj_weight_scale"] = fill(E, H, 1).abs()
    if bias:
        found["gate_up_proj_bias"], found["down_proj_bias"] = fill(E, 2 * width), fill(E, H)
    return found


@pytest.mark.parametrize(
    ("width", "ranks", "quant", "more"),
    [
        (41, 2, None, {"has_bias": True}),
        (41, 3, None, {"activation": "swigluoai", "has_bias": True}),
        (1, 2, None, {"has_bias": True}),
        (5, 4, None, {}),
        (41, 3, CHANNEL, {}),
        (160, 2, BLOCK, {}),
        (128, 4, BLOCK, {}),
        (72, 2, BLOCK, {}),
        (41, 2, ENCODED, {}),
    ],
)
def test_parts_add_up(width, ranks, quant, more):
    tensors = tensors_of(width, quant, "has_bias" in more)
    generator = seeded(1)
    hidden, logits = (torch.randn(7, n, generator=generator) for n in (H, E))

    def run(*split):
        layer = layer_of(width, *split, quant_config=quant, **more)
        layer.load_weights(tensors.items())
        assert layer.moe_config.intermediate_size_per_partition == layer.w2_weight.shape[2]
        return layer(hidden, logits).double(), layer

    whole, _ = run()
    parts = [run(ranks, rank) for rank in range(ranks)]
    # Steps of codes that are made when they are loaded, and those of rows, are of a rank's part.
    bar = 4 * FLOAT32_BAR if quant is None else 4 * HALF_BAR
    assert worst_error(sum(out for out, _ in parts), whole) <= bar
    held = [layer._own_columns for _, layer in parts]
    assert [c.begin for c in held[1:]] == [c.end for c in held[:-1]]
    assert (held[0].begin, held[-1].end) == (0, width)


def test_units_stay_whole():
    parts = [Columns.of(320, 128, rank, 2) for rank in range(2)]
    assert [(p.begin, p.end, p.held) for p in parts] == [(0, 128, 128), (128, 320, 192)]
    parts = [Columns.of(3, 1, rank, 4) for rank in range(4)]
    assert [(p.begin, p.end, p.held) for p in parts] == [(0, 0, 1), (0, 1, 1), (1, 2, 1), (2, 3, 1)]


def test_tensors_of_another_width_are_refused():
    layer = layer_of(41, 3, 1)
    for width in (39, 40, 42, 42 * 2):
        with pytest.raises(ConclaveValueError, match=r"reads 13 to 27 of 41 on axis 0"):
            layer.weight_loader(layer.w13_weight, torch.ones(width, H), "w13_weight", "w1", 0)
    assert not layer.w13_weight.any()


def test_packed_codes_are_cut_evenly():
    with pytest.raises(ConclaveValueError, match="multiple of tp_size 3 for packed codes"):
        layer_of(64, 3, quant_config={"quant_method": "mxfp4"})
