"""Shapes of a picture as SVG, in colours that follow the reader's light or dark scheme.

A picture is a card with a background of its own, so that it is readable on a page of the other scheme too. Numbers
are written with one digit behind the point: the same records give the same bytes.
"""

from xml.sax import saxutils

WIDTH = 860
FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Helvetica, Arial, sans-serif"

# name: light, dark. Ahead and behind differ in lightness too, for readers who see few colours.
COLOURS = {
    "card": ("#ffffff", "#161b22"), "edge": ("#d1d9e0", "#30363d"), "ink": ("#1f2328", "#e6edf3"),
    "faint": ("#59636e", "#9da7b3"), "grid": ("#e4e8ec", "#2b323b"), "level": ("#59636e", "#9da7b3"),
    "ahead": ("#1666b0", "#58a6ff"), "behind": ("#d4690c", "#f0953f"), "memory": ("#6b7785", "#8b96a3"),
    "band": ("#fdf3ea", "#241d16"),
}  # fmt: skip


def style() -> str:
    def rules(scheme: int) -> str:
        return "".join(f".{name}{{fill:{pair[scheme]}}} .line-{name}{{stroke:{pair[scheme]}}}" for name, pair in COLOURS.items())

    return f"<style>{rules(0)} @media (prefers-color-scheme: dark){{{rules(1)}}}</style>"


def text(x: float, y: float, words: str, size: float = 13, colour: str = "ink", anchor: str = "start", bold: bool = False) -> str:
    more = " font-weight='600'" if bold else ""
    return (f"<text x='{x:.1f}' y='{y:.1f}' class='{colour}' font-size='{size:g}' text-anchor='{anchor}'{more}>"
            f"{saxutils.escape(words)}</text>")


def marked(x: float, y: float, words: str, size: float) -> str:
    """A figure that may lie on lines: a rim in the card's colour keeps it readable."""
    return (f"<text x='{x:.1f}' y='{y:.1f}' class='ink line-card' font-size='{size:g}' text-anchor='middle' "
            f"stroke-width='3' paint-order='stroke'>{saxutils.escape(words)}</text>")


def short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' class='{colour}'/>"


def line(points: list, colour: str, width: float = 1, dashes: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    more = f" stroke-dasharray='{dashes}'" if dashes else ""
    return f"<polyline points='{path}' class='line-{colour}' fill='none' stroke-width='{width:g}' stroke-linejoin='round'{more}/>"


def dot(x: float, y: float, colour: str) -> str:
    return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.4' class='{colour}' fill-opacity='0.75'/>"


def paragraph(x: float, y: float, lines: list, size: float = 12, colour: str = "faint", step: float = 17) -> list:
    return [text(x, y + step * row, words, size, colour) for row, words in enumerate(lines)]


def heading(title: str, below: list) -> list:
    return [text(24, 36, title, 18, bold=True), *paragraph(24, 58, below, 12.5)]


def picture(height: float, label: str, parts: list) -> str:
    """A whole file; `label` is what readers hear who do not see it."""
    return "\n".join([
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height:g}' width='{WIDTH}' height='{height:g}' "
        f'font-family="{FONT}" role=\'img\' aria-label=\'{saxutils.escape(label, {chr(39): "&apos;"})}\'>',
        style(),
        f"<rect x='0.5' y='0.5' width='{WIDTH - 1}' height='{height - 1:g}' rx='8' class='card line-edge'/>",
        *parts,
        "</svg>",
        "",
    ])
