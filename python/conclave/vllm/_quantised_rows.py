"""Rows that a transport has quantised, as values that experts take."""

from __future__ import annotations

import torch

from conclave.errors import ConclaveTypeError, ConclaveUnsupportedError, ConclaveValueError

_CODES = (torch.float8_e4m3fn, torch.int8)


def values_of_rows(
    rows: torch.Tensor, scale: torch.Tensor | None, block_shape: list[int] | None
) -> torch.Tensor:
    """Codes times their scales in float32, which has each product exactly or rounds it once; rows
    of values as they are.

    Experts that quantise these values by the same rule find the same codes: the largest magnitude
    of what shares a scale is a code too.

    Args:
        rows: [..., H]. scale: one number, [...] or [..., 1], or [..., G] for groups of as many
            columns as a block is wide; float32, or exponents in uint8 or float8_e8m0fnu.
    """
    if scale is None:
        if rows.is_floating_point() and rows.element_size() > 1:
            return rows
        raise ConclaveValueError(f"a1q_scale: expected scales beside {rows.dtype}, found None")
    if rows.dtype == torch.uint8:
        raise ConclaveUnsupportedError(
            "a1q_scale: rows of codes of 4 or 6 bits are quantised by the experts; prepare must "
            "leave them as they are"
        )
    if rows.dtype not in _CODES:
        raise ConclaveTypeError(
            f"a1q_scale: expected rows of float8_e4m3fn or int8 beside it, found {rows.dtype}"
        )
    return rows.float() * _spread(_numbers(scale), rows, block_shape)


def _numbers(scale: torch.Tensor) -> torch.Tensor:
    if scale.dtype == torch.uint8 or "e8m0" in str(scale.dtype):
        return torch.exp2(scale.view(torch.uint8).float() - 127)
    return scale.float()


def _spread(scale: torch.Tensor, rows: torch.Tensor, block_shape: list[int] | None) -> torch.Tensor:
    """A scale for each column, or a shape that broadcasts to it."""
    if scale.numel() == 1:
        return scale.reshape(())
    before, columns = rows.shape[:-1], rows.shape[-1]
    if scale.shape == before:
        return scale.unsqueeze(-1)
    groups = scale.shape[-1] if scale.ndim == rows.ndim else 0
    wide = columns if groups == 1 or block_shape is None else block_shape[1]
    if groups == 0 or groups != -(-columns // wide):
        expected = [*before, -(-columns // wide)]
        raise ConclaveValueError(
            f"a1q_scale: expected one number, shape {list(before)} or {expected}, "
            f"found {list(scale.shape)}"
        )
    if scale.shape[:-1] != before and any(
        found not in (1, size) for found, size in zip(scale.shape, before, strict=False)
    ):
        raise ConclaveValueError(
            f"a1q_scale: expected a scale for each of {list(before)} rows, found "
            f"{list(scale.shape)}"
        )
    return scale.repeat_interleave(wide, dim=-1)[..., :columns]
