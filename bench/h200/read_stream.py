"""A Triton kernel that only reads, for peers.py."""

import torch
import triton
import triton.language as tl

BLOCK = 8192


@triton.jit
def _read(data, sink, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    highest = tl.max(tl.load(data + at), axis=0)
    # Below the least of the random numbers: nothing is stored, nothing can be left out.
    if highest < -2147483640:
        tl.store(sink, highest)


def read_all(data: torch.Tensor, sink: torch.Tensor) -> None:
    """Reads `data` (int32, a multiple of BLOCK long)."""
    _read[(data.numel() // BLOCK,)](data, sink, BLOCK, num_warps=8)
