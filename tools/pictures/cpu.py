"""The CPU's picture: a bar is a peer's time over ours, of the best peer of a record."""

from . import drawing, records

WIDE, TALL, LEFT, TOP, STEP_X, STEP_Y = 372, 150, 48, 128, 412, 252
HIGHEST = 2.6


def torch_groups() -> list:
    files = (("Zen 5", "2026-11-20-amd-epyc.json"), ("Xeon, AVX-512", "2026-11-20-emerald-rapids-avx512.json"),
             ("Xeon, AMX", "2026-11-20-emerald-rapids-amx.json"))
    wanted = (1, 64, 1024)
    return [(name, [(row["tokens"], row["ratio"]) for row in records.json_of(file)["summary"] if row["tokens"] in wanted])
            for name, file in files]


def ggml_groups(file: str, types: tuple) -> list:
    """Medians over rounds; the better of our two kinds of rows, and of all peers in all their forms."""
    rows = records.json_lines(file)

    def best(name: str, tokens: int, ours: bool) -> float:
        times = {}
        for row in rows:
            if (row["type"], row["tokens"], row["program"] == "conclave") == (name, tokens, ours):
                times.setdefault((row["program"], row["variant"]), []).append(row["ms_mean"])
        return min(records.median(times[key]) for key in sorted(times))

    return [(name, [(tokens, best(name, tokens, False) / best(name, tokens, True)) for tokens in (1, 512)]) for name in types]


def kt_groups() -> list:
    groups = {}
    for row in records.table_after("2026-11-28-cpu-amx-kt-kernel.md", ("type", "T", "ours")):
        groups.setdefault(row[0].split(":")[0].split(" by")[0], []).append((int(row[1]), float(row[-1])))
    return list(groups.items())


def panels() -> list:
    """Title, peer and machine, groups of (tokens, ratio)."""
    return [
        ("torch, bf16", "best of transformers' eager and grouped_mm; 2 cores", torch_groups()),
        ("kt-kernel", "16 cores with AMX; its int8 and int4 round rows to int8", kt_groups()),
        ("llama.cpp and ik_llama.cpp, 2 cores of a Zen 5", "the best of both, as stored or repacked",
         ggml_groups("2026-11-28-cpu-ggml.jsonl", ("Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"))),
        ("llama.cpp and ik_llama.cpp, 16 cores with AMX", "the best of both, as stored or repacked",
         ggml_groups("2026-11-26-cpu-amx-ggml-16.jsonl", ("Q8_0", "Q4_0", "Q4_K", "Q6_K", "MXFP4"))),
    ]


def height_of(y: float, ratio: float) -> float:
    return y + TALL * (1 - ratio / HIGHEST)


def axes(x: float, y: float) -> list:
    parts = []
    for half in range(6):
        height, level = height_of(y, half / 2), half == 2
        parts.append(drawing.line([(x, height), (x + WIDE, height)], "level" if level else "grid", 1.4 if level else 1))
        parts.append(drawing.text(x - 7, height + 4, f"{half / 2:.1f}", 11.5, "faint", "end"))
    return parts


def panel(x: float, y: float, title: str, what: str, groups: list) -> list:
    bars, gaps = sum(len(cells) for _, cells in groups), len(groups)
    step = WIDE / (bars + 0.7 * gaps)
    width = min(step * 0.8, 26)
    parts = [drawing.text(x, y - 26, title, 14, bold=True), drawing.text(x, y - 9, what, 11.5, "faint"), *axes(x, y)]
    at = x + 0.35 * step
    for name, cells in groups:
        parts.append(drawing.text(at + step * len(cells) / 2, y + TALL + 34, name, 12, "ink", "middle"))
        for tokens, ratio in cells:
            middle, top = at + step / 2, height_of(y, ratio)
            parts.append(drawing.rectangle(middle - width / 2, top, width, y + TALL - top, "ahead" if ratio > 1 else "behind"))
            parts.append(drawing.marked(middle, top - 4, f"{ratio:.2f}", 10.5))
            parts.append(drawing.text(middle, y + TALL + 16, drawing.short(tokens), 10.5, "faint", "middle"))
            at += step
        at += 0.7 * step
    return parts


def draw() -> str:
    parts = drawing.heading("One MoE layer on a CPU: the best peer's time over ours", [
        "Above 1.0 Conclave is faster (blue), below it slower (orange). The number below a bar is the tokens of the call.",
        "Layer of Qwen3-30B-A3B: 128 experts, 8 of them a token, H = 2048, I = 768. Programs ran by turns on one machine."])
    for index, (title, what, groups) in enumerate(panels()):
        parts += panel(LEFT + index % 2 * STEP_X, TOP + index // 2 * STEP_Y, title, what, groups)
    bottom = TOP + STEP_Y + TALL + 62
    parts += drawing.paragraph(24, bottom, [
        "Hosts are shared: with one token, where memory is the limit, ratios within a fifth of 1.0 say little.",
        "Records: bench/results, 2026-11-20, -26 and -28; Xeon is an Emerald Rapids."], 11.5)
    return drawing.picture(bottom + 36, "Time of torch, kt-kernel, llama.cpp and ik_llama.cpp over that of Conclave on CPUs", parts)
