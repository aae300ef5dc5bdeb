"""Layers of torch tensors on a GPU, and what they must compute for some of their tokens."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable
from typing import Any

import torch

import conclave

E4M3_MAX = 448.0
CODE_AMBIGUITY = 2e-3  # docs/quantisation.md, "Ambiguous codes": sums by tensor cores


@dataclasses.dataclass
class DeviceProblem:
    """Weights of a layer and a routing on the GPU; scales where the weights are e4m3."""

    spec: conclave.MoeSpec
    weights: dict[str, torch.Tensor]
    hidden: torch.Tensor  # [T, H]
    topk_ids: torch.Tensor  # [T, k] int32
    topk_weights: torch.Tensor  # [T, k] float32

    @property
    def routing(self) -> dict[str, Any]:
        return {"topk_ids": self.topk_ids, "topk_weights": self.topk_weights}

    def layer(self, **arguments: Any) -> conclave.Layer:
        return conclave.Layer.from_tensors(self.spec, **self.weights, **arguments)

    def first(self, tokens: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The first tokens and their routing."""
        return self.hidden[:tokens], {n: t[:tokens] for n, t in self.routing.items()}


def make_device_problem(
    *,
    experts: int = 16,
    top_k: int = 4,
    hidden: int = 256,
    inner: int = 128,
    tokens: int = 48,
    dtype: torch.dtype = torch.bfloat16,
    quant: conclave.QuantSpec | None = None,
    seed: int = 0,
) -> DeviceProblem:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    gate_up = normal(experts, 2 * inner, hidden) / math.sqrt(hidden)
    down = normal(experts, hidden, inner) / math.sqrt(inner)
    ids = normal(tokens, experts).topk(top_k).indices.int()
    shares = normal(tokens, top_k).softmax(-1)
    weights = {"gate_up": gate_up.to(dtype), "down": down.to(dtype)}
    rows = normal(tokens, hidden)
    if quant is not None:
        weights = {}
        for name, matrix in (("gate_up", gate_up), ("down", down)):
            weights[name], weights[f"{name}_scale"] = _quantised(matrix, quant)
    spec = conclave.MoeSpec(top_k=top_k, quant=quant or conclave.QuantSpec())
    row_dtype = dtype if quant is None else torch.bfloat16
    return DeviceProblem(spec, weights, rows.to(row_dtype), ids, shares)


def _quantised(
    matrix: torch.Tensor, quant: conclave.QuantSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes [E, R, C], and scales [E, ceil(R/128), ceil(C/128)] or [E, R]."""
    experts, rows, cols = matrix.shape
    if quant.weights == "channel":
        scale = matrix.abs().amax(2) / E4M3_MAX
        return (matrix / scale[:, :, None]).to(torch.float8_e4m3fn), scale
    high, wide = -(-rows // 128), -(-cols // 128)
    padded = torch.zeros(experts, high * 128, wide * 128, device=matrix.device)
    padded[:, :rows, :cols] = matrix
    blocks = padded.view(experts, high, 128, wide, 128)
    scale = blocks.abs().amax((2, 4)) / E4M3_MAX
    codes = (blocks / scale[:, :, None, :, None]).view_as(padded)[:, :rows, :cols]
    return codes.contiguous().to(torch.float8_e4m3fn), scale


def growth(work: Callable[[], None], attempts: int = 3) -> int:
    """Bytes of the GPU's memory that the work takes and keeps. Other processes use that memory
    too, so the least of several attempts counts: what is lost is lost every time."""
    found = []
    for _ in range(attempts):
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        work()
        gc.collect()
        torch.cuda.synchronize()
        found.append(before - torch.cuda.mem_get_info()[0])
        if found[-1] < 1 << 20:
            break
    return min(found)


def _full_weight(problem: DeviceProblem, name: str, expert: int) -> torch.Tensor:
    """A matrix of an expert, float64."""
    matrix = problem.weights[name][expert].double()
    scale = problem.weights.get(f"{name}_scale")
    if scale is None:
        return matrix
    if scale.dim() == 2:
        return matrix * scale[expert].double()[:, None]
    wide = scale[expert].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return matrix * wide[: matrix.shape[0], : matrix.shape[1]]


def _codes_of(row: torch.Tensor, group: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A float64 row as its e4m3 codes say it, and how far each code may move if the row's values
    are off by a share."""
    size = row.numel() if group == 0 else group
    padded = torch.nn.functional.pad(row, (0, -row.numel() % size)).view(-1, size)
    largest = padded.abs().amax(1, keepdim=True)
    scale = torch.where(largest > 0, largest / E4M3_MAX, 1.0)

    def rounded(factor: float) -> torch.Tensor:
        value = (padded / scale * factor).clamp(-E4M3_MAX, E4M3_MAX)
        return value.float().to(torch.float8_e4m3fn).double() * scale

    exact, moved = rounded(1.0), rounded(1 + share) - rounded(1 - share)
    return exact.view(-1)[: row.numel()], moved.abs().view(-1)[: row.numel()]


def expected_tokens(problem: DeviceProblem, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [n, H] of these tokens in float64, and what ambiguous codes may add to the error of
    each [n]."""
    quant = problem.spec.quant
    group = 128 if quant.activations == "group" else 0
    outputs, allowances = [], []
    for token in tokens:
        row = problem.hidden[token].double()
        if quant.activations != "none":
            row = _codes_of(row, group, 0.0)[0]
        total, squares = torch.zeros_like(row), 0.0
        pairs = zip(problem.topk_ids[token].tolist(), problem.topk_weights[token], strict=True)
        for expert, weight in pairs:
            gate, up = (_full_weight(problem, "gate_up", expert) @ row).chunk(2)
            value = torch.nn.functional.silu(gate) * up
            down = _full_weight(problem, "down", expert)
            if quant.activations != "none":
                value, moved = _codes_of(value, group, CODE_AMBIGUITY)
                squares += float(((moved * down.norm(dim=0) * float(weight)) ** 2).sum())
            total += float(weight) * (down @ value)
        outputs.append(total)
        allowances.append(math.sqrt(squares))
    return torch.stack(outputs), torch.tensor(allowances, device=problem.hidden.device)


def token_errors(problem: DeviceProblem, out: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Relative L2 errors of these tokens beyond what ambiguous codes account for."""
    expected, allowances = expected_tokens(problem, tokens)
    difference = (out[tokens].double() - expected).norm(dim=1) - allowances
    return difference.clamp(min=0) / expected.norm(dim=1)
