"""MXFP4 of the OCP: e2m1 codes with an e8m0 scale, a power of two, for each 32 weights of a row; rows stay bf16."""

import torch

from . import FORMATS, _e2m1

DTYPE = torch.bfloat16
GROUP = FORMATS["mxfp4"].group[1]
E8M0_BIAS = 127


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """In float64 and from its bits, since a device's pow may round."""
    return ((exponents.long() + 1023) << 52).view(torch.float64)


def encode(matrix: torch.Tensor) -> tuple:
    """[R, C] -> uint8 [R, C / 2], e8m0 as uint8 [R, C / 32]."""
    groups = matrix.double().unflatten(-1, (-1, GROUP))
    most = groups.abs().amax(-1)
    exponents = torch.frexp(most).exponent - 1 - _e2m1.MOST_EXPONENT
    exponents = torch.where(most > 0, exponents, 0).clamp(-E8M0_BIAS, E8M0_BIAS)
    codes = _e2m1.nearest(groups * power_of_two(-exponents)[..., None])
    return codes, (exponents + E8M0_BIAS).to(torch.uint8)


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (_e2m1.values(codes, GROUP) * power_of_two(scales.int() - E8M0_BIAS)[..., None]).flatten(-2)


def rows_as_read(rows: torch.Tensor) -> torch.Tensor:
    return rows.double()
