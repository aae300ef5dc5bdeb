"""Symmetric int4 with a bf16 scale for each 128 weights of a row: a code is the value plus 8; rows stay bf16."""

import torch

from . import FORMATS
from ._nibbles import pack, unpack

DTYPE = torch.bfloat16
GROUP = FORMATS["int4"].group[1]
ZERO = 8


def encode(matrix: torch.Tensor) -> tuple:
    """[R, C] -> uint8 [R, C / 2], bf16 [R, C / 128]."""
    groups = matrix.float().unflatten(-1, (-1, GROUP))
    # Half a step beyond 7, so that -8 is used too: some engines have a shorter way for codes without it.
    scales = (groups.abs().amax(-1) / 7.5).clamp_min(1e-12).bfloat16()
    codes = (groups / scales.float()[..., None]).round().clamp(-ZERO, ZERO - 1) + ZERO
    return pack(codes.flatten(-2)), scales


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    values = unpack(codes).double() - ZERO
    return (values.unflatten(-1, (-1, GROUP)) * scales.double()[..., None]).flatten(-2)


def rows_as_read(rows: torch.Tensor) -> torch.Tensor:
    return rows.double()
