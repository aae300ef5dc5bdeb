"""conclave.Layer against a float64 oracle."""

from __future__ import annotations

import numpy
import pytest

import conclave
from conclave.errors import ConclaveTypeError, ConclaveValueError
from support.problems import (
    FLOAT32_BAR,
    HALF_BAR,
    expected_output,
    expert_rows,
    gelu,
    make_problem,
    relu2,
    worst_error,
)


@pytest.mark.parametrize("tokens", [0, 1, 5, 64])
@pytest.mark.parametrize("sizes", [(6, 3), (10, 5), (60, 1), (4, 4)])
def test_given_routing_matches_float64(tokens, sizes):
    experts, top_k = sizes
    problem = make_problem(
        numpy.random.default_rng(tokens), experts=experts, top_k=top_k, tokens=tokens
    )
    out = problem.layer()(problem.hidden, **problem.routing)
    assert isinstance(out, numpy.ndarray) and out.dtype == numpy.float32
    assert worst_error(out, problem.expected()) <= FLOAT32_BAR


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", ["float32", "bfloat16", "float16"])
def test_types_of_weights_and_rows_are_independent(problem, torch, dtype, rows):
    weights = {
        name: torch.tensor(w).to(getattr(torch, dtype)) for name, w in problem.weights.items()
    }
    hidden = torch.tensor(problem.hidden).to(getattr(torch, rows))
    layer = conclave.Layer.from_tensors(problem.spec, **weights)
    out = layer(
        hidden,
        topk_ids=torch.tensor(problem.topk_ids).long(),
        topk_weights=torch.tensor(problem.topk_weights),
    )
    assert out.dtype == hidden.dtype and layer.spec.weight_dtype == dtype
    expected = expected_output(
        hidden.double(),
        weights["gate_up"].double(),
        weights["down"].double(),
        problem.topk_ids,
        problem.topk_weights,
    )
    bar = FLOAT32_BAR if dtype == rows == "float32" else HALF_BAR
    assert worst_error(out, expected) <= bar


def test_gate_routes_as_softmax_topk(problem):
    layer = conclave.Layer.from_tensors(problem.spec, **problem.weights, router=problem.router)
    tokens, top_k = problem.topk_ids.shape
    logits = numpy.empty((tokens, 6), "float32")
    ids = numpy.empty((tokens, top_k), "int32")
    weights = numpy.empty((tokens, top_k), "float32")
    out = layer(problem.hidden, captured_logits=logits, captured_ids=ids, captured_weights=weights)
    exact = problem.hidden.astype("float64") @ problem.router.astype("float64").T
    numpy.testing.assert_allclose(logits, exact, atol=2e-5)
    numpy.testing.assert_array_equal(ids, numpy.argsort(-exact, axis=1)[:, :top_k])
    chosen = numpy.exp(numpy.take_along_axis(exact, ids.astype("int64"), axis=1))
    numpy.testing.assert_allclose(weights, chosen / chosen.sum(axis=1, keepdims=True), rtol=1e-4)
    expected = expected_output(problem.hidden, problem.gate_up, problem.down, ids, weights)
    assert worst_error(out, expected) <= FLOAT32_BAR


def test_router_logits_are_used_as_they_are(problem):
    logits = numpy.random.default_rng(3).standard_normal((9, 6)).astype("float32")
    weights, ids = conclave.route(logits, problem.top_k, conclave.RouterSpec())
    out = problem.layer()(problem.hidden, router_logits=logits)
    expected = expected_output(problem.hidden, problem.gate_up, problem.down, ids, weights)
    assert worst_error(out, expected) <= FLOAT32_BAR


