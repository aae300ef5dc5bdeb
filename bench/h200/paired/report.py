"""Tables of what the paired bench printed."""

import json
import pathlib

from . import formats

README_CELLS = ("qwen3-30b", "mixtral-8x7b", "qwen3-235b-fp8", "deepseek-v3-fp8")
README_NAMES = {
    "qwen3-30b": "Qwen3-30B-A3B, bf16", "mixtral-8x7b": "Mixtral-8x7B, bf16",
    "qwen3-235b-fp8": "Qwen3-235B-A22B, e4m3 blocks", "deepseek-v3-fp8": "DeepSeek-V3, e4m3 blocks",
}
README_TOKENS = (1, 64, 1024, 16384)
OURS = "ours"


class Results:
    """Cells by (case, tokens), then peer; a later file or line replaces an earlier one."""

    def __init__(self, lines: list):
        self.machine, self.peers, self.cells, self.absent, self.notes = {}, {}, {}, {}, []
        for line in lines:
            if line.startswith("{"):
                self._take(json.loads(line))

    def _take(self, row: dict) -> None:
        kind = row.get("kind")
        if kind == "machine":
            self.machine = row
        elif kind == "peer":
            self.peers[row["peer"]] = row
        elif kind == "cell":
            self.cells.setdefault((row["case"], row["tokens"]), {})[row["peer"]] = row
        elif kind == "absent":
            self.absent.setdefault((row["case"], row["tokens"]), {})[row["peer"]] = row["reason"]
        elif kind in ("note", "failed"):
            self.notes.append(row)

    @property
    def cases(self) -> list:
        return list(dict.fromkeys(case for case, _ in [*self.cells, *self.absent]))

    def tokens(self, case: str) -> list:
        return sorted({t for name, t in [*self.cells, *self.absent] if name == case})

    def ratio(self, case: str, tokens: int, peer: str, state: str = "hot") -> float | None:
        """The peer's time over ours."""
        cell = self.cells.get((case, tokens), {})
        if OURS not in cell or peer not in cell or not cell[peer].get(state) or not cell[OURS].get(state):
            return None
        return cell[peer][state]["us"] / cell[OURS][state]["us"]


def read(paths: list) -> Results:
    return Results([line for path in paths for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines()])


def spread_percent(row: dict) -> float:
    return 100 * (row["q3"] - row["q1"]) / row["us"]


def ours_text(row: dict | None) -> list:
    if row is None:
        return ["-", "-", "-"]
    hot, cool = row["hot"], row["cool"]
    return [f"{hot['us']:.1f}", f"{spread_percent(hot):.1f} % ({hot['n']})", f"{cool['us']:.1f}" if cool else "-"]


def peer_text(results: Results, case: str, tokens: int, peer: str) -> str:
    hot, cool = (results.ratio(case, tokens, peer, state) for state in ("hot", "cool"))
    if hot is not None:
        return f"{hot:.2f} / {cool:.2f}" if cool is not None else f"{hot:.2f}"
    row = results.cells.get((case, tokens), {}).get(peer)
    return f"{row['hot']['us']:.1f} us" if row else "-"


def case_table(results: Results, case: str) -> list:
    others = [peer for peer in results.peers if peer != OURS]
    titles = [results.peers[peer]["title"] for peer in others]
    lines = [f"## {case}", "", "| T | ours, us | spread (n) | cool, us | " + " | ".join(titles) + " | of floor | error |"]
    lines.append("|" + "---:|" * (6 + len(others)))
    for tokens in results.tokens(case):
        row = results.cells.get((case, tokens), {}).get(OURS)
        texts = [peer_text(results, case, tokens, peer) for peer in others]
        ends = [f"{floor_us(row) / row['hot']['us']:.2f}", f"{row['error']:.1e}"] if row else ["-", "-"]
        lines.append("| " + " | ".join([str(tokens), *ours_text(row), *texts, *ends]) + " |")
    return [*lines, ""]


def floor_us(row: dict) -> float:
    return max(row["active_bytes"] / 4.8e6, row["flops"] / (formats.find(row["format"]).tflops * 1e6))


