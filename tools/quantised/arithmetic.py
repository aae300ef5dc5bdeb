"""Codes and their values in numpy, and one block in float64."""

import numpy as np
import torch

F32 = np.float32


def e4m3_values() -> np.ndarray:
    """The values of codes 0 to 0x7e, ascending."""
    codes = np.arange(0x7F)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))


VALUES = e4m3_values()


def nearest_e4m3(values: np.ndarray) -> np.ndarray:
    """To nearest, ties to the even code, beyond 448 to 448; as values."""
    magnitude = np.abs(values).astype(np.float64)
    upper = np.clip(np.searchsorted(VALUES, magnitude), 1, len(VALUES) - 1)
    lower = upper - 1
    below, above = magnitude - VALUES[lower], VALUES[upper] - magnitude
    up = (above < below) | ((above == below) & (upper % 2 == 0))
    return np.copysign(np.where(up, VALUES[upper], VALUES[lower]), values)


def decode(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor.to(torch.float64).numpy()
    codes = tensor.view(torch.uint8).numpy()
    return np.where(codes >= 0x80, -1.0, 1.0) * VALUES[codes & 0x7F]


def nearest_int8(values: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(values.astype(np.float64)), -128, 127)


def encode(values: np.ndarray) -> torch.Tensor:
    rounded = nearest_e4m3(values)
    codes = np.searchsorted(VALUES, np.abs(rounded)).astype(np.uint8) | (np.signbit(rounded).astype(np.uint8) << 7)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def quantised_rows(x: np.ndarray, rows: dict) -> np.ndarray:
    """What products see of the rows of x: codes times their steps."""
    if rows["form"] == "none":
        return x
    x = x.astype(F32)
    seen = np.empty(x.shape)
    largest, nearest = (127, nearest_int8) if rows.get("codes") == "int8" else (448, nearest_e4m3)
    width = rows.get("width", 128) if rows["form"] == "group" else x.shape[1]
    for begin in range(0, x.shape[1], width):
        part = x[:, begin : begin + width]
        if rows["form"] == "static":
            step = np.full((len(x), 1), rows["step"], F32)
        else:
            step = np.abs(part).max(axis=1, keepdims=True) / F32(largest)
            step[step == 0] = 1
            if rows.get("power_of_two"):
                step = np.exp2(np.ceil(np.log2(step.astype(np.float64)))).astype(F32)
        seen[:, begin : begin + width] = nearest(part / step) * step.astype(np.float64)
    return seen


def expand(scale: np.ndarray, shape: tuple[int, int], block: tuple[int, int] | None) -> np.ndarray:
    """A scale for every element of a matrix."""
    if block is None:
        return np.broadcast_to(scale.reshape(-1, 1), shape) if scale.size > 1 else np.full(shape, scale.item())
    wide = np.repeat(np.repeat(scale, block[0], axis=0), block[1], axis=1)
    return wide[: shape[0], : shape[1]]


def silu(x: np.ndarray) -> np.ndarray:
    return x * np.exp(-np.logaddexp(0.0, -x))


def mlp(expert: dict, x: np.ndarray, rows: dict, inner_rows: dict) -> np.ndarray:
    seen = quantised_rows(x, rows)
    h = silu(seen @ expert["gate"].T) * (seen @ expert["up"].T)
    return quantised_rows(h, inner_rows) @ expert["down"].T
