"""Codes of e2m1, two in a byte: the type that MXFP4 and NVFP4 share."""

import torch

from ._nibbles import pack, unpack

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MOST_EXPONENT = 2
SIGN = 8


def nearest(scaled: torch.Tensor) -> torch.Tensor:
    """float64 [..., G, C] -> packed codes uint8 [..., G * C / 2]. A tie takes the smaller magnitude.

    The check reads the codes, so it does not ask how they were rounded.
    """
    magnitudes = torch.tensor(MAGNITUDES, dtype=torch.float64, device=scaled.device)
    codes = torch.bucketize(scaled.abs(), (magnitudes[:-1] + magnitudes[1:]) / 2)
    codes += SIGN * (scaled < 0)
    return pack(codes.flatten(-2))


def values(packed: torch.Tensor, group: int) -> torch.Tensor:
    """uint8 [..., C / 2] -> float64 [..., C / group, group]."""
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float64, device=packed.device)
    return table[unpack(packed).long()].unflatten(-1, (-1, group))
