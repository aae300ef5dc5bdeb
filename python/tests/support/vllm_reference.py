"""What vLLM-shaped calls must compute: eager torch in float64, apart from the package."""

from __future__ import annotations

import math

import torch

from support.devices import is_on_gpu, seeded

FP8_MAX = 448.0
CODE_AMBIGUITY = 2e-3  # docs/quantisation.md: sums by tensor cores


def activate(name: str, rows: torch.Tensor) -> torch.Tensor:
    """The activation of [n, 2N] (or [n, N]) in float64, by vLLM's name."""
    if name == "silu_no_mul":
        return torch.nn.functional.silu(rows)
    if name == "gelu_no_mul":
        return torch.nn.functional.gelu(rows)
    if name == "gelu_tanh_no_mul":
        return torch.nn.functional.gelu(rows, approximate="tanh")
    if name == "relu2_no_mul":
        return rows.clamp(min=0) ** 2
    if name == "swigluoai":
        gate, up = rows[:, 0::2], rows[:, 1::2]
    else:
        gate, up = rows.chunk(2, dim=1)
    if name == "silu":
        return torch.nn.functional.silu(gate) * up
    if name == "gelu":
        return gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) * up
    if name == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    if name in ("swigluoai", "swigluoai_uninterleave"):
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    if name == "swiglustep":
        return torch.nn.functional.silu(gate).clamp(max=7.0) * up.clamp(-7.0, 7.0)
    assert name == "situ"
    return 4.0 * torch.tanh(gate / 4.0) * torch.sigmoid(gate) * 25.0 * torch.tanh(up / 25.0)


def experts_reference(
    hidden,
    w1,
    w2,
    topk_weights,
    topk_ids,
    activation="silu",
    w1_bias=None,
    w2_bias=None,
    expert_map=None,
    weight_on_input=False,
    quantise=None,
    quantise_inner=None,
    moved=None,
):
    """[T, H] float64. w1, w2: dequantised. quantise: of rows, to what their codes stand for.

    moved: [T] float64, to which is added what ambiguous codes of the inner rows may add to the
    square of each token's error (docs/quantisation.md): sums of tensor cores are not exact.
    """
    total = torch.zeros(hidden.shape, dtype=torch.float64)
    plain = quantise is None
    for expert in range(len(w1) if expert_map is None else len(expert_map)):
        local = expert if expert_map is None else int(expert_map[expert])
        tokens, slots = torch.nonzero(topk_ids == expert, as_tuple=True)
        if local < 0 or tokens.numel() == 0:
            continue
        share = topk_weights[tokens, slots].double().unsqueeze(1)
        rows = hidden[tokens].double() * (share if weight_on_input else 1)
        rows = rows if plain else quantise(rows)
        product = rows @ w1[local].double().T
        if w1_bias is not None:
            product = product + w1_bias[local].double()
        inner = activate(activation, product)
        if not plain:
            rule = quantise_inner or quantise
            if moved is not None:
                spread = _spread_of_codes(inner, rule) * w2[local].double().norm(dim=0)
                moved.index_add_(0, tokens, (spread * share).square().sum(1))
            inner = rule(inner)
        rows = inner @ w2[local].double().T
        if w2_bias is not None:
            rows = rows + w2_bias[local].double()
        total.index_add_(0, tokens, rows * (1 if weight_on_input else share))
    return total


def spread_of_roundings(hidden, w1, w2, topk_weights, topk_ids):
    """[T] float64: how far a token's output moves, as a root of squares, if each value that a
    kernel of the weights' type rounds were off by all of itself. A sum whose terms do not cancel
    is as large as that; where they do, a relative error has to be held to this instead.

    Rounded are the rows, if they are not of the weights' type, and the activated products (SiLU).
    """
    squares = torch.zeros(len(hidden), dtype=torch.float64)
    for expert in range(len(w1)):
        tokens, slots = torch.nonzero(topk_ids == expert, as_tuple=True)
        rows, first = hidden[tokens].double(), w1[expert].double()
        product = (rows @ first.T).requires_grad_()
        inner = activate("silu", product)
        (slope,) = torch.autograd.grad(inner.sum(), product)
        moved = inner.detach().square()
        if hidden.dtype != w1.dtype:
            both = slope.square() * (rows.square() @ first.T.square())
            moved = moved + both.unflatten(1, (2, -1)).sum(1)
        share = topk_weights[tokens, slots].double().square()
        squares.index_add_(0, tokens, (moved @ w2[expert].double().T.square()).sum(1) * share)
    return squares.sqrt()


