"""Small codes: where they lie in words and bytes, and what they stand for."""

import numpy as np
import torch


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of each row of a matrix of any type."""
    return np.atleast_2d(tensor.contiguous().view(torch.uint8).numpy())


def codes_of(tensor: torch.Tensor, bits: int, count: int) -> np.ndarray:
    """The first codes of each row, which lie one after the other from the lowest bit on."""
    stream = np.unpackbits(bytes_of(tensor), axis=1, bitorder="little")[:, : count * bits]
    return stream.reshape(len(stream), count, bits) @ (1 << np.arange(bits))


def words_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """The opposite of codes_of: bytes of rows whose codes fill whole bytes."""
    stream = (codes[..., None] >> np.arange(bits) & 1).astype(np.uint8)
    return np.packbits(stream.reshape(len(codes), -1), axis=1, bitorder="little")


def float_values(exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """The values of all codes of a float of a few bits that has neither infinity nor NaN."""
    codes = np.arange(1 << (exponent_bits + mantissa_bits))
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    normal = (1 + mantissa / 2.0**mantissa_bits) * 2.0 ** (exponent - bias)
    positive = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias - mantissa_bits), normal)
    return np.concatenate([positive, -positive])


E2M1, E2M3, E3M2 = float_values(2, 1), float_values(2, 3), float_values(3, 2)


def nearest_codes(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Codes of the nearest values of a table that float_values made; ties go to the even code."""
    positive = table[: len(table) // 2]
    bounds = (positive[1:] + positive[:-1]) / 2
    magnitude = np.abs(values)
    code = np.searchsorted(bounds, magnitude, side="left")
    tied = np.isin(magnitude, bounds) & (code % 2 == 1)
    return (code + tied) | np.where(np.signbit(values), len(positive), 0)


def powers(scale: torch.Tensor) -> np.ndarray:
    """The values of e8m0 codes."""
    return 2.0 ** (scale.view(torch.uint8).numpy().astype(np.float64) - 127)


def spread(scales: np.ndarray, group: int, columns: int) -> np.ndarray:
    """A scale for every column; the last group may be partial."""
    return np.repeat(scales, group, axis=-1)[..., :columns]
