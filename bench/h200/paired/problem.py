"""Random weights, tokens and routings of a cell, and the float64 layer that outputs are held to."""

import functools
import itertools

import torch

from .cases import Case, routings_per_graph

SAMPLED_TOKENS = 6
# A format's file makes these parts of a matrix: Weights holds the stacks under names that end so.
PARTS = ("", "_scale", "_global_scale")
MATRICES = ("gate_up", "down")
# gpt-oss: (clamp(up, -L, L) + 1) g sigmoid(alpha g) of g = min(gate, L).
CLAMP, ALPHA = 7.0, 1.702


class Weights:
    """gate_up [E, 2I, H] and down [E, H, I] as the format's file encodes them, with scales where it has them.

    Biases [E, 2I] and [E, H] in bf16 where the case has them, else None.
    """

    def __init__(self, case: Case, seed: int = 1, device: str = "cuda"):
        self.case, self.codec = case, case.weight_format.codec
        self._derived = {}
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
            for end, stack in itertools.zip_longest(PARTS, stacks):
                setattr(self, name + end, stack)
            bias = torch.randn(case.experts, rows, device=device).bfloat16() if case.gpt_oss else None
            setattr(self, name + "_bias", bias)

    def _matrix(self, rows: int, cols: int, device: str) -> tuple:
        return self.codec.encode(torch.empty(rows, cols, dtype=self.codec.DTYPE, device=device).normal_(std=cols**-0.5))

    def exact(self, name: str, expert: int) -> torch.Tensor:
        codes, scale, *factor = (getattr(self, name + end) for end in PARTS)
        factor = [f[expert] for f in factor if f is not None]
        return self.codec.decode(codes[expert], None if scale is None else scale[expert], *factor)

    def exact_bias(self, name: str, expert: int) -> torch.Tensor | float:
        bias = getattr(self, name + "_bias")
        return 0.0 if bias is None else bias[expert].double()

    def rows_as_read(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows in float64 as a product of this format reads them."""
        return self.codec.rows_as_read(rows)

    def derived(self, key: str, make):
        """What `make` returns, made once: an engine's own layout of the weights serves all cells of a case."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]


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
        return self.active_experts * 3 * self.case.hidden * self.case.inner * self.case.weight_format.weight_bits / 8

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
            both = row @ weights.exact("gate_up", expert).T + weights.exact_bias("gate_up", expert)
            middle = activated(self.case, both[:, :inner], both[:, inner:])
            down = weights.rows_as_read(middle) @ weights.exact("down", expert).T + weights.exact_bias("down", expert)
            out += share * down[0]
        return out

    def layer_error(self, outputs: list) -> float:
        """Of the worst sampled token; NaN counts as infinite."""
        worst = 0.0
        for (routing, token), expected in self.expected.items():
            error = (outputs[routing][token].double() - expected).norm() / expected.norm()
            worst = max(worst, finite(error))
        return worst


def activated(case: Case, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if not case.gpt_oss:
        return torch.nn.functional.silu(gate) * up
    gate = gate.clamp(max=CLAMP)
    return (up.clamp(-CLAMP, CLAMP) + 1) * gate * torch.sigmoid(ALPHA * gate)


def finite(error: torch.Tensor) -> float:
    value = float(error)
    return value if value == value else float("inf")
