"""Two codes of four bits in a byte, the first in the low bits."""

import torch


def pack(codes: torch.Tensor) -> torch.Tensor:
    """[..., C] of 0 to 15 -> uint8 [..., C / 2]."""
    pairs = codes.to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., C / 2] -> uint8 [..., C]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
