"""MXFP4 weights beside rows of e4m3, which have a float32 scale for a whole row."""

import torch

from .e4m3 import MOST
from .mxfp4 import DTYPE, GROUP, decode, encode

__all__ = ["DTYPE", "GROUP", "decode", "encode", "rows_as_read"]


def rows_as_read(rows: torch.Tensor) -> torch.Tensor:
    wide = rows.float()
    scales = (wide.abs().amax(-1, keepdim=True) / MOST).clamp_min(1e-12)
    return (wide / scales).to(torch.float8_e4m3fn).double() * scales.double()
