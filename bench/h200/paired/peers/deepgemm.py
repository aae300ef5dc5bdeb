"""DeepGEMM: its two grouped products, contiguous or masked, the faster; nothing before, between or after.

PAIRED_DEEPGEMM is the folder that holds the package deep_gemm with its compiled module; without it the package is
imported as installed. Scales of rows are given in the layout that its kernels read.
"""

import os
import sys

import torch

from ..formats.e4m3 import quantise_rows
from ..plugin import Candidate, Missing
from ._products import product_error, sample

TITLE = "DeepGEMM"
WHAT = "two bare products of sorted, padded (and quantised) rows"
FORMATS = ("bf16", "e4m3")
ALIGNMENT = 128  # of an expert's rows, in the contiguous layout
MASKED_STEP = 128  # its tiles of rows divide this
MOST_MASKED_BYTES = 24 << 30


def import_deep_gemm():
    folder = os.environ.get("PAIRED_DEEPGEMM")
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        import deep_gemm
    except ImportError as error:
        raise Missing(f"deep_gemm cannot be imported ({error}); PAIRED_DEEPGEMM may name its folder") from None
    return deep_gemm


class Products:
    """Both products over rows laid out one way, for every routing of a problem."""

    def __init__(self, deep_gemm, problem):
        self.deep_gemm, self.problem, self.weights = deep_gemm, problem, problem.weights
        self.case = problem.case
        self.counts = [problem.rows_of_experts(j) for j in range(problem.routings)]
        self.is_fp8 = self.case.format == "e4m3"

    def operands(self, name: str, rows: torch.Tensor) -> tuple:
        """Rows [..., C] and the stack of an operation, as its kernel takes them."""
        weight = getattr(self.weights, name)
        if not self.is_fp8:
            return rows, weight
        codes, scales = quantise_rows(rows.view(-1, rows.shape[-1]))
        scales = self.deep_gemm.get_mn_major_tma_aligned_tensor(scales.view(*rows.shape[:-1], -1))
        return (codes.view(rows.shape), scales), (weight, getattr(self.weights, name + "_scale"))

    def error(self, outputs: list, places: list, experts: list) -> float:
        return max(
            product_error(self.weights, name, self.rows[name].flatten(0, -2)[places], out.flatten(0, -2)[places], experts)
            for name, out in zip(("gate_up", "down"), outputs[0])
        )

    def make_rows(self, *leading: int) -> None:
        self.rows = {"gate_up": torch.randn(*leading, self.case.hidden, device=self.problem.device).bfloat16(),
                     "down": torch.randn(*leading, self.case.inner, device=self.problem.device).bfloat16()}
        self.given = {name: self.operands(name, rows) for name, rows in self.rows.items()}
        self.outs = [tuple(torch.empty(*leading, size, dtype=torch.bfloat16, device=self.problem.device)
                           for size in (2 * self.case.inner, self.case.hidden))
                     for _ in range(min(2, self.problem.routings))]


class Contiguous(Products):
    """Rows of all experts one after another, each expert's padded to the alignment."""

    def __init__(self, deep_gemm, problem):
        super().__init__(deep_gemm, problem)
        self.layouts = [self._layout(counts) for counts in self.counts]
        self.make_rows(max(len(layout) for layout in self.layouts))
        kind = "fp8" if self.is_fp8 else "bf16"
        self.product = getattr(deep_gemm, f"m_grouped_{kind}_gemm_nt_contiguous")

    def _layout(self, counts: torch.Tensor) -> torch.Tensor:
        padded = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        owners = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), padded)
        within = torch.arange(len(owners), device=counts.device) - (padded.cumsum(0) - padded)[owners]
        return torch.where(within < counts[owners], owners, -1).to(torch.int32)

    def run(self, index: int):
        rows, outs = len(self.layouts[index]), self.outs[index % len(self.outs)]
        for name, out in zip(("gate_up", "down"), outs):
            given, weight = self.given[name]
            first = (given[0][:rows], self._scales(given[1], rows)) if self.is_fp8 else given[:rows]
            self.product(first, weight, out[:rows], self.layouts[index])
        return outs

    def _scales(self, scales: torch.Tensor, rows: int) -> torch.Tensor:
        """Of the first rows, in the aligned layout of that many."""
        key = (scales.data_ptr(), rows)
        cache = self.__dict__.setdefault("_cut", {})
        if key not in cache:
            cache[key] = self.deep_gemm.get_mn_major_tma_aligned_tensor(scales[:rows].contiguous())
        return cache[key]

    def worst(self, outputs: list) -> float:
        # Outputs are shared by routings; the last that wrote to the first ones is looked at.
        last = (self.problem.routings - 1) // len(self.outs) * len(self.outs)
        layout = self.layouts[last]
        held = torch.nonzero(layout >= 0).flatten()
        places = held[sample(len(held))].tolist()
        return self.error(outputs, places, layout[places].tolist())


class Masked(Products):
    """Every expert has room for the largest's rows, and says how many count."""

    def __init__(self, deep_gemm, problem):
        super().__init__(deep_gemm, problem)
        most = max(int(counts.max()) for counts in self.counts)
        self.room = (most + MASKED_STEP - 1) // MASKED_STEP * MASKED_STEP
        self.masks = [counts.to(torch.int32) for counts in self.counts]
        self.mean = max(1, round(problem.tokens * self.case.top_k / self.case.experts))
        self.make_rows(self.case.experts, self.room)
        kind = "fp8" if self.is_fp8 else "bf16"
        self.product = getattr(deep_gemm, f"m_grouped_{kind}_gemm_nt_masked")

    @staticmethod
    def bytes_of(problem) -> int:
        most = int(max(problem.rows_of_experts(j).max() for j in range(problem.routings))) + MASKED_STEP
        return problem.case.experts * most * 2 * 4 * (problem.case.hidden + problem.case.inner)

    def run(self, index: int):
        outs = self.outs[index % len(self.outs)]
        for name, out in zip(("gate_up", "down"), outs):
            given, weight = self.given[name]
            self.product(given, weight, out, self.masks[index], self.mean)
        return outs

    def worst(self, outputs: list) -> float:
        last = (self.problem.routings - 1) // len(self.outs) * len(self.outs)
        counts = self.counts[last].tolist()
        held = [(e, e * self.room + row) for e, n in enumerate(counts) if n for row in (0, n - 1)]
        chosen = [held[i] for i in sample(len(held))]
        return self.error(outputs, [place for _, place in chosen], [expert for expert, _ in chosen])


def open():
    deep_gemm = import_deep_gemm()
    deep_gemm.set_mk_alignment_for_contiguous_layout(ALIGNMENT)

    def candidates(problem):
        rows = problem.tokens * problem.case.top_k
        if rows >= 8 * problem.case.experts:
            products = Contiguous(deep_gemm, problem)
            yield Candidate("contiguous", products.run, products.worst)
        if rows <= 256 * problem.case.experts and Masked.bytes_of(problem) <= MOST_MASKED_BYTES:
            products = Masked(deep_gemm, problem)
            yield Candidate("masked", products.run, products.worst)

    return candidates