def _spread_of_codes(rows, rule):
    """How far each value's code may move if the value is off by CODE_AMBIGUITY. The largest of a
    group, which makes its scale, stays: its code is the last one."""
    peaks = torch.zeros_like(rows, dtype=torch.bool)
    for start in range(0, rows.shape[1], 128):
        part = rows[:, start : start + 128].abs()
        peaks[:, start : start + 128] = part == part.amax(dim=1, keepdim=True)
    up, down = (
        rule(torch.where(peaks, rows, rows * (1 + share)))
        for share in (CODE_AMBIGUITY, -CODE_AMBIGUITY)
    )
    return (up - down).abs()


def worst_quantised_error(out, *case, **rules):
    """The largest relative error of a token, on a GPU beyond what ambiguous codes account for.
    Arguments as of experts_reference, whose weights are dequantised."""
    moved = torch.zeros(len(out), dtype=torch.float64)
    expected = experts_reference(*case, **rules, moved=moved)
    error = (out.double() - expected).norm(dim=1)
    if is_on_gpu():
        error = (error - moved.sqrt()).clamp(min=0)
    return float((error / expected.norm(dim=1).clamp(min=1e-30)).max()) if len(out) else 0.0


def fp8_rows(rows: torch.Tensor, group: int) -> torch.Tensor:
    """Rows [n, cols] through e4m3 with one scale for `group` columns, amax / 448 in float32."""
    rows = rows.float()
    out = torch.empty_like(rows, dtype=torch.float64)
    for start in range(0, rows.shape[1], group):
        part = rows[:, start : start + group]
        peak = part.abs().amax(dim=1, keepdim=True)
        # By a tensor: torch on a GPU multiplies by the reciprocal of a number.
        scale = peak / torch.full_like(peak, FP8_MAX)
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        out[:, start : start + group] = _codes(part / scale) * scale.double()
    return out


def fp8_static(rows: torch.Tensor, scale: float) -> torch.Tensor:
    """Rows through e4m3 with a given scale."""
    scale32 = torch.tensor(scale, dtype=torch.float32)
    return _codes(rows.float() / scale32) * scale32.double()


def _codes(quotients: torch.Tensor) -> torch.Tensor:
    return quotients.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).double()


def quantise_weights(weights: torch.Tensor, kind: str, block=(128, 128)):
    """Codes, scales as vLLM holds them, and float64 weights, of [E, rows, cols]."""
    experts, rows, cols = weights.shape
    if kind == "block":
        high, wide = block
        scales = torch.empty(experts, -(-rows // high), -(-cols // wide))
        for i in range(scales.shape[1]):
            for j in range(scales.shape[2]):
                part = weights[:, i * high : (i + 1) * high, j * wide : (j + 1) * wide]
                scales[:, i, j] = part.abs().amax(dim=(1, 2)) / FP8_MAX
        spread = scales.repeat_interleave(high, 1).repeat_interleave(wide, 2)[:, :rows, :cols]
    elif kind == "channel":
        scales = weights.abs().amax(dim=2, keepdim=True) / FP8_MAX
        spread = scales
    else:
        scales = weights.abs().amax(dim=(1, 2)) / FP8_MAX
        spread = scales[:, None, None]
    codes = (weights / spread).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes, scales, codes.double() * spread.double()


def random_case(seed, tokens, inner, hidden, experts, top_k, dtype, gated=True):
    """hidden, w1, w2, weights, ids: randn / 10 as vLLM's tests have them, routing by softmax."""
    generator = seeded(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator) / 10

    rows = 2 * inner if gated else inner
    score = torch.softmax(torch.randn(tokens, experts, generator=generator), dim=-1)
    weights, ids = torch.topk(score, top_k, dim=1)
    return (
        normal(tokens, hidden).to(dtype),
        normal(experts, rows, hidden).to(dtype),
        normal(experts, hidden, inner).to(dtype),
        weights,
        ids.to(torch.int32),
    )
