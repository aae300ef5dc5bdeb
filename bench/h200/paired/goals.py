"""Goals of four-bit layers, held against what the paired bench printed: each cell's against the peers of its own run."""

import dataclasses

from .report import OURS, Results, floor_us, spread_percent

# Memory gives so much in practice, and the launches of a layer take so long.
READ_TBPS, LAUNCHES_US = 4.2, 8.0
# The goal is the best peer's time over this.
LEADS = {1: 1.4, 16: 1.2, 64: 1.2, 256: 1.25, 1024: 1.15, 4096: 1.1, 16384: 1.1}
OURS_BF16 = "ours_bf16"
HEAD = (
    "| T | ours, us | spread | goal, us | best peer, us | best / ours, hot / cool | our bf16, us (ours / it) | of floor "
    "| goal |"
)
# With so many tokens products count, and a layer of codes may take little longer than the same layer in bf16.
BF16_TOKENS, OVER_BF16 = 16384, 1.02


@dataclasses.dataclass(frozen=True)
class Goal:
    us: float
    why: str
    peer: str  # the fastest


def goal_of(cell: dict, tokens: int) -> Goal | None:
    """Of a cell's rows by peer; None without one of ours or without a peer, or for tokens that have no goal."""
    others = {name: row["hot"]["us"] for name, row in cell.items() if name not in (OURS, OURS_BF16)}
    if OURS not in cell or not others or tokens not in LEADS:
        return None
    peer = min(others, key=others.get)
    bounds = [
        (cell[OURS]["active_bytes"] / (READ_TBPS * 1e6) + LAUNCHES_US, "bytes"),
        (others[peer] / LEADS[tokens], f"peer / {LEADS[tokens]}"),
    ]
    if tokens == BF16_TOKENS and OURS_BF16 in cell:
        bounds.append((OVER_BF16 * cell[OURS_BF16]["hot"]["us"], f"{OVER_BF16} bf16"))
    return Goal(*max(bounds), peer)


def verdict(us: float, goal: Goal) -> str:
    return "met" if us <= goal.us else f"missed by {100 * (us / goal.us - 1):.0f} %"


def _best(cell: dict) -> str | None:
    others = [name for name in cell if name not in (OURS, OURS_BF16)]
    return min(others, key=lambda name: cell[name]["hot"]["us"]) if others else None


def _line(results: Results, case: str, tokens: int) -> str:
    cell = results.cells[case, tokens]
    us, goal, best = cell[OURS]["hot"]["us"], goal_of(cell, tokens), _best(cell)
    texts = [str(tokens), f"{us:.1f}", f"{spread_percent(cell[OURS]['hot']):.1f} %"]
    texts.append(f"{goal.us:.1f} ({goal.why})" if goal else "-")
    texts.append(f"{cell[best]['hot']['us']:.1f} ({results.peers[best]['title']})" if best else "-")
    ratios = [results.ratio(case, tokens, best, state) for state in ("hot", "cool")] if best else []
    texts.append(" / ".join(f"{ratio:.2f}" for ratio in ratios if ratio is not None) or "-")
    bf16 = cell.get(OURS_BF16)
    texts.append(f"{bf16['hot']['us']:.0f} ({us / bf16['hot']['us']:.2f})" if bf16 else "-")
    texts += [f"{100 * floor_us(cell[OURS]) / us:.0f} %", verdict(us, goal) if goal else "-"]
    return "| " + " | ".join(texts) + " |"


def tables(results: Results) -> str:
    """A table a case, of the cells in which ours ran."""
    lines = []
    for case in results.cases:
        lines += [f"### {case}", "", HEAD, "|" + "---:|" * HEAD.count(" |")]
        lines += [_line(results, case, t) for t in results.tokens(case) if OURS in results.cells.get((case, t), {})]
        lines.append("")
    return "\n".join(lines)
