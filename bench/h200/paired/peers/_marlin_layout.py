"""Marlin's layout of four-bit weights: each thread of its products finds its codes and scales in one piece of memory."""

import torch

from ..formats._nibbles import pack, unpack


def pad(matrix: torch.Tensor, halves: int, rows: int, cols: int) -> torch.Tensor:
    """[halves * r, c] -> [halves * rows, cols]: each half, as of gate and up, gets zeros of its own below and beside."""
    split = matrix.unflatten(0, (halves, -1))
    padded = split.new_zeros(halves, rows, cols)
    padded[:, : split.shape[1], : split.shape[2]] = split
    return padded.flatten(0, 1)


def pack_codes(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [R, C / 2] -> int32 [C / 16, 2 R]; R is a multiple of 64, C of 16.

    A tile of 64 rows and 16 columns has four words for each of the 32 lanes of a warp, a word for each 16 rows. Lane
    4 r + p holds columns 2 p, 2 p + 1 and those 8 beyond, as mma.m16n8k16 reads them, of rows r and r + 8. The even
    columns lie in the low half of the word and the odd ones in the high half, as pairs are turned into bf16.
    """
    codes = unpack(packed)
    split = codes.view(codes.shape[0] // 64, 4, 2, 8, codes.shape[1] // 16, 2, 4, 2)
    tile, word, row_beyond, row, deep, col_beyond, pair, odd = range(8)
    nibbles = split.permute(deep, tile, row, pair, word, odd, row_beyond, col_beyond)
    words = pack(nibbles.reshape(-1, 8)).view(torch.int32)
    return words.view(codes.shape[1] // 16, 2 * codes.shape[0])


def pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """[R, G] -> [G, R], where lane r of eight finds the scales of rows r, r + 8 and so on to r + 56 together."""
    groups, rows = scales.shape[1], scales.shape[0]
    if groups == 1:
        raise ValueError("Marlin has another layout where a row has one scale; expected at least two groups a row")
    return scales.t().reshape(groups, rows // 64, 8, 8).transpose(2, 3).reshape(groups, rows)


def pack_scale_bytes(scales: torch.Tensor) -> torch.Tensor:
    """Scales of one byte: as pack_scales, but of every four the middle two change places, as pairs become bf16."""
    packed = pack_scales(scales)
    return packed.view(packed.shape[0], -1, 2, 2).transpose(2, 3).reshape(packed.shape)


def pack_e4m3_scales(scales: torch.Tensor) -> torch.Tensor:
    """e4m3 scales that are not negative, by 2**7 and without the sign: five bits of exponent and three of mantissa.

    Scales below 2**-6 would lack the exponent's top bit, which the products take for granted: vLLM makes them zero.
    """
    halves = pack_scale_bytes(scales.half()) * 2.0**7
    halves[halves < 2] = 0
    return (halves.view(torch.int16) << 1).view(torch.uint8)[:, 1::2].contiguous()


def pack_factors(factors: torch.Tensor) -> torch.Tensor:
    """float32 factors [E] of e4m3 scales: with what the exponents of codes and of scales lack beside bf16's."""
    missing = 2**7 - 2**1 - 7
    return factors * 2.0**missing


def pack_bias(bias: torch.Tensor) -> torch.Tensor:
    """[E, R]: of each 32 rows, lane p of four finds rows 2 p, 2 p + 1 and those 8, 16 and 24 beyond together."""
    return bias.view(bias.shape[0], -1, 4, 4, 2).transpose(2, 3).reshape(bias.shape)
