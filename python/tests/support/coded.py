"""Random codes in the arrays that vLLM's callers pass, and what they mean in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclasses.dataclass
class Coded:
    """One stack of matrices [E, rows, cols]."""

    codes: torch.Tensor
    scale: torch.Tensor
    exact: torch.Tensor  # float64
    zero: torch.Tensor | None = None
    alphas: torch.Tensor | None = None


def table(bits: int, mantissa: int) -> torch.Tensor:
    """The values of a float's codes without infinities: a sign, an exponent, a mantissa."""
    exponent_bits = bits - 1 - mantissa
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(2 ** (bits - 1)):
        exponent, part = code >> mantissa, code & (2**mantissa - 1)
        whole = part + (2**mantissa if exponent else 0)
        values.append(whole * 2.0 ** (max(exponent, 1) - bias - mantissa))
    return torch.tensor([*values, *(-value for value in values)], dtype=torch.float64)


# Bits of a mantissa, and the exponent of the largest code.
_MICROSCALED = {"mxfp4": (1, 2), "mxfp6_e3m2": (2, 4), "mxfp6_e2m3": (3, 2)}


def _steps(amax: torch.Tensor, kind: str, step: float) -> torch.Tensor:
    """The step of each group whose largest magnitude is amax, float32."""
    if kind.startswith("e4m3"):
        return amax / 448
    if kind == "nvfp4":
        return (amax / 6 / step).to(torch.float8_e4m3fn).float() * step
    if kind == "mxfp8":
        return 2.0 ** torch.ceil(torch.log2(amax.double() / 448)).float()
    mantissa, exponent = _MICROSCALED[kind]
    rounded = amax.view(torch.int32) + (1 << (22 - mantissa))
    return 2.0 ** ((rounded >> 23) - 127 - exponent).float()


def rows_in_groups(rows: torch.Tensor, kind: str, step: float) -> torch.Tensor:
    """What products see of rows that become codes of this type, float64; `step` is nvfp4's."""
    width = {"nvfp4": 16, "e4m3 by token": rows.shape[1]}.get(kind, 32)
    values = rows.float().unflatten(1, (-1, width))
    steps = _steps(values.abs().amax(2, keepdim=True), kind, step)
    units = values / steps
    if kind == "mxfp8" or kind.startswith("e4m3"):
        found = units.clamp(-448, 448).to(torch.float8_e4m3fn).double()
    else:
        mantissa = _MICROSCALED.get(kind, (1, 2))[0]
        known = table(4 if mantissa == 1 else 6, mantissa)
        found = known[(units.double()[..., None] - known).abs().argmin(-1)]
    return (found * steps.double()).flatten(1)


def in_pairs(codes: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """Codes of 4 bits, two to a byte along an axis, the first in the lower half."""
    codes = codes.movedim(axis, -1)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return packed.movedim(-1, axis).contiguous()


def in_six_bits(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 6 bits, four to three bytes, the first in the lowest bits."""
    a, b, c, d = codes.int().unflatten(-1, (-1, 4)).unbind(-1)
    word = a | b << 6 | c << 12 | d << 18
    return torch.stack([word & 255, word >> 8 & 255, word >> 16], -1).flatten(-2).to(torch.uint8)


def spread(plane: torch.Tensor, cols: int, group: int = 0) -> torch.Tensor:
    """Numbers of groups of columns, by default of all, one for each column, float64."""
    return plane.double().repeat_interleave(group or cols, -1)[..., :cols]


class Coder:
    """Makes stacks from one seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def whole(self, low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self._generator, device="cpu")

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator, device="cpu") + 0.5

    def _scales(self, shape: tuple[int, ...], group: int, largest: float) -> torch.Tensor:
        experts, rows, cols = shape
        groups = 1 if group <= 0 else -(-cols // group)
        return self.uniform(experts, rows, groups) * 2 / (largest * cols**0.5)

    def _exponents(self, shape: tuple[int, ...], largest: float) -> tuple[Any, torch.Tensor]:
        """Bytes of e8m0, and what they mean."""
        experts, rows, cols = shape
        near = round(127 + float(torch.tensor(2 / (largest * cols**0.5)).log2()))
        codes = self.whole(near - 1, near + 2, (experts, rows, -(-cols // 32)))
        return codes.to(torch.uint8), torch.exp2(codes.double() - 127)

    def integers(self, shape: tuple[int, ...], bits: int, group: int, zeros: bool = False) -> Coded:
        """Unsigned codes; without zero points each stands for itself less the middle."""
        middle = 1 << bits - 1
        codes = self.whole(0, 2 * middle, shape).to(torch.uint8)
        scale = self._scales(shape, group, middle)
        zero = torch.full(scale.shape, middle, dtype=torch.uint8)
        if zeros:
            zero = self.whole(middle - 3, middle + 4, scale.shape).to(torch.uint8)
        exact = (codes.double() - spread(zero, shape[2], group)) * spread(scale, shape[2], group)
        packed = in_pairs(codes) if bits == 4 else codes
        stored = in_pairs(zero, 1) if bits == 4 else zero
        return Coded(packed, scale, exact, stored if zeros else None)

    def signed(self, shape: tuple[int, ...], group: int = 0) -> Coded:
        """int8."""
        found = self.integers(shape, 8, group)
        codes = (found.codes.int() - 128).clamp(min=-127)
        exact = codes.double() * spread(found.scale, shape[2], group)
        return Coded(codes.to(torch.int8), found.scale, exact)

    def mxfp4(self, shape: tuple[int, ...]) -> Coded:
        codes = self.whole(0, 16, shape).to(torch.uint8)
        scale, factor = self._exponents(shape, 6)
        exact = table(4, 1)[codes.long()] * spread(factor, shape[2], 32)
        return Coded(in_pairs(codes), scale, exact)

    def mxfp6(self, shape: tuple[int, ...], mantissa: int) -> Coded:
        codes = self.whole(0, 64, shape)
        values = table(6, mantissa)
        scale, factor = self._exponents(shape, float(values.max()))
        exact = values[codes] * spread(factor, shape[2], 32)
        return Coded(in_six_bits(codes), scale, exact)

    def mxfp8(self, shape: tuple[int, ...]) -> Coded:
        codes = (torch.randn(shape, generator=self._generator) * 100).to(torch.float8_e4m3fn)
        scale, factor = self._exponents(shape, 200)
        return Coded(codes, scale, codes.double() * spread(factor, shape[2], 32))

    def nvfp4(self, shape: tuple[int, ...], halves: int = 1) -> Coded:
        """Each half of the rows has a factor of its own: alphas [E], or [E, halves]."""
        experts, rows, cols = shape
        codes = self.whole(0, 16, shape).to(torch.uint8)
        scale = (self.uniform(experts, rows, -(-cols // 16)) * 200).to(torch.float8_e4m3fn)
        alphas = self.uniform(experts, halves) / (600 * cols**0.5)
        factor = alphas.double().repeat_interleave(rows // halves, 1)[:, :, None]
        exact = table(4, 1)[codes.long()] * spread(scale.double(), cols, 16) * factor
        if halves == 1:
            alphas = alphas[:, 0]
        return Coded(in_pairs(codes), scale, exact, alphas=alphas)
