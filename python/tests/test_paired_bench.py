"""The bench of pairs without a GPU: alternation, spread, reports, plug-ins, its float64 layer."""

from __future__ import annotations

import json
import pathlib
import random
import sys

import pytest

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench" / "h200"
sys.path.insert(0, str(BENCH))

from paired import alternation, cases, goals, plugin, report, statistics  # noqa: E402

from support.fake_device import FakeDevice  # noqa: E402


def test_hot_times_leave_out_the_warming_share() -> None:
    device = FakeDevice({"a": 100.0, "b": 300.0}, warm_after=0.9)
    times = alternation.time_hot(device, ["a", "b"], 2.0, random.Random(1))
    assert set(times["a"]) == {100.0} and set(times["b"]) == {300.0}
    assert len(times["a"]) == len(times["b"]) > 1000
    assert device.outstanding == 0 and device.clock == pytest.approx(2.0, abs=0.05)


def test_hot_order_is_random_and_even() -> None:
    device = FakeDevice({"a": 1000.0, "b": 1000.0, "c": 1000.0})
    alternation.time_hot(device, ["a", "b", "c"], 1.0, random.Random(1))
    rounds = [tuple(device.log[i : i + 3]) for i in range(0, len(device.log), 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len(set(rounds)) == 6


def test_hot_keeps_the_device_busy_between_batches() -> None:
    device = FakeDevice({"a": 50.0})
    waits = []
    enqueue = device.enqueue
    device.enqueue = lambda names: (waits.append(device.clock - device.busy_until), enqueue(names))[
        1
    ]
    alternation.time_hot(device, ["a"], 0.5, random.Random(1))
    assert max(waits[2:]) <= 0  # the queue was never empty when more was asked for


def test_hot_times_long_replays_often_enough_but_not_for_ever() -> None:
    times = alternation.time_hot(FakeDevice({"a": 2e5}), ["a"], 1.0, random.Random(1))
    assert len(times["a"]) >= alternation.LEAST_REPLAYS
    device = FakeDevice({"a": 5e6})
    assert len(alternation.time_hot(device, ["a"], 1.0, random.Random(1))["a"]) >= 1
    assert device.clock < 30


def test_cool_rests_before_every_replay() -> None:
    device = FakeDevice({"a": 10.0, "b": 20.0})
    times = alternation.time_cool(device, ["a", "b"], 3, 0.25, random.Random(1))
    assert times == {"a": [10.0] * 3, "b": [20.0] * 3}
    assert device.log[::2] == ["sleep"] * 6


def test_spread_of_known_values() -> None:
    row = statistics.spread([4.0, 1.0, 3.0, 2.0, 5.0]).as_row()
    assert row == {"us": 3.0, "q1": 2.0, "q3": 4.0, "n": 5}
    assert statistics.spread([7.0]).as_row() == {"us": 7.0, "q1": 7.0, "q3": 7.0, "n": 1}
    with pytest.raises(ValueError, match="no times"):
        statistics.spread([])


def test_cases_are_parsed_and_ordered_by_weight() -> None:
    odd = cases.parse_case("48x6x1792x640:e4m3")
    assert (odd.experts, odd.top_k, odd.hidden, odd.inner, odd.format) == (48, 6, 1792, 640, "e4m3")
    with pytest.raises(ValueError, match="unknown case"):
        cases.parse_case("48x6x1792")
    assert all(name in cases.CASES for name in cases.DEFAULT_CASES)
    ((_, tokens),) = cases.cells_in_order([odd], [1, 48, 1024])
    assert tokens == [1024, 1, 48]


def test_a_missing_or_broken_plugin_says_why(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(
        "TITLE = WHAT = 'x'\nFORMATS = ('bf16',)\ndef open():\n    raise OSError('no such thing')\n"
    )
    peer = plugin.find(str(path))
    assert peer.candidates is None and peer.reason == "OSError: no such thing"
    with pytest.raises(ValueError, match="unknown peer"):
        plugin.find("nothing")
    assert {"ours", "grouped_mm", "cublas", "deepgemm", "vllm_triton"} <= set(plugin.known_names())


def test_a_graph_keeps_what_its_replays_read(torch, monkeypatch: pytest.MonkeyPatch) -> None:
    import contextlib
    import gc
    import types
    import weakref

    from paired import device

    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    fake = types.SimpleNamespace(
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda s: contextlib.nullcontext(),
        synchronize=lambda: None,
        CUDAGraph=object,
        graph=lambda graph, stream: contextlib.nullcontext(),
    )
    monkeypatch.setattr(device.torch, "cuda", fake)
    offsets = torch.arange(3)
    alive = weakref.ref(offsets)
    graph = device.Graph(lambda index, offsets=offsets: offsets + index, 2)
    del offsets
    gc.collect()
    assert alive() is not None
    del graph
    gc.collect()
    assert alive() is None


def test_a_run_goes_on_without_the_peer_that_lost_the_gpu(tmp_path: pathlib.Path) -> None:
    from paired import bench

    given = ["--peers", "ours,cublas,/a/b/mine.py", "--out", str(tmp_path / "o"), "--limit", "500"]
    more = bench.arguments_without("mine", bench.parse(given), 99.0)
    assert more is not None
    options = bench.parse([*given, *more])
    assert (options.peers, options.limit, options.skip) == ("ours,cublas", 99.0, [options.out])
    assert bench.arguments_without("ours", options, 99.0) is None
    assert bench.arguments_without("cublas", options, bench.CELL_SECONDS - 1) is None
    assert bench.arguments_without("cublas", bench.parse(["--peers", "ours,cublas"]), 99.0) is None


def lines_of_a_run() -> list:
    cell = {
        "kind": "cell",
        "case": "qwen3-30b",
        "format": "bf16",
        "tokens": 1024,
        "error": 0.004,
        "label": "x",
        "active_bytes": 1e9,
        "flops": 1e10,
    }
    hot = {"us": 200.0, "q1": 198.0, "q3": 204.0, "n": 90}
    return [
        json.dumps(row)
        for row in (
            {"kind": "machine", "device": "NVIDIA H200", "commit": "abc"},
            {"kind": "peer", "peer": "ours", "title": "Conclave", "what": "layer", "absent": ""},
            {
                "kind": "peer",
                "peer": "vllm_triton",
                "title": "vLLM Triton",
                "what": "layer",
                "absent": "",
            },
            {
                "kind": "peer",
                "peer": "deepgemm",
                "title": "DeepGEMM",
                "what": "products",
                "absent": "no module",
            },
            {**cell, "peer": "ours", "hot": hot, "cool": {**hot, "us": 180.0}},
            {
                **cell,
                "peer": "vllm_triton",
                "hot": {**hot, "us": 300.0},
                "cool": {**hot, "us": 216.0},
            },
            {
                "kind": "absent",
                "peer": "deepgemm",
                "case": "qwen3-30b",
                "tokens": 1024,
                "reason": "no module",
            },
        )
    ]


def test_report_has_ratios_spread_and_what_is_absent() -> None:
    text = report.markdown(report.Results(lines_of_a_run()), "2026-11-22", "cmd")
    assert "| 1024 | 200.0 | 3.0 % (90) | 180.0 | 1.50 / 1.20 | - | 1.04 | 4.0e-03 |" in text
    assert "- deepgemm: no module (1 cells, first qwen3-30b 1024)" in text
    table = report.readme_table(report.Results(lines_of_a_run()))
    assert "| Qwen3-30B-A3B, bf16 | - | - | 200 (1.50 / 1.20) | - |" in table


def cell_of(**us: float) -> dict:
    row = {"active_bytes": 42e6, "flops": 1e9, "format": "int4"}
    return {name: {**row, "hot": {"us": time, "q1": time, "q3": time}} for name, time in us.items()}


def test_a_goal_is_the_largest_of_its_bounds() -> None:
    near = goals.goal_of(cell_of(ours=30.0, marlin=20.0, humming=22.0), 16)
    assert near == goals.Goal(pytest.approx(18.0), "bytes", "marlin")
    far = goals.goal_of(cell_of(ours=30.0, marlin=44.0, humming=33.0), 16384)
    assert far == goals.Goal(pytest.approx(30.0), "peer / 1.1", "humming")
    assert goals.verdict(29.9, far) == "met"
    prefill = goals.goal_of(cell_of(ours=45.0, humming=33.0, ours_bf16=40.0), 16384)
    assert prefill == goals.Goal(pytest.approx(40.8), "1.02 bf16", "humming")
    assert goals.verdict(45.0, prefill) == "missed by 10 %"
    assert goals.goal_of(cell_of(ours=30.0, marlin=20.0), 48) is None
    assert goals.goal_of(cell_of(marlin=20.0), 16) is None


def test_the_readme_is_remade_between_its_marks() -> None:
    results = report.Results(lines_of_a_run())
    page = (BENCH.parents[1] / "README.md").read_text(encoding="utf-8")
    once = report.put_between_marks(page, report.readme_text(results))
    assert "| Qwen3-30B-A3B, bf16 | - | - | 200 (1.50 / 1.20) | - |" in once
    assert "apart. Commit abc" in once and "time of vLLM Triton over ours" in once
    assert report.put_between_marks(once, report.readme_text(results)) == once
    assert once.startswith("# Conclave") and once.endswith(page[-400:])
    with pytest.raises(ValueError, match="the page needs one line"):
        report.put_between_marks("no marks", "text")


@pytest.mark.parametrize(
    ("form", "gpt_oss"),
    [(form, False) for form in ("bf16", "e4m3", "int4", "mxfp4", "nvfp4")] + [("mxfp4", True)],
)
def test_the_reference_accepts_our_layer_and_refuses_another(
    torch, form: str, gpt_oss: bool
) -> None:
    from paired.peers import ours
    from paired.problem import Problem, Weights

    import conclave

    case = cases.Case("small", 6, 2, 256, 128, form, gpt_oss)
    weights = Weights(case, device="cpu")
    problem = Problem(case, 9, weights, device="cpu")
    run = ours.forward_of(ours.make_layer(conclave, weights, 9), problem)
    outputs = [run(index).clone() for index in range(problem.routings)]
    assert problem.layer_error(outputs) < case.weight_format.limit
    outputs[0][8, :8] = 0
    assert problem.layer_error(outputs) > case.weight_format.limit
    outputs[0][8, 0] = float("nan")
    assert problem.layer_error(outputs) == float("inf")


def test_marlins_e4m3_scales_keep_exponent_and_mantissa(torch) -> None:
    from paired.peers import _marlin_layout

    scales = torch.full((64, 4), 2.0).to(torch.float8_e4m3fn)
    scales[0] = 448.0
    packed = _marlin_layout.pack_e4m3_scales(scales)
    # 256 and 57344 in binary16, without the sign and with three bits of mantissa.
    assert packed.shape == (4, 64) and packed.unique().tolist() == [0xB8, 0xF6]
    assert packed[:, 0].tolist() == [0xF6] * 4


def test_marlins_biases_of_a_lane_lie_together(torch) -> None:
    from paired.peers import _marlin_layout

    packed = _marlin_layout.pack_bias(torch.arange(64).view(1, 64))
    assert packed[0, :8].tolist() == [0, 1, 8, 9, 16, 17, 24, 25]
    assert packed[0, 40:48].tolist() == [34, 35, 42, 43, 50, 51, 58, 59]


def test_sorting_by_torch_pads_every_expert(torch) -> None:
    from paired.peers._vllm_align import agree, align_by_torch

    ids = torch.tensor([[2, 0], [2, 4], [0, 2]], dtype=torch.int32)
    order, owners, padded = align_by_torch(ids, 2, 5)
    assert padded.tolist() == [8]
    assert owners.tolist()[:4] == [0, 2, 2, 4]
    assert order.tolist()[:8] == [1, 4, 0, 2, 5, 6, 3, 6]
    assert agree((order, owners, padded), (order, owners, padded), 2)
    assert not agree((order, owners.flip(0), padded), (order, owners, padded), 2)