def split_layouts(problem):
    gate, up = numpy.split(problem.gate_up, 2, axis=1)
    interleaved = numpy.stack([gate, up], axis=2).reshape(problem.gate_up.shape)
    return {
        "apart": ({"gate": gate, "up": up, "down": problem.down}, {}),
        "lists": ({"gate_up": list(problem.gate_up), "down": list(problem.down)}, {}),
        "lists apart": ({"gate": list(gate), "up": list(up), "down": list(problem.down)}, {}),
        "interleaved": (
            {"gate_up": interleaved, "down": problem.down},
            {"gate_up_order": "interleaved"},
        ),
        "transposed view": (
            {
                "gate_up": problem.gate_up.transpose(0, 2, 1),
                "down": problem.down.transpose(0, 2, 1),
            },
            {"transposed": True},
        ),
        "transposed copy, interleaved": (
            {
                "gate_up": interleaved.transpose(0, 2, 1).copy(),
                "down": problem.down.transpose(0, 2, 1).copy(),
            },
            {"transposed": True, "gate_up_order": "interleaved"},
        ),
        "strided": (
            {
                "gate_up": numpy.repeat(problem.gate_up, 2, axis=2)[:, :, ::2],
                "down": numpy.repeat(problem.down, 3, axis=0)[::3],
            },
            {},
        ),
        "reversed": (
            {
                "gate_up": problem.gate_up[:, :, ::-1].copy()[:, :, ::-1],
                "down": problem.down[:, ::-1].copy()[:, ::-1],
            },
            {},
        ),
    }


LAYOUTS = list(split_layouts(make_problem(numpy.random.default_rng(0))))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_same_bits(problem, name):
    weights, arguments = split_layouts(problem)[name]
    layer = conclave.Layer.from_tensors(problem.spec, **weights, **arguments)
    out = layer(problem.hidden, **problem.routing)
    numpy.testing.assert_array_equal(out, problem.layer()(problem.hidden, **problem.routing))


def test_half_precision_transposes_are_gathered(problem, torch):
    plain = {name: torch.tensor(w).bfloat16() for name, w in problem.weights.items()}
    turned = {name: w.transpose(1, 2).contiguous() for name, w in plain.items()}
    layer = conclave.Layer.from_tensors(problem.spec, **plain)
    other = conclave.Layer.from_tensors(problem.spec, **turned, transposed=True)
    hidden = torch.tensor(problem.hidden).bfloat16()
    assert torch.equal(layer(hidden, **problem.routing), other(hidden, **problem.routing))


def test_activation_without_a_gate(problem):
    up = problem.gate_up[:, :28]
    spec = conclave.MoeSpec(top_k=3, activation="relu2_no_mul")
    for weights in ({"gate_up": up}, {"up": up}):
        layer = conclave.Layer.from_tensors(spec, **weights, down=problem.down)
        out = layer(problem.hidden, **problem.routing)
        expected = expected_output(
            problem.hidden, up, problem.down, problem.topk_ids, problem.topk_weights, relu2
        )
        assert worst_error(out, expected) <= FLOAT32_BAR


def test_biases_follow_the_order_of_the_rows(problem):
    random = numpy.random.default_rng(5)
    bias = random.standard_normal((6, 56)).astype("float32")
    down_bias = random.standard_normal((6, 40)).astype("float32")
    spec = conclave.MoeSpec(top_k=3, activation="gelu", has_bias=True)
    order = numpy.arange(56).reshape(2, 28).T.reshape(-1)  # gate 0, up 0, gate 1, ...
    layers = [
        conclave.Layer.from_tensors(
            spec, **problem.weights, gate_up_bias=bias, down_bias=down_bias
        ),
        conclave.Layer.from_tensors(
            spec,
            gate_up=problem.gate_up[:, order],
            down=problem.down,
            gate_up_bias=bias[:, order],
            down_bias=down_bias,
            gate_up_order="interleaved",
        ),
    ]
    ones = numpy.concatenate([problem.hidden, numpy.ones((9, 1), "float32")], axis=1)
    gate_up = numpy.concatenate([problem.gate_up, bias[:, :, None]], axis=2)
    expected = numpy.zeros((9, 40))
    for token in range(9):
        for slot in range(3):
            expert = problem.topk_ids[token, slot]
            row = expert_rows(
                ones[token, None].astype("float64"),
                gate_up[expert].astype("float64"),
                problem.down[expert].astype("float64"),
                gelu,
            )[0]
            expected[token] += problem.topk_weights[token, slot] * (row + down_bias[expert])
    for layer in layers:
        assert worst_error(layer(problem.hidden, **problem.routing), expected) <= FLOAT32_BAR


