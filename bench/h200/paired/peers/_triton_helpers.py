"""Small Triton kernels around other engines' products: SiLU times up, the sum over choices, e4m3 rows."""

import torch
import triton
import triton.language as tl

from ..problem import ALPHA, CLAMP

@triton.jit
def _silu_mul(both, out, inner, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * block + tl.arange(0, block)
    held = col < inner
    gate = tl.load(both + row * 2 * inner + col, mask=held, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * inner + inner + col, mask=held, other=0.0).to(tl.float32)
    tl.store(out + row * inner + col, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=held)


def silu_mul(both: torch.Tensor, out: torch.Tensor) -> None:
    rows, inner = out.shape
    _silu_mul[(rows, triton.cdiv(inner, 1024))](both, out, inner, block=1024, num_warps=4)


@triton.jit
def _clamped_swiglu(both, out, inner, clamp, alpha, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * block + tl.arange(0, block)
    held = col < inner
    gate = tl.load(both + row * 2 * inner + col, mask=held, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * inner + inner + col, mask=held, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, clamp)
    up = tl.minimum(tl.maximum(up, -clamp), clamp)
    tl.store(out + row * inner + col, ((up + 1) * gate / (1 + tl.exp(-alpha * gate))).to(out.dtype.element_ty), mask=held)


def activate(case, both: torch.Tensor, out: torch.Tensor) -> None:
    """both [M, 2I], all gates before all ups -> out [M, I] by the case's activation; I may be padded."""
    if not case.gpt_oss:
        silu_mul(both, out)
        return
    rows, inner = out.shape
    _clamped_swiglu[(rows, triton.cdiv(inner, 1024))](both, out, inner, CLAMP, ALPHA, block=1024, num_warps=4)


@triton.jit
def _sum_choices(
    rows, weights, out, tokens, size, choices: tl.constexpr, weigh: tl.constexpr, height: tl.constexpr, block: tl.constexpr
):
    token = (tl.program_id(1) * height + tl.arange(0, height)).to(tl.int64)
    col = tl.program_id(0) * block + tl.arange(0, block)
    held = (token < tokens)[:, None] & (col < size)[None, :]
    total = tl.zeros((height, block), dtype=tl.float32)
    for choice in tl.static_range(choices):
        place = (token[:, None] * choices + choice) * size + col[None, :]
        value = tl.load(rows + place, mask=held, other=0.0).to(tl.float32)
        if weigh:
            value *= tl.load(weights + token * choices + choice, mask=token < tokens, other=0.0)[:, None]
        total += value
    tl.store(out + token[:, None] * size + col[None, :], total.to(out.dtype.element_ty), mask=held)


def sum_choices(rows: torch.Tensor, out: torch.Tensor, choices: int, weights: torch.Tensor | None = None) -> None:
    """rows [T * k, H], weighed already or else by float32 weights [T, k] -> out [T, H]."""
    tokens, size = out.shape
    height = 1 if tokens <= 4 else 2 if tokens <= 128 else 4
    grid = (triton.cdiv(size, 512), triton.cdiv(tokens, height))
    weigh = weights is not None
    _sum_choices[grid](
        rows, weights if weigh else rows, out, tokens, size, choices=choices, weigh=weigh, height=height, block=512, num_warps=4
    )


@triton.jit
def _quantise(rows, codes, scales, groups, group: tl.constexpr, height: tl.constexpr):
    which = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)
    held = (which < groups)[:, None]
    place = which[:, None] * group + tl.arange(0, group)[None, :]
    value = tl.load(rows + place, mask=held, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 1), 1e-10) * (1.0 / 448.0)
    code = tl.clamp(value / scale[:, None], -448.0, 448.0)
    tl.store(codes + place, code.to(codes.dtype.element_ty), mask=held)
    tl.store(scales + which, scale, mask=which < groups)


def quantise_rows(rows: torch.Tensor, group: int = 128) -> tuple:
    """[M, C] -> e4m3 [M, C], float32 [M, C / group]."""
    codes = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(rows.shape[0], rows.shape[1] // group, device=rows.device)
    _quantise[(triton.cdiv(scales.numel(), 16),)](rows, codes, scales, scales.numel(), group=group, height=16)
    return codes, scales
