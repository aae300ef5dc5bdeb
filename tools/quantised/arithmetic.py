"""Codes and their values in numpy, and one block in float64."""

import numpy as np
import torch

from quantised.bits import E2M1, E2M3, E3M2, nearest_codes

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


# The largest value, the exponent of that and the bits of mantissa of what rows are codes of.
ROW_CODES = {"e4m3": (448, 8, 3), "e2m1": (6, 2, 1), "e2m3": (7.5, 2, 3), "e3m2": (28, 4, 2)}
TABLES = {"e2m1": E2M1, "e2m3": E2M3, "e3m2": E3M2}


def power_steps(amax: np.ndarray, exponent: int, mantissa_bits: int | None, up: bool = False) -> np.ndarray:
    """2^(floor(log2(amax)) - exponent) of e8m0, with the mantissa of amax first rounded to so many bits; up: ceil for floor."""
    fraction, at = np.frexp(amax.astype(np.float64))
    if up:
        at = at + (fraction > 0.5)
    if mantissa_bits is not None:
        unit = 2.0 ** (mantissa_bits + 1)
        fraction, more = np.frexp(np.floor(fraction * unit + 0.5) / unit)
        at = at + more
    return np.where(amax == 0, 1.0, 2.0 ** np.maximum(at - 1 - exponent, -127)).astype(F32)


def scaled_rows(x: np.ndarray, rows: dict) -> np.ndarray:
    """Rows of small floats, whose scales are powers of two, or e4m3 with a number of the checkpoint."""
    codes = rows.get("codes", "e4m3")
    largest, exponent, mantissa = ROW_CODES[codes]
    seen = np.empty(x.shape)
    for begin in range(0, x.shape[1], rows["width"]):
        part = x[:, begin : begin + rows["width"]]
        amax = np.abs(part).max(axis=1, keepdims=True)
        if rows["scale"] == "two_level":
            whole = F32(rows["step"])
            step = nearest_e4m3(amax / F32(largest) / whole).astype(F32)
            step = np.where(step == 0, F32(1), step) * whole
        else:
            bits = {"floor": None, "even": mantissa, "half": 1, "ceil": None}[rows["scale"]]
            step = power_steps(amax, exponent, bits, up=rows["scale"] == "ceil")
        quotient = part / step
        if codes == "e4m3":
            values = nearest_e4m3(quotient)
        else:
            values = TABLES[codes][nearest_codes(quotient.astype(np.float64), TABLES[codes])]
        seen[:, begin : begin + rows["width"]] = values * step.astype(np.float64)
    return seen


def quantised_rows(x: np.ndarray, rows: dict) -> np.ndarray:
    """What products see of the rows of x: codes times their steps."""
    if rows["form"] == "none":
        return x
    x = x.astype(F32)
    if "scale" in rows:
        return scaled_rows(x, rows)
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