def test_shared_expert_is_added_or_apart(problem):
    random = numpy.random.default_rng(11)
    gate_up = random.standard_normal((2 * 20, 40)).astype("float32") / 6
    down = random.standard_normal((40, 20)).astype("float32") / 4
    spec = conclave.MoeSpec(
        top_k=3, shared=conclave.SharedExpertSpec(mode="add", intermediate_size=20)
    )
    layer = conclave.Layer.from_tensors(
        spec, **problem.weights, shared_gate_up=gate_up, shared_down=down
    )
    shared = expert_rows(*(a.astype("float64") for a in (problem.hidden, gate_up, down)))
    out = layer(problem.hidden, **problem.routing)
    assert worst_error(out, problem.expected() + shared) <= FLOAT32_BAR
    part = numpy.empty_like(problem.hidden)
    routed = layer(problem.hidden, **problem.routing, shared_out=part)
    assert worst_error(part, shared) <= FLOAT32_BAR
    assert worst_error(routed, problem.expected()) <= FLOAT32_BAR


@pytest.mark.usefixtures("float32_products")
def test_block_scaled_e4m3(torch):
    """Weight-only: w = code * scale of its block."""
    random = numpy.random.default_rng(2)
    problem = make_problem(random, hidden=160, inner=128)
    codes, exact, scales = {}, {}, {}
    for name, weights in problem.weights.items():
        experts, rows, cols = weights.shape
        blocks = (experts, -(-rows // 128), -(-cols // 128))
        scale = torch.tensor(random.uniform(0.01, 0.02, blocks).astype("float32"))
        wide = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :rows, :cols]
        codes[name] = (torch.tensor(weights) / wide).to(torch.float8_e4m3fn)
        exact[name] = codes[name].double() * wide.double()
        scales[f"{name}_scale"] = scale
    spec = conclave.MoeSpec(top_k=3, quant=conclave.QuantSpec(weights="block"))
    layer = conclave.Layer.from_tensors(spec, **codes, **scales)
    assert layer.spec.weight_dtype == "float8_e4m3fn"
    out = layer(problem.hidden, **problem.routing)
    expected = expected_output(
        problem.hidden, exact["gate_up"], exact["down"], problem.topk_ids, problem.topk_weights
    )
    assert worst_error(out, expected) <= FLOAT32_BAR


def test_channel_and_tensor_scales_take_every_shape(torch):
    problem = make_problem(numpy.random.default_rng(2))
    codes = {
        name: (torch.tensor(w) * 64).to(torch.float8_e4m3fn) for name, w in problem.weights.items()
    }
    channel = {
        "gate_up_scale": torch.full((6, 56), 1 / 64),
        "down_scale": torch.full((6, 40), 1 / 64),
    }
    tensor = {"gate_up_scale": torch.full((6, 2), 1 / 64), "down_scale": torch.full((6,), 1 / 64)}
    variants = [
        ("channel", channel),
        ("channel", {name: scale[:, :, None] for name, scale in channel.items()}),
        ("channel", {name: scale.bfloat16() for name, scale in channel.items()}),
        ("tensor", tensor),
        ("tensor", {**tensor, "gate_up_scale": torch.full((6,), 1 / 64)}),
        ("tensor", {**tensor, "gate_up_scale": torch.full((6, 1, 1), 1 / 64)}),
        # 127 - 6: an exponent of e8m0 in a byte.
        ("tensor", {name: torch.full((6,), 121, dtype=torch.uint8) for name in tensor}),
    ]
    outputs = []
    for weights, scales in variants:
        spec = conclave.MoeSpec(top_k=3, quant=conclave.QuantSpec(weights=weights))
        layer = conclave.Layer.from_tensors(spec, **codes, **scales)
        outputs.append(layer(problem.hidden, **problem.routing))
    for out in outputs[1:]:
        numpy.testing.assert_array_equal(out, outputs[0])


def test_out_may_be_given_and_may_be_hidden(problem):
    layer = problem.layer()
    expected = layer(problem.hidden, **problem.routing)
    out = numpy.full_like(problem.hidden, numpy.nan)
    assert layer(problem.hidden, **problem.routing, out=out) is out
    numpy.testing.assert_array_equal(out, expected)
    wide = numpy.zeros((9, 64), "float32")
    layer(problem.hidden, **problem.routing, out=wide[:, 8:48])
    numpy.testing.assert_array_equal(wide[:, 8:48], expected)
    assert not wide[:, :8].any() and not wide[:, 48:].any()
    hidden = problem.hidden.copy()
    layer(hidden, **problem.routing, out=hidden)
    numpy.testing.assert_array_equal(hidden, expected)


def test_padding_and_num_tokens(problem):
    layer = problem.layer()
    expected = layer(problem.hidden, **problem.routing)
    mask = numpy.array([True, False] * 4 + [True])
    masked = layer(problem.hidden, **problem.routing, padding_mask=mask)
    numpy.testing.assert_array_equal(masked[mask], expected[mask])
    assert not masked[~mask].any()
    for count in (4, numpy.array([4])):
        out = numpy.full_like(problem.hidden, 7)
        layer(problem.hidden, **problem.routing, num_tokens=count, out=out)
        numpy.testing.assert_array_equal(out[:4], expected[:4])
        assert (out[4:] == 7).all()


def test_ids_that_are_none(problem):
    problem.topk_ids[0] = [-1, -1, -1]
    problem.topk_ids[3, 1] = 6
    with pytest.raises(ConclaveValueError, match=r"topk_ids.*token 3, slot 1.*found 6"):
        problem.layer()(problem.hidden, **problem.routing)
    layer = problem.layer(options=conclave.LayerOptions(id_policy="skip"))
    out = layer(problem.hidden, **problem.routing)
    assert not out[0].any()
    assert worst_error(out[1:], problem.expected()[1:]) <= FLOAT32_BAR
    assert layer.stats().skipped_ids == 1


def test_rows_of_a_gate_with_nan_are_counted(problem):
    router = problem.router.copy()
    router[[1, 4], 3] = numpy.nan
    with pytest.warns(RuntimeWarning, match=r"2 of 6 rows of the gate have NaN, 1, 4"):
        layer = conclave.Layer.from_tensors(problem.spec, **problem.weights, router=router)
    assert layer.stats().gate_rows_with_nan == 2
    layer.reset_stats()
    assert layer.stats().gate_rows_with_nan == 2
    layer.reload(**problem.weights, router=problem.router)
    assert layer.stats().gate_rows_with_nan == 0


def test_part_of_the_experts_by_a_map(problem):
    """Two ranks of three experts each: their partial sums add up."""
    total = numpy.zeros((9, 40))
    for rank, mine in enumerate([[4, 0, 2], [1, 3, 5]]):
        expert_map = [mine.index(e) if e in mine else -1 for e in range(6)]
        parallel = conclave.ParallelSpec(
            ep_size=2,
            ep_rank=rank,
            placement="custom",
            rank_of=[rank if e in mine else 1 - rank for e in range(6)],
            reduce="partial",
        )
        layer = conclave.Layer.from_tensors(
            problem.spec,
            gate_up=problem.gate_up[mine],
            down=problem.down[mine],
            expert_map=expert_map,
            parallel=parallel,
        )
        assert layer.plan["num_local_experts"] == 3
        total += layer(problem.hidden, **problem.routing)
    assert worst_error(total, problem.expected()) <= FLOAT32_BAR


def test_stats_count_rows_and_time(problem):
    layer = problem.layer()
    assert layer.stats().balance is None
    layer(problem.hidden, **problem.routing)
    layer(problem.hidden, **problem.routing)
    stats = layer.stats()
    load = numpy.bincount(problem.topk_ids.reshape(-1), minlength=6) * 2
    assert stats.expert_load == tuple(load)
    assert stats.balance == pytest.approx(load.max() / load.mean())
    assert (stats.forwards, stats.tokens) == (2, 18)
    assert stats.timings_ns["total_ns"] >= stats.timings_ns["experts_ns"] > 0
    layer.reset_stats()
    assert layer.stats().expert_load == (0,) * 6
    silent = problem.layer(count=False)
    silent(problem.hidden, **problem.routing)
    assert silent.stats().expert_load is None and silent.stats().timings_ns is None


def test_explain_and_repr(problem):
    layer = problem.layer()
    assert "kernel" in layer.explain() and "chosen" in layer.explain()
    assert any(row["chosen"] and row["table"] == "kernel" for row in layer.plan["rows"])
    assert "6 experts, top 3, 40 x 28, float32, cpu" in repr(layer)
    forced = problem.layer(options=conclave.LayerOptions(kernel="cpu.reference"))
    assert {"cpu.reference"} == {
        row["name"] for row in forced.plan["rows"] if row["chosen"] and row["table"] == "kernel"
    }


@pytest.mark.parametrize("mode", ["staged", "in_place"])
def test_reload_replaces_the_weights(problem, make, mode):
    other = make(numpy.random.default_rng(99))
    layer = problem.layer()
    layer.reload(mode=mode, **other.weights)
    out = layer(problem.hidden, **problem.routing)
    numpy.testing.assert_array_equal(out, other.layer()(problem.hidden, **problem.routing))
    with pytest.raises(conclave.Error, match="down"):
        layer.reload(mode=mode, gate_up=other.gate_up, down=other.down[:, :, :-1])
    again = layer(problem.hidden, **problem.routing)
    numpy.testing.assert_array_equal(again, out)


def test_spec_fields_are_those_of_the_library():
    plain = conclave.spec.to_dict(conclave.MoeSpec(weight_dtype="bfloat16", has_gate=True))
    with_activation = conclave._conclave.default_spec()

    def filled(values):
        return {
            name: filled(value) if isinstance(value, dict) else value
            for name, value in values.items()
            if value is not None
        }

    assert plain == filled(with_activation)
    for kind, default in [
        (conclave.LayerOptions, conclave._conclave.default_options()),
        (conclave.ParallelSpec, conclave._conclave.default_parallel()),
    ]:
        assert conclave.spec.to_dict(kind()) == default


def test_parameters_are_counted(problem):
    spec = problem.layer().spec
    total, active = spec.count_parameters()
    assert total == 6 * 3 * 40 * 28
    assert active == 3 * 3 * 40 * 28


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("prefix", ["", "shared_"])
def test_interleaved_weights_can_be_separated(problem, torch, as_list, prefix):
    from conclave._shapes import separate_rows

    random = numpy.random.default_rng(5)

    def normal(*shape):
        return torch.tensor(random.standard_normal(shape).astype("float32"))

    weights = {name: torch.tensor(w) for name, w in problem.weights.items()}
    weights |= {"gate_up_bias": normal(6, 56), "down_bias": normal(6, 40)}
    weights |= {"shared_gate_up": normal(1, 48, 40), "shared_down": normal(1, 40, 24)}
    weights |= {"shared_gate_up_bias": normal(48), "shared_down_bias": normal(40)}
    if as_list:
        weights[f"{prefix}gate_up"] = list(weights[f"{prefix}gate_up"])
    shared = conclave.SharedExpertSpec(mode="add", intermediate_size=24, has_bias=True)
    spec = conclave.MoeSpec(top_k=3, has_bias=True, shared=shared)
    order = {f"{prefix}gate_up_order": "interleaved"}
    one = conclave.Layer.from_tensors(spec, **weights, **order)
    other = conclave.Layer.from_tensors(spec, **separate_rows(weights, prefix, False, False))
    expected = one(problem.hidden, **problem.routing)
    numpy.testing.assert_array_equal(other(problem.hidden, **problem.routing), expected)


def test_options_reach_the_layer(problem, tmp_path):
    text = (
        "conclave-tuning 1\n"
        "NVIDIA H200 | bf16 | E 128 H 2048 I 768 k 8 | T 64 | cuda.stream_sm90 | "
        "16x128x128B, 6 stages | 71.5\n"
    )
    table = conclave.TuningTable.parse(text)
    assert len(table) == 1 and conclave.TuningTable.parse(table.to_text()).entries == table.entries
    assert table.entries[0]["kernel"] == "cuda.stream_sm90" and table.entries[0]["tokens"] == 64
    path = tmp_path / "table.txt"
    path.write_text(text)
    expected = problem.layer()(problem.hidden, **problem.routing)
    for tuning in (table, path, str(path)):
        options = conclave.LayerOptions(
            tuning=tuning,
            transport="fixed_slots",
            ep_combine="reduced_per_rank",
            chunk_order="by_twos",
        )
        out = problem.layer(options=options)(problem.hidden, **problem.routing)
        numpy.testing.assert_array_equal(out, expected)
    for options, name in (
        ({"tuning": tmp_path / "none"}, "none"),
        ({"tuning": 3}, "tuning"),
        ({"transport": "pigeon"}, "transport.*fixed_slots"),
        ({"chunk_order": "by_threes"}, "chunk_order.*by_twos"),
    ):
        with pytest.raises(conclave.Error, match=name):
            problem.layer(options=options)
    with pytest.raises(conclave.Error, match="line 2"):
        conclave.TuningTable.parse("conclave-tuning 1\nnothing\n")


def test_plan_lists_the_order_of_chunks_and_the_buffers(problem):
    layer = problem.layer(options=conclave.LayerOptions(chunk_order="by_twos", max_tokens=8))
    order = [row for row in layer.plan["rows"] if row["table"] == "chunks"]
    assert [row["name"] for row in order] == ["by_twos"]
    assert not order[0]["chosen"] and "in turn" in order[0]["reason"]
    names = {buffer["name"]: buffer for buffer in layer.plan["buffers"]}
    rows = names["expert rows"]
    assert rows["bytes"] > 0 and rows["first_stage"].startswith("experts")
    assert rows["last_stage"].startswith("combine")


def test_what_is_missing_or_of_another_kind_is_named(problem):
    gate_up = problem.weights["gate_up"]
    with pytest.raises(ConclaveTypeError, match="down: expected"):
        conclave.Layer.from_tensors(conclave.MoeSpec(top_k=2), gate_up=gate_up)
    with pytest.raises(ConclaveTypeError, match=r"expected MoeSpec.*found NoneType"):
        conclave.Layer.from_tensors(None, **problem.weights)
    with pytest.raises(ConclaveTypeError, match="layer: expected a layer"):
        problem.layer().reload("nowhere")


@pytest.mark.parametrize("transposed", [False, True])
def test_interleaved_rows_come_apart_where_they_lie(transposed):
    from conclave._shapes import separate_rows

    rows = numpy.arange(2 * 6 * 5, dtype="float32").reshape(2, 6, 5)
    stack = rows.swapaxes(1, 2) if transposed else rows
    apart = separate_rows({"gate_up": stack}, "", transposed, True)
    for name, first in (("gate", 0), ("up", 1)):
        found = apart[name].swapaxes(1, 2) if transposed else apart[name]
        numpy.testing.assert_array_equal(found, rows[:, first::2])