def absent_lines(results: Results) -> list:
    """Why a peer has no figure, with the cells it is so in."""
    reasons = {}
    for (case, tokens), peers in results.absent.items():
        for peer, reason in peers.items():
            reasons.setdefault((peer, reason), []).append(f"{case} {tokens}")
    for (peer, reason), cells in sorted(reasons.items()):
        yield f"- {peer}: {reason} ({len(cells)} cells, first {cells[0]})"
    for row in results.notes:
        yield f"- {row.get('peer', 'cell')}, {row['case']} {row['tokens']}: {row.get('note') or row['reason']}"


def markdown(results: Results, date: str, command: str) -> str:
    machine = results.machine
    lines = [
        f"# Our layer and its peers in pairs, {date}",
        "",
        f"Machine: {machine.get('device')} ({machine.get('multiprocessors')} multiprocessors), CUDA {machine.get('cuda')}, "
        f"torch {machine.get('torch')}, Triton {machine.get('triton')}. Commit {machine.get('commit')}. Command: `{command}`.",
        "",
        "All subjects of a cell in one process, replays of CUDA graphs in random order: under continuous load (hot), and",
        "each after a quarter of a second of rest (cool). Ours: microseconds from ids and weights to the output, the median;",
        "spread: the distance of the quartiles in percent of it, and how many replays. A peer's column: its time over ours,",
        "hot / cool; above 1 ours is faster; `us` where ours does not run the format. Floor: the larger of active weight",
        "bytes / 4.8 TB/s and FLOPs / 989 (e4m3: 1979) TFLOP/s. Each output was held to float64 before it was timed.",
        "",
        *[f"- {row['title']}: {row['what']}" + (f"; not here: {row['absent']}" if row["absent"] else "")
          for row in results.peers.values()],
        "",
    ]
    for case in results.cases:
        lines += case_table(results, case)
    absent = list(absent_lines(results))
    return "\n".join([*lines, *(["## Without a figure", "", *absent, ""] if absent else [])])


def readme_cell(results: Results, case: str, tokens: int, peer: str) -> str:
    row = results.cells.get((case, tokens), {}).get(OURS)
    if row is None:
        return "-"
    us = row["hot"]["us"]
    text = f"{us:.0f}" if us >= 100 else f"{us:.1f}"
    hot, cool = (results.ratio(case, tokens, peer, state) for state in ("hot", "cool"))
    if hot is None:
        return text
    return f"{text} ({hot:.2f} / {cool:.2f})" if cool is not None else f"{text} ({hot:.2f})"


README_BEGIN, README_END = "<!-- paired_report.py --readme: begin -->", "<!-- end -->"


def readme_text(results: Results, peer: str = "vllm_triton") -> str:
    """The README's paragraphs and table of the GPU."""
    machine = results.machine
    spreads = [spread_percent(row["hot"]) for case in README_CELLS for tokens in README_TOKENS
               for name, row in results.cells.get((case, tokens), {}).items() if name in (OURS, peer)]
    return "\n".join([
        f"On one {machine.get('device')}, microseconds of the whole layer from ids and weights to the output, hot: under continuous",
        f"load. In brackets the time of {results.peers[peer]['title']} over ours, hot / cool (after a quarter of a second of rest), both in one",
        "process, their replays in random order ([how](docs/benchmarking.md#in-pairs)):",
        "",
        readme_table(results, peer),
        "",
        f"Quartiles lie at most {max(spreads, default=0):.1f} % of the median apart. Commit {machine.get('commit')}, CUDA {machine.get('cuda')}, torch "
        f"{machine.get('torch')}, Triton {machine.get('triton')}.",
    ])


def put_between_marks(page: str, text: str) -> str:
    if page.count(README_BEGIN) != 1 or page.count(README_END) != 1:
        raise ValueError(f"the page needs one line {README_BEGIN!r} and one {README_END!r}")
    head, rest = page.split(README_BEGIN)
    return f"{head}{README_BEGIN}\n{text}\n{README_END}{rest.split(README_END)[1]}"


def readme_table(results: Results, peer: str = "vllm_triton") -> str:
    lines = ["| layer | " + " | ".join(f"T={t}" if i == 0 else str(t) for i, t in enumerate(README_TOKENS)) + " |",
             "|---|" + "---|" * len(README_TOKENS)]
    for case in README_CELLS:
        cells = [readme_cell(results, case, t, peer) for t in README_TOKENS]
        lines.append(f"| {README_NAMES[case]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
