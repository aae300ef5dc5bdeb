"""The check of the default choice of kernels: without a GPU its arithmetic, on one a small cell."""

from __future__ import annotations

import pathlib
import random
import sys

import pytest

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench" / "h200"
sys.path.insert(0, str(BENCH))

import tuning_check  # noqa: E402

from support.fake_device import FakeDevice  # noqa: E402

TILE = "16x128x256B, 6 stages"


def row(case: str, tokens: int, ratio: float) -> dict:
    return {
        "case": case,
        "tokens": tokens,
        "default": f"cuda.stream_sm90 {TILE}",
        "us": 71.54,
        "best": "cuda.tile_sm90 b",
        "ratio": ratio,
        "q1": ratio - 0.01,
        "q3": ratio + 0.01,
    }


def test_the_rung_of_a_call_names_the_choice() -> None:
    ladder = [
        {"first_tokens": 1, "last_tokens": 8, "kernel": "cuda.decode_sm90", "tile": ""},
        {"first_tokens": 9, "last_tokens": 64, "kernel": "cuda.stream_sm90", "tile": TILE},
    ]
    assert tuning_check.chosen(ladder, 8) == "cuda.decode_sm90"
    assert tuning_check.chosen(ladder, 9) == f"cuda.stream_sm90 {TILE}"


def test_ratios_are_of_the_replays_of_one_round() -> None:
    class Slowing(FakeDevice):
        """Every round takes longer than the one before, as of a chip that goes on warming."""

        def enqueue(self, names: list) -> list:
            rounds = [self.log.count(name) for name in names]
            ticket = super().enqueue(names)
            ticket[1] = [us * (1 + 0.1 * n) for us, n in zip(ticket[1], rounds, strict=True)]
            return ticket

    device = Slowing({"default": 9000.0, "a": 9900.0})
    us, ratios = tuning_check.alternate(device, ["a"], 0.5, 9, random.Random(1))
    assert us.count >= 9 and us.high > 1.1 * us.low
    assert ratios["a"].low == pytest.approx(1.1) and ratios["a"].high == pytest.approx(1.1)


def test_the_two_fastest_meet_the_default_again_for_longer() -> None:
    device = FakeDevice({"default": 100.0, "a": 99.0, "b": 97.0, "c": 300.0})
    found = tuning_check.contest(device, ["a", "b", "c"], 0.2, 15, random.Random(1))
    assert (found["best"], found["us"], found["ratio"]) == ("b", 100.0, 0.97)
    assert found["first"] == {"b": 0.97, "a": 0.99, "c": 3.0}
    last_of_c = len(device.log) - device.log[::-1].index("c")
    assert set(device.log[last_of_c:]) == {"default", "a", "b"}
    assert found["n"] >= 30 and found["n"] > 1.5 * device.log.count("c")


def test_noise_alone_is_no_loss() -> None:
    class Noisy(FakeDevice):
        def enqueue(self, names: list) -> list:
            ticket = super().enqueue(names)
            ticket[1] = [us * noise.uniform(0.8, 1.2) for us in ticket[1]]
            return ticket

    noise = random.Random(3)
    names = [f"choice {i}" for i in range(8)]
    device = Noisy(dict.fromkeys(["default", *names], 1000.0))
    found = tuning_check.contest(device, names, 0.3, 15, random.Random(1))
    assert min(found["first"].values()) < 0.99  # what the least of many medians would claim
    assert found["ratio"] > 0.99 and tuning_check.losses([{**row("x", 1, 0.0), **found}]) == []


def test_the_report_lists_losses_with_the_worst_first() -> None:
    rows = [row("qwen3-30b", 16, 0.97), row("olmoe", 64, 1.03), row("olmoe", 256, 0.9)]
    text = tuning_check.report([*rows, row("olmoe", 1, 0.981)])
    line = f"| olmoe, 64 | cuda.stream_sm90 {TILE} | 71.5 | cuda.tile_sm90 b "
    assert line + "| 1.030 (1.020 to 1.040) |" in text
    assert text.endswith(
        "The default loses more than 2% in 2 of 4 cells.\n"
        "- olmoe, 256 tokens: 10.0% to cuda.tile_sm90 b\n"
        "- qwen3-30b, 16 tokens: 3.0% to cuda.tile_sm90 b"
    )
    assert "in 0 of 0 cells." in tuning_check.report([])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--cases", "qwen3-30b-int4"], "qwen3-30b-int4: expected one of bf16, e4m3, found int4"),
        (["--cases", "48x6"], "unknown case"),
        (["--tokens", "16,x"], "invalid literal"),
        (["--tokens", "0"], "tokens: expected 1 or more"),
    ],
)
def test_wrong_options_are_refused(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tuning_check.parse(given)
    assert message in capsys.readouterr().err


def test_the_defaults_are_cases_of_both_formats() -> None:
    options = tuning_check.parse([])
    assert {case.format for case in options.cases} == {"bf16", "e4m3"}


def test_cells_beyond_the_limit_are_named(torch) -> None:
    lines: list[dict] = []
    options = tuning_check.parse(["--cases", "olmoe", "--tokens", "1,16", "--limit", "0"])
    assert tuning_check.run(options, lambda **fields: lines.append(fields)) == []
    assert [(line["kind"], line["tokens"]) for line in lines] == [("absent", 1), ("absent", 16)]


@pytest.mark.cuda
def test_small_cells_are_timed() -> None:
    given = ["--cases", "16x4x256x128,16x4x256x128:e4m3", "--tokens", "1,48", "--seconds", "0.05"]
    lines: list[dict] = []
    options = tuning_check.parse(given)
    rows = tuning_check.run(options, lambda **fields: lines.append(fields))
    assert [line["kind"] for line in lines] == ["choice"] * 4, lines
    for found in rows:
        assert found["best"] != found["default"] and found["default"] not in found["first"]
        assert 0.1 < found["ratio"] < 10 and found["n"] >= 30
