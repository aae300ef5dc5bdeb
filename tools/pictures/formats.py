"""The formats' picture: what a layer takes in memory and in time, by the type of its weights."""

from . import drawing, records

SAME_CALL = "2026-11-29-epilogues.jsonl"
GPU_ROWS = (("bf16", "qwen3-30b", SAME_CALL), ("e4m3, blocks *", "qwen3-30b-fp8", "2026-11-22-paired.jsonl"),
            ("nvfp4", "qwen3-30b-nvfp4", SAME_CALL), ("mxfp4", "qwen3-30b-mxfp4", SAME_CALL),
            ("int4, groups of 128", "qwen3-30b-int4", SAME_CALL))
GPU_TOKENS = (64, 1024, 16384)
CPU_PAGE = "2026-11-26-cpu-few-rows-on-tiles.md"
CPU_TOKENS = {1: 1, 64: 4, 1024: 5}  # tokens: column of that page's table
CPU_ROWS = (("bf16", "bf16"), ("Q8_0", "Q8_0"), ("int8 by row", "int8-channel"), ("e4m3 by row", "fp8-channel"),
            ("Q4_K", "Q4_K"), ("nvfp4", "nvfp4"), ("nf4", "nf4"), ("mxfp4", "mxfp4"), ("int4, groups of 128", "int4-group128"))
MEMORY = "2026-11-29-format-memory.jsonl"
LEFT, FIRST, STEP, BAR = 24, 168, 170, 108  # of names, of columns, between columns, the longest bar
ROW = 21


def gpu_columns() -> list:
    results = {file: records.paired(file) for _, _, file in GPU_ROWS}
    cells = [[results[file].cells[case, tokens]["ours"] for tokens in GPU_TOKENS] for _, case, file in GPU_ROWS]
    # All 128 experts are active in 1024 tokens, so that the bytes are those of the layer.
    columns = [("memory, MB", "memory", [row[1]["active_bytes"] / 1e6 for row in cells])]
    return columns + [(f"{tokens} tokens, µs", "ahead", [row[at]["hot"]["us"] for row in cells]) for at, tokens in enumerate(GPU_TOKENS)]


def cpu_columns() -> list:
    rows = {row[0]: row for row in records.table_after(CPU_PAGE, ("weights", "T=1", "of read"))}
    memory = {row["dtype"]: row["packed_bytes"] / 1e6 for row in records.json_lines(MEMORY)}
    columns = [("memory, MB", "memory", [memory[name] for _, name in CPU_ROWS])]
    for tokens, column in CPU_TOKENS.items():
        after = [rows[name][column].split("->")[1].split() for _, name in CPU_ROWS]
        title = f"{tokens} token{'s' if tokens > 1 else ''}, ms"
        columns.append((title, "ahead", [records.median([float(run) for run in runs]) for runs in after]))
    return columns


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def block(y: float, title: str, names: list, columns: list) -> list:
    """A row for each format; the first one's figure is the line that the others are seen against."""
    parts = [drawing.text(LEFT, y, title, 14, bold=True)]
    bottom = y + 30 + ROW * len(names)
    parts += [drawing.text(LEFT, y + 45 + ROW * row, name, 12) for row, name in enumerate(names)]
    for at, (head, colour, values) in enumerate(columns):
        x, longest = FIRST + STEP * at, max(values)
        parts.append(drawing.text(x, y + 22, head, 12, "faint"))
        for row, value in enumerate(values):
            width, top = BAR * value / longest, y + 33 + ROW * row
            shade = "behind" if colour == "ahead" and value > values[0] else colour
            parts.append(drawing.rectangle(x, top, width, 15, shade))
            parts.append(drawing.text(x + width + 5, top + 12, number(value), 11.5))
        parts.append(drawing.line([(x, y + 30), (x, bottom)], "level", 1))
        mark = x + BAR * values[0] / longest
        parts.append(drawing.line([(mark, y + 30), (mark, bottom)], "level", 1, "2 3"))
    return parts


def draw() -> str:
    parts = drawing.heading("What a weight format takes: one layer of Qwen3-30B-A3B", [
        "Memory of its 604 million weights with their scales, and the time of one call. Shorter is better; every column starts at zero.",
        "The dotted line is bf16: orange where a format takes longer than it."])
    gpu, cpu = 108, 108 + 30 + ROW * len(GPU_ROWS) + 46
    parts += block(gpu, "NVIDIA H200, whole layer, microseconds under continuous load", [name for name, _, _ in GPU_ROWS], gpu_columns())
    parts += block(cpu, "16 cores of an Emerald Rapids with AMX, rows as they are", [name for name, _ in CPU_ROWS], cpu_columns())
    bottom = cpu + 30 + ROW * len(CPU_ROWS) + 30
    parts += drawing.paragraph(LEFT, bottom, [
        "* of another day's call (2026-11-22). GPU: bench/results/h200/2026-11-29-epilogues.md. CPU times: medians of four runs,",
        "bench/results/2026-11-26-cpu-few-rows-on-tiles.md; its packed memory: bench/results/2026-11-29-format-memory.md."], 11.5)
    return drawing.picture(bottom + 36, "Memory and time of a layer by weight format, on an H200 and on a CPU", parts)
