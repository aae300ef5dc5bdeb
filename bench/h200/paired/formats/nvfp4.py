"""NVFP4: e2m1 codes, an e4m3 scale for each 16 weights of a row, a float32 factor of a matrix; rows stay bf16."""

import torch

from . import FORMATS, _e2m1
from .e4m3 import MOST

DTYPE = torch.bfloat16
GROUP = FORMATS["nvfp4"].group[1]


def encode(matrix: torch.Tensor) -> tuple:
    """[R, C] -> uint8 [R, C / 2], e4m3 [R, C / 16], float32 []: the largest scale is e4m3's largest number."""
    groups = matrix.double().unflatten(-1, (-1, GROUP))
    most = groups.abs().amax(-1) / _e2m1.MAGNITUDES[-1]
    factor = (most.amax() / MOST).clamp_min(1e-30).float()
    # Scales below the least normal number would lose bits, and Marlin takes the least ones for zero.
    scales = (most / factor.double()).float().clamp_min(2.0**-6).to(torch.float8_e4m3fn)
    codes = _e2m1.nearest(groups / (scales.double() * factor.double())[..., None])
    return codes, scales, factor


def decode(codes: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return (_e2m1.values(codes, GROUP) * (scales.double() * factor.double())[..., None]).flatten(-2)


def rows_as_read(rows: torch.Tensor) -> torch.Tensor:
    return rows.double()
