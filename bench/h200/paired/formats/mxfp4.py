"""MXFP4 of the OCP: e2m1 codes with an e8m0 scale, a power of two, for each 32 weights of a row; rows stay bf16."""

import torch

from . import FORMATS
from ._nibbles import pack, unpack

DTYPE = torch.bfloat16
GROUP = FORMATS["mxfp4"].group[1]
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIGN = 8
E2M1_MOST_EXPONENT = 2
E8M0_BIAS = 127


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """In float64 and from its bits, since a device's pow may round."""
    return ((exponents.long() + 1023) << 52).view(torch.float64)


def encode(matrix: torch.Tensor) -> tuple:
    """[R, C] -> uint8 [R, C / 2], e8m0 as uint8 [R, C / 32]."""
    groups = matrix.double().unflatten(-1, (-1, GROUP))
    most = groups.abs().amax(-1)
    exponents = torch.frexp(most).exponent - 1 - E2M1_MOST_EXPONENT
    exponents = torch.where(most > 0, exponents, 0).clamp(-E8M0_BIAS, E8M0_BIAS)
    scaled = groups * power_of_two(-exponents)[..., None]
    magnitudes = torch.tensor(MAGNITUDES, dtype=torch.float64, device=matrix.device)
    # A tie takes the smaller magnitude. The check reads the codes, so it does not ask how they were rounded.
    codes = torch.bucketize(scaled.abs(), (magnitudes[:-1] + magnitudes[1:]) / 2)
    codes += SIGN * (scaled < 0)
    return pack(codes.flatten(-2)), (exponents + E8M0_BIAS).to(torch.uint8)


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float64, device=codes.device)
    values = table[unpack(codes).long()].unflatten(-1, (-1, GROUP))
    return (values * power_of_two(scales.int() - E8M0_BIAS)[..., None]).flatten(-2)


def rows_as_read(rows: torch.Tensor) -> torch.Tensor:
    return rows.double()
