"""Rows as bytes and back, for messages that hold rows of several types side by side."""

from __future__ import annotations

import torch


def bytes_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """[T, bytes] uint8 of rows [T, n]."""
    dense = rows.detach().contiguous()
    if dense.stride(-1) != 1:  # a single column is contiguous with any stride, and no view as bytes
        dense = dense.clone(memory_format=torch.contiguous_format)
    width = rows.shape[1] * rows.element_size()
    return dense.view(torch.uint8).reshape(len(rows), width)


def rows_of_bytes(packed: torch.Tensor, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a type that lie in bytes [begin, end) of each row of packed."""
    # Into memory of the type: a single row's columns count as contiguous where they are, at a place
    # that need not be a multiple of the type's size.
    rows = packed.new_empty((len(packed), (end - begin) // dtype.itemsize), dtype=dtype)
    rows.view(torch.uint8).copy_(packed[:, begin:end])
    return rows
