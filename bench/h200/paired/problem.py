"""Random weights, tokens and routings of a cell, and the float64 layer that outputs are held to."""

import functools

import torch

from .cases import Case, routings_per_graph

GROUP = 128
E4M3_MOST = 448.0
SAMPLED_TOKENS = 6
# Relative L2 error of a token, beyond which a kernel computes something else. In e4m3 a code of the
# intermediate may fall to the other side of a boundary, which is no fault.
LIMITS = {"bf16": 1e-2, "e4m3": 5e-2, "int4": 1.5e-2, "mxfp4": 1.5e-2}


def quantise_blocks(matrix: torch.Tensor) -> tuple:
    """[R, C] -> e4m3 [R, C], a float32 scale for each block of 128 x 128."""
    rows, cols = matrix.shape
    padded = torch.nn.functional.pad(matrix.float(), (0, -cols % GROUP, 0, -rows % GROUP))
    blocks = padded.view(padded.shape[0] // GROUP, GROUP, padded.shape[1] // GROUP, GROUP)
    scales = (blocks.abs().amax((1, 3)) / E4M3_MOST).clamp_min(1e-12)
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(padded.shape)[:rows, :cols].contiguous(), scales


def dequantise_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """In float64."""
    wide = scales.double().repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return codes.double() * wide[: codes.shape[0], : codes.shape[1]]


def quantise_rows(rows: torch.Tensor) -> tuple:
    """[M, C] -> e4m3 [M, C], a float32 scale for each group of 128 of a row; C is a multiple of 128."""
    groups = rows.float().view(rows.shape[0], -1, GROUP)
    scales = (groups.abs().amax(-1) / E4M3_MOST).clamp_min(1e-12)
    return (groups / scales[..., None]).to(torch.float8_e4m3fn).view(rows.shape), scales


def as_quantised(rows: torch.Tensor) -> torch.Tensor:
    """Float64 rows as they are after quantise_rows."""
    codes, scales = quantise_rows(rows)
    return (codes.double().view(rows.shape[0], -1, GROUP) * scales.double()[..., None]).view(rows.shape)


class Weights:
    """gate_up [E, 2I, H] and down [E, H, I], with scales where the format has them."""

    def __init__(self, case: Case, seed: int = 1, device: str = "cuda"):
        self.case = case
        torch.manual_seed(seed)
        sizes = {"gate_up": (2 * case.inner, case.hidden), "down": (case.hidden, case.inner)}
        for name, (rows, cols) in sizes.items():
            stacks = None
            for expert in range(case.experts):
                made = self._matrix(rows, cols, device)
                if stacks is None:
                    stacks = [None if m is None else m.new_empty(case.experts, *m.shape) for m in made]
                for stack, part in zip(stacks, made):
                    if part is not None:
                        stack[expert] = part
            setattr(self, name, stacks[0])
            setattr(self, name + "_scale", stacks[1])

    def _matrix(self, rows: int, cols: int, device: str) -> tuple:
        dtype = torch.float32 if self.case.format == "e4m3" else torch.bfloat16
        matrix = torch.empty(rows, cols, dtype=dtype, device=device).normal_(std=cols**-0.5)
        return quantise_blocks(matrix) if self.case.format == "e4m3" else (matrix, None)

    def exact(self, name: str, expert: int) -> torch.Tensor:
        matrix, scale = getattr(self, name)[expert], getattr(self, name + "_scale")
        return matrix.double() if scale is None else dequantise_blocks(matrix, scale[expert])

    def rows_as_read(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows in float64 as a product of this format reads them."""
        return as_quantised(rows) if self.case.format == "e4m3" else rows.double()


class Problem:
    """A cell: inputs of each routing of a graph."""

    def __init__(self, case: Case, tokens: int, weights: Weights, seed: int = 2, device: str = "cuda"):
        self.case, self.tokens, self.weights, self.device = case, tokens, weights, device
        self.routings = routings_per_graph(tokens)
        torch.manual_seed(seed + tokens)
        self.hidden, self.ids, self.topk_weights = [], [], []
        for _ in range(self.routings):
            self.hidden.append(torch.randn(tokens, case.hidden, device=device).bfloat16())
            weight, ids = torch.softmax(torch.randn(tokens, case.experts, device=device), -1).topk(case.top_k)
            self.ids.append(ids.to(torch.int32).contiguous())
            self.topk_weights.append((weight / weight.sum(-1, keepdim=True)).contiguous())

    @functools.cached_property
    def active_experts(self) -> float:
        return sum(len(torch.unique(ids)) for ids in self.ids) / self.routings

    @property
    def active_bytes(self) -> float:
        return self.active_experts * 3 * self.case.hidden * self.case.inner * self.case.weight_bits / 8

    def rows_of_experts(self, routing: int) -> torch.Tensor:
        """How many rows each expert gets, [E] int64."""
        return torch.bincount(self.ids[routing].flatten().long(), minlength=self.case.experts)

    def order(self, routing: int) -> torch.Tensor:
        """Slots (token * k + choice) sorted by expert."""
        return torch.sort(self.ids[routing].flatten().long(), stable=True).indices

    @functools.cached_property
    def sampled(self) -> list:
        """(routing, token) pairs: first and last token of the first and last routing, and some between."""
        between = torch.linspace(0, self.tokens - 1, SAMPLED_TOKENS).long().tolist()
        pairs = {(0, token) for token in between}
        pairs |= {(self.routings - 1, token) for token in (0, self.tokens - 1)}
        return sorted(pairs)

    @functools.cached_property
    def expected(self) -> dict:
        return {(routing, token): self._token(routing, token) for routing, token in self.sampled}

    def _token(self, routing: int, token: int) -> torch.Tensor:
        weights, inner = self.weights, self.case.inner
        row = weights.rows_as_read(self.hidden[routing][token : token + 1])
        out = torch.zeros(self.case.hidden, dtype=torch.float64, device=self.device)
        for expert, share in zip(self.ids[routing][token].tolist(), self.topk_weights[routing][token].tolist()):
            both = row @ weights.exact("gate_up", expert).T
            middle = torch.nn.functional.silu(both[:, :inner]) * both[:, inner:]
            out += share * (weights.rows_as_read(middle) @ weights.exact("down", expert).T)[0]
        return out

    def layer_error(self, outputs: list) -> float:
        """Of the worst sampled token; NaN counts as infinite."""
        worst = 0.0
        for (routing, token), expected in self.expected.items():
            error = (outputs[routing][token].double() - expected).norm() / expected.norm()
            worst = max(worst, finite(error))
        return worst


def finite(error: torch.Tensor) -> float:
    value = float(error)
    return value if value == value else float("inf")
