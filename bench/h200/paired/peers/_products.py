"""Bare grouped products: rows sorted by expert, and the check of what the two products wrote."""

import torch

from ..problem import finite

SAMPLED_ROWS = 6


def random_rows(rows: int, cols: int, device: str) -> torch.Tensor:
    return torch.randn(rows, cols, device=device).bfloat16()


def product_error(weights, name: str, rows: torch.Tensor, out: torch.Tensor, experts: list) -> float:
    """Of the worst row; rows[i] and out[i] belong to expert experts[i]."""
    worst = 0.0
    exact = weights.rows_as_read(rows)
    for row, expert, found in zip(exact, experts, out):
        expected = weights.exact(name, expert) @ row
        worst = max(worst, finite((found.double() - expected).norm() / expected.norm()))
    return worst


def sample(count: int) -> list:
    return sorted(set(torch.linspace(0, count - 1, SAMPLED_ROWS).long().tolist()))
