"""Medians with their spread."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Spread:
    median: float
    low: float  # first quartile
    high: float  # third quartile
    count: int

    def as_row(self) -> dict:
        return {"us": round(self.median, 3), "q1": round(self.low, 3), "q3": round(self.high, 3), "n": self.count}


def quantile(ordered: list, share: float) -> float:
    """By linear interpolation between the two nearest."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(times: list) -> Spread:
    if not times:
        raise ValueError("spread of no times")
    ordered = sorted(times)
    return Spread(quantile(ordered, 0.5), quantile(ordered, 0.25), quantile(ordered, 0.75), len(ordered))
