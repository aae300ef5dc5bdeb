"""What the pictures read: committed records below bench/results, and nothing else."""

import json
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results"
sys.path.insert(0, str(ROOT / "bench/h200"))

from paired import report  # noqa: E402


def paired(*names: str) -> report.Results:
    """Cells of the paired bench; those of a later file replace an earlier one's."""
    return report.read([RESULTS / "h200" / name for name in names])


def json_of(name: str) -> dict:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def json_lines(name: str) -> list:
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines() if line.startswith("{")]


def table_after(name: str, first_cells: tuple) -> list:
    """Rows of the table of a page whose head begins with these cells."""
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else None for line in lines]
    starts = [at for at, row in enumerate(rows) if row and tuple(row[: len(first_cells)]) == first_cells]
    if len(starts) != 1:
        raise ValueError(f"{name} has {len(starts)} tables that begin with {first_cells}")
    found = []
    for row in rows[starts[0] + 2 :]:
        if row is None:
            break
        found.append(row)
    return found


def median(numbers: list) -> float:
    if not numbers:
        raise ValueError("the record has no such cell")
    return statistics.median(numbers)
