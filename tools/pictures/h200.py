"""The H200's picture: every timed cell as a dot, a panel for each peer."""

import math

from . import drawing, records

BFLOAT_AND_E4M3 = ("2026-11-22-paired.jsonl",)
FOUR_BITS = (
    "2026-11-28-exact-paired.jsonl",
    "2026-11-28-int4-lanes-paired.jsonl",
    "2026-11-28-pairs-of-codes.jsonl",
    "2026-11-30-four-bits-paired.jsonl",
)
E4M3_ROWS = ("2026-11-29-mxfp4-fp8.jsonl", "2026-11-29-mxfp4-fp8-second.jsonl")
# title, what the peer does, its name in the records, the records
PANELS = (
    ("vLLM Triton", "whole layers, bf16 and e4m3", "vllm_triton", BFLOAT_AND_E4M3),
    ("DeepGEMM", "two bare products, no routing, no sum", "deepgemm", BFLOAT_AND_E4M3),
    ("torch grouped_mm", "two bare products, bf16", "grouped_mm", BFLOAT_AND_E4M3),
    ("Humming", "whole layers, int4, mxfp4, nvfp4", "humming", FOUR_BITS),
    ("Humming, rows of e4m3", "whole layers, mxfp4, long prompts", "humming", E4M3_ROWS),
)  # fmt: skip
PANEL_WIDTH, PANEL_HEIGHT, COLUMNS = 228, 190, 3
LEFT, TOP, STEP_X, STEP_Y = 50, 150, 272, 274
HIGHEST, LAST = 2.25, 14  # of the ratios, and log2 of 16384 tokens


def ratios(peer: str, files: tuple) -> dict:
    """tokens -> the peer's time over ours, hot, one for each layer."""
    results, found = records.paired(*files), {}
    for case, tokens in sorted(results.cells):
        ratio = results.ratio(case, tokens, peer)
        if ratio is not None:
            found.setdefault(tokens, []).append(ratio)
    return dict(sorted(found.items()))


def span(files: tuple, is_wanted) -> str:
    """The least and the greatest ratio beside Humming of the cases that are wanted."""
    results = records.paired(*files)
    found = [results.ratio(case, tokens, "humming") for case, tokens in results.cells if is_wanted(case)]
    found = [ratio for ratio in found if ratio is not None]
    return f"{min(found):.2f} to {max(found):.2f}"


def place(x: float, y: float, tokens: int, ratio: float) -> tuple:
    return x + 12 + (PANEL_WIDTH - 24) * math.log2(tokens) / LAST, y + PANEL_HEIGHT * (1 - ratio / HIGHEST)


def axes(x: float, y: float) -> list:
    parts = [drawing.rectangle(x, place(x, y, 1, 1)[1], PANEL_WIDTH, PANEL_HEIGHT / HIGHEST, "band")]
    for half in range(5):
        height = place(x, y, 1, half / 2)[1]
        level = half == 2
        parts.append(drawing.line([(x, height), (x + PANEL_WIDTH, height)], "level" if level else "grid", 1.4 if level else 1))
        parts.append(drawing.text(x - 7, height + 4, f"{half / 2:.1f}", 11.5, "faint", "end"))
    for power in (0, 4, 6, 8, 10, 12, 14):
        across = place(x, y, 2**power, 0)[0]
        parts.append(drawing.text(across, y + PANEL_HEIGHT + 17, drawing.short(2**power), 11.5, "faint", "middle"))
    return parts


def panel(x: float, y: float, title: str, what: str, found: dict) -> list:
    cells = [ratio for column in found.values() for ratio in column]
    ahead = sum(ratio > 1 for ratio in cells)
    parts = [drawing.text(x, y - 40, title, 14, bold=True), drawing.text(x, y - 24, what, 11.5, "faint"),
             drawing.text(x, y - 8, f"ours is faster in {ahead} of {len(cells)}", 11.5, "ink"), *axes(x, y)]
    middle = [place(x, y, tokens, records.median(column)) for tokens, column in found.items()]
    parts.append(drawing.line(middle, "faint", 1.6, "4 3"))
    for tokens, column in found.items():
        for at, ratio in enumerate(sorted(column)):
            across, height = place(x, y, tokens, ratio)
            parts.append(drawing.dot(across + (-4, 4, 0)[at % 3], height, "ahead" if ratio > 1 else "behind"))
    return parts


def draw() -> str:
    parts = drawing.heading("One MoE layer on an NVIDIA H200: a peer's time over ours", [
        "Above 1.0 Conclave is faster (blue), below it slower (orange). Across: tokens of a call. Every cell that was timed is a dot,",
        "one layer of a published model: both in one process, CUDA graphs in random order, medians under continuous load."])
    for index, (title, what, peer, files) in enumerate(PANELS):
        x, y = LEFT + index % COLUMNS * STEP_X, TOP + index // COLUMNS * STEP_Y
        parts += panel(x, y, title, what, ratios(peer, files))
    x, y = LEFT + 2 * STEP_X - 26, TOP + STEP_Y
    by_token = span(E4M3_ROWS, lambda case: case.endswith("-mxfp4-fp8"))
    in_groups = span(E4M3_ROWS, lambda case: case.endswith("-mxfp4-fp8-group"))
    machine = records.paired(*BFLOAT_AND_E4M3).machine
    parts += drawing.paragraph(x, y - 40, [
        "The dashed line joins the medians.",
        "",
        "Bare products leave out routing, activation",
        "and the weighted sum: a layer that is level",
        "with them does more in the same time.",
        "",
        "Humming with rows of e4m3 was timed from",
        f"1024 tokens on: rows by token {by_token},",
        f"rows in groups of 128 {in_groups}.",
        "",
        f"CUDA {machine['cuda']}, torch {machine['torch']},",
        f"Triton {machine['triton']}. Records: bench/results/h200,",
        "2026-11-22, -28, -29, -30; rested chips too.",
    ])
    return drawing.picture(TOP + STEP_Y + PANEL_HEIGHT + 34, "Time of vLLM Triton, DeepGEMM, torch and Humming over that of "
                           "Conclave on an H200, against tokens", parts)
