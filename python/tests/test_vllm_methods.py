"""conclave.vllm.FusedMoE on the checkpoints of every method, loaded by name as an engine does."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors.torch")

from conclave import vllm  # noqa: E402
from conclave.errors import ConclaveUnsupportedError, ConclaveValueError  # noqa: E402
from support.method_layers import (  # noqa: E402
    NAMES,
    OTHERS,
    RUN,
    bar_of,
    layer_of,
    load,
    logits_for,
)
from support.problems import FLOAT32_BAR, worst_error  # noqa: E402

pytestmark = pytest.mark.usefixtures("float32_products")


@pytest.mark.parametrize("name", RUN)
def test_a_checkpoint_loads_and_matches_float64(name):
    layer, hidden, expected = layer_of(name)
    tensors, taken = load(layer, name)
    assert len(taken) == len(tensors)
    out = layer(hidden, logits_for(layer, hidden))
    assert worst_error(out, expected) <= bar_of(name)
    assert torch.equal(out, layer(hidden, logits_for(layer, hidden)))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in RUN])
def test_what_has_no_parameters_says_why(name):
    reason = next(text for part, text in OTHERS.items() if part in name)
    with pytest.raises(ConclaveUnsupportedError, match=reason):
        layer_of(name)


# Splits.


def on_ranks(name, ranks, check=lambda layer: None, **split):
    parts = []
    for rank in range(ranks):
        made = {key: value(rank) for key, value in split.items()}
        layer, hidden, expected = layer_of(
            name, moe_parallel_config=vllm.FusedMoEParallelConfig(**made)
        )
        load(layer, name)
        check(layer)
        parts.append(layer(hidden, logits_for(layer, hidden)))
    return sum(parts), expected


@pytest.mark.parametrize("name", [name for name in RUN if bar_of(name) == FLOAT32_BAR])
def test_experts_over_ranks_add_up(name):
    total, expected = on_ranks(
        name, 2, ep_size=lambda r: 2, ep_rank=lambda r: r, use_ep=lambda r: True
    )
    assert worst_error(total, expected) <= FLOAT32_BAR


SLICED = [
    "mixtral-gptq-int8",
    "qwen3_moe-gptq-int4-channel",
    "qwen3_moe-gptq-int4-group32",
    "mixtral-awq-group128",
    "qwen3_moe-awq-group32",
    "qwen3_moe-compressed-int4-asymmetric",
    "mixtral-compressed-packed-int8-channel",
    "qwen3_moe-compressed-int8-channel",
    "mixtral-compressed-int8-asymmetric",
    "qwen3_moe-compressed-mxfp4",
    "qwen3_moe-compressed-nvfp4",
    "qwen3_moe-modelopt-nvfp4",
    "qwen3_moe-modelopt-mxfp8",
    "qwen3_moe-modelopt-awq",
    "qwen3_moe-quark-fp6-e2m3",
    "qwen3_moe-quark-int4",
    "mixtral-quark-uint4",
    "mixtral-quark-uint8",
    "mixtral-bnb-int8",
    # Each rank has all groups of columns, and codes whose blocks run over the ends of rows.
    *(name for name in RUN if "-order" in name or "bnb-nf4" in name or "bnb-fp4" in name),
]


# The number of ranks from which on slices of w2 cut the words that hold its codes.
CUT_WORDS = {
    "mixtral-compressed-int4-order": 4,  # 12 columns for each rank
    "qwen3_moe-gptq-int2-order": 4,
    "qwen3_moe-gptq-int3-order": 2,  # 32 codes are three words
    "qwen3_moe-gptq-v2-int3-order": 2,
}


def has_whole_words(name, ranks):
    return ranks < CUT_WORDS.get(name, ranks + 1)


@pytest.mark.parametrize("name", [name for name in SLICED if has_whole_words(name, 2)])
def test_slices_add_up(name):
    total, expected = on_ranks(name, 2, tp_size=lambda r: 2, tp_rank=lambda r: r)
    assert worst_error(total, expected) <= FLOAT32_BAR


@pytest.mark.parametrize("name", ["qwen3_moe-quark-int8-token", "mixtral-quark-int8-static"])
def test_int8_rows_of_experts_over_ranks_are_those_of_one(name):
    """A static step is the largest of all ranks', a row's own depends on nothing else."""
    split = {"ep_size": lambda r: 3, "ep_rank": lambda r: r, "use_ep": lambda r: True}
    total, expected = on_ranks(name, 3, **split)
    assert worst_error(total, expected) <= bar_of(name)


def test_slices_within_words_of_a_row_are_refused():
    with pytest.raises(ConclaveValueError, match=r"w2_weight: w2 .* reads 0 to 3 of 6 on axis 1"):
        on_ranks("qwen3_moe-quark-channel-int4", 2, tp_size=lambda r: 2, tp_rank=lambda r: r)


@pytest.mark.parametrize(("name", "ranks"), CUT_WORDS.items())
def test_slices_within_words_are_refused(name, ranks):
    with pytest.raises(ConclaveValueError, match=r"w2_\w+: w2 .* reads 0 to \d of \d on axis"):
        on_ranks(name, ranks, tp_size=lambda r: ranks, tp_rank=lambda r: r)


@pytest.mark.parametrize(
    "name",
    [name for name in SLICED if ("-order" in name or "bnb-" in name) and has_whole_words(name, 4)],
)
def test_four_slices_add_up_and_hold_no_more_than_their_codes(name):
    """Of 4 bits: those of w2 that a rank holds, and of w13 as many rows."""

    def check(layer):
        inner, hidden = layer.intermediate_size_per_partition, layer.hidden_size
        bytes_of = {key: param.numel() * param.element_size() for key, param in codes_of(layer)}
        unit = 1 if "int8" in name else 2
        experts = layer.local_num_experts
        assert bytes_of["w2"] == experts * inner * hidden // unit
        assert bytes_of["w13"] == 2 * experts * inner * hidden // unit

    total, expected = on_ranks(name, 4, check, tp_size=lambda r: 4, tp_rank=lambda r: r)
    assert worst_error(total, expected) <= FLOAT32_BAR


def codes_of(layer):
    for matrix in ("w13", "w2"):
        for key in ("qweight", "weight_packed", "weight"):
            if (param := getattr(layer, f"{matrix}_{key}", None)) is not None:
                yield matrix, param
                break


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mixtral-gptq-int4-group128-asymmetric", "whole groups of 128"),
    ],
)
def test_slices_that_planes_do_not_have_say_why(name, reason):
    split = vllm.FusedMoEParallelConfig(tp_size=2, tp_rank=0)
    with pytest.raises(ConclaveUnsupportedError, match=reason):
        layer_of(name, moe_parallel_config=split)
