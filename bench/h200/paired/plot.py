"""A plot of what the paired bench printed, as SVG: each peer's time over ours against tokens."""

import math
from xml.sax import saxutils

from . import report

PANEL, HEIGHT, GAP = 430, 215, 74  # a panel and what lies between two
LEFT, TOP, BOTTOM, COLUMNS = 56, 118, 84, 2
FONT = "font-family='Helvetica, Arial, sans-serif'"
INK, FAINT, GRID = "#22272e", "#5f6b7a", "#e3e7ec"
COLOURS = {report.OURS: "#1261a0", "vllm_triton": "#d1690e", "deepgemm": "#2c8a57"}
OTHER_COLOURS = ("#8e5bb5", "#b0395b", "#7a6a2f")
FLOOR = "floor"


def colour_of(results: report.Results, name: str) -> str:
    if name == FLOOR:
        return "#9aa5b1"
    others = [peer for peer in results.peers if peer not in COLOURS]
    return COLOURS.get(name) or OTHER_COLOURS[others.index(name) % len(OTHER_COLOURS)]


def text(x: float, y: float, words: str, size: int = 13, fill: str = INK, more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{fill}' {more}>{saxutils.escape(words)}</text>"


def line(points: list, colour: str, width: float = 2.2, more: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='{width}' stroke-linejoin='round' {more}/>"


def relative(results: report.Results, case: str, name: str) -> list:
    """(tokens, time over ours) of a peer, or of the floor."""
    found = []
    for tokens in results.tokens(case):
        ours = results.cells.get((case, tokens), {}).get(report.OURS)
        if name == FLOOR:
            ratio = report.floor_us(ours) / ours["hot"]["us"] if ours else None
        else:
            ratio = results.ratio(case, tokens, name)
        if ratio is not None:
            found.append((tokens, ratio))
    return found


def us_text(us: float) -> str:
    return f"{us / 1000:.1f} ms" if us >= 1000 else f"{us:.0f} µs"


class Panel:
    """One case: x is the logarithm of the tokens, y the time over ours from 0 to `top`."""

    def __init__(self, results: report.Results, case: str, x: float, y: float, top: float):
        self.results, self.case, self.x, self.y, self.top = results, case, x, y, top
        tokens = results.tokens(case)
        self.first, self.last = math.log2(tokens[0]), math.log2(tokens[-1])

    def place(self, tokens: int, ratio: float) -> tuple:
        share = (math.log2(tokens) - self.first) / max(self.last - self.first, 1)
        return self.x + 14 + share * (PANEL - 28), self.y + HEIGHT * (1 - ratio / self.top)

    def axes(self) -> list:
        title = report.README_NAMES.get(self.case, self.case)
        parts = [text(self.x, self.y - 14, title, 15, more="font-weight='bold'")]
        for half in range(int(self.top * 2) + 1):
            y = self.place(1 << int(self.first), half / 2)[1]
            parts.append(line([(self.x, y), (self.x + PANEL, y)], GRID, 1))
            parts.append(text(self.x - 8, y + 4, f"{half / 2:.1f}", 12, FAINT, "text-anchor='end'"))
        for tokens in self.results.tokens(self.case):
            x = self.place(tokens, 0)[0]
            parts.append(text(x, self.y + HEIGHT + 18, str(tokens), 12, INK, "text-anchor='middle'"))
            ours = self.results.cells.get((self.case, tokens), {}).get(report.OURS)
            if ours:
                words = us_text(ours["hot"]["us"])
                parts.append(text(x, self.y + HEIGHT + 34, words, 11, COLOURS[report.OURS], "text-anchor='middle'"))
        return parts

    def series(self, name: str) -> list:
        colour = colour_of(self.results, name)
        points = [self.place(*point) for point in relative(self.results, self.case, name)]
        if not points:
            return []
        if name == FLOOR:
            return [line(points, colour, 1.8, "stroke-dasharray='5 4'")]
        dots = [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.4' fill='{colour}'/>" for x, y in points]
        return [line(points, colour, 3.0 if name == report.OURS else 2.2), *dots]


def legend(results: report.Results, names: list) -> list:
    """Two rows of two, so that what a peer computes stands beside its name."""
    entries = [(f"{results.peers[name]['title']}: {results.peers[name]['what']}", name) for name in names]
    entries.append(("floor: weights at 4.8 TB/s, or FLOPs at the peak", FLOOR))
    parts = []
    for index, (words, name) in enumerate(entries):
        x, y = LEFT + index % COLUMNS * (PANEL + GAP), 58 + index // COLUMNS * 20
        dashes = "stroke-dasharray='5 4'" if name == FLOOR else ""
        parts.append(line([(x, y - 4), (x + 26, y - 4)], colour_of(results, name), 3, dashes))
        parts.append(text(x + 34, y, words, 12))
    return parts


def caption(results: report.Results, date: str) -> list:
    machine = results.machine
    return [f"{machine.get('device')}, commit {machine.get('commit')}, {date}; CUDA {machine.get('cuda')}, torch "
            f"{machine.get('torch')}, Triton {machine.get('triton')}.",
            "Medians under continuous load, all engines of a cell in one process. Below the tokens, in blue: our time."]


def svg(results: report.Results, date: str, cases: list, peers: list) -> str:
    """`peers` are drawn beside ours, where they have figures."""
    names = [report.OURS, *(peer for peer in peers if peer in results.peers)]
    highest = max(ratio for case in cases for name in names for _, ratio in relative(results, case, name))
    top = highest + 0.1
    rows = math.ceil(len(cases) / COLUMNS)
    width = LEFT + COLUMNS * PANEL + (COLUMNS - 1) * GAP + 24
    height = TOP + rows * (HEIGHT + BOTTOM) + 30
    parts = [f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' "
             f"{FONT} role='img' aria-label='Time over that of Conclave against tokens'>",
             f"<rect width='{width}' height='{height}' fill='white'/>",
             text(LEFT, 28, "Time of one MoE layer over ours, against tokens of a call (above 1.0: slower than ours)", 17,
                  more="font-weight='bold'"),
             *legend(results, names)]
    for index, case in enumerate(cases):
        x, y = LEFT + index % COLUMNS * (PANEL + GAP), TOP + 22 + index // COLUMNS * (HEIGHT + BOTTOM)
        panel = Panel(results, case, x, y, top)
        parts += panel.axes()
        for name in (FLOOR, *names[1:], report.OURS):
            parts += panel.series(name)
    parts += [text(LEFT, height - 30 + 18 * row, words, 12, FAINT) for row, words in enumerate(caption(results, date))]
    return "\n".join([*parts, "</svg>", ""])
