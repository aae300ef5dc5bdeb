"""Humming's experts on four-bit weights: sort, product, SiLU times up, product, sum; the fastest of its heuristics'.

PAIRED_HUMMING is the folder that holds the package humming; without it the package is imported as installed. Its
kernels are compiled when a cell first needs them. PAIRED_VLLM_OPS names vLLM's library of MoE operators, whose
moe_align_block_size sorts for indexed products, else torch does, which the candidate's name says; grouped products need
its moe_permute and moe_unpermute. Weights are brought into Humming's layout once a case.
"""

import concurrent.futures
import dataclasses
import json
import os

import torch

from ..plugin import Candidate, Missing, one_line
from ._humming import SCHEMAS, Description, Engine, Kernels, Product

TITLE = "Humming"
WHAT = "whole layer from ids and weights, rows in bf16 or, where the format says so, e4m3 by token"
FORMATS = tuple(SCHEMAS)
GPT_OSS = True
INDEXED, GROUPED = "indexed", "grouped_contiguous"
# Grouped products are tried where an expert has so many rows on average.
LEAST_GROUPED_ROWS = 8
# Products that split their sums want these; Humming's own layers have half as many.
LOCKS = 4096
NAMES = ("gate_up", "down")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A kernel of each product, as the heuristics choose them for some number of rows."""

    label: str
    kind: str
    tunings: dict

    def key(self) -> str:
        return json.dumps([self.kind, self.tunings], sort_keys=True)


def choices(products: dict, slots: int, kinds: list) -> list:
    """For the rows there are, then for half and twice as many: heuristics of a shape often suit the next one better."""
    found = {}
    shapes = ((slots, ""), (max(1, slots // 2), ", of half the rows"), (2 * slots, ", of twice the rows"))
    for kind in kinds:
        for rows, words in shapes:
            label = kind + words
            try:
                choice = Choice(label, kind, {name: products[name].tuning(rows, kind) for name in NAMES})
            except Exception as error:
                # The heuristics may have no tile for a shape that is not the cell's own.
                print(f"Humming's heuristics, {label}: {one_line(error)}", flush=True)
                continue
            found.setdefault(choice.key(), choice)
    return list(found.values())


class Layer:
    def __init__(self, helpers, problem, products: dict, choice: Choice, kernels: dict):
        self.helpers, self.problem, self.products, self.choice, self.kernels = helpers, problem, products, choice, kernels
        self.slots = problem.tokens * problem.case.top_k
        self.locks = torch.zeros(LOCKS, dtype=torch.int32, device=problem.device)

    def product(self, name: str, operand: dict, **layout) -> torch.Tensor:
        case, hidden = self.problem.case, self.problem.hidden[0]
        out = hidden.new_empty(self.slots, 2 * case.inner if name == "gate_up" else case.hidden)
        self.products[name].launch(self.kernels[name].result(), out=out, locks=self.locks, **operand, **layout)
        return out

    def operand(self, rows: torch.Tensor) -> dict:
        product = self.products["gate_up"]
        return product.quantised(rows) if product.quantises else {"rows": rows}

    def activated(self, both: torch.Tensor) -> dict:
        product = self.products["down"]
        if product.quantises:
            return product.quantised(both, activates=True)
        middle = both.new_empty(self.slots, self.problem.case.inner)
        self.helpers.activate(self.problem.case, both, middle)
        return {"rows": middle}


class Indexed(Layer):
    """Products that gather their rows through sorted slots."""

    def __init__(self, align, *layer):
        super().__init__(*layer)
        self.align = align

    def run(self, index: int):
        problem, k = self.problem, self.problem.case.top_k
        hidden, blocks = problem.hidden[index], {name: self.choice.tunings[name]["block_shape"][0] for name in NAMES}
        sortings = {block: self.sorting(index, block) for block in set(blocks.values())}
        both = self.product("gate_up", self.operand(hidden), **sortings[blocks["gate_up"]], top_k=k)
        rows = self.product("down", self.activated(both), **sortings[blocks["down"]], top_k=1)
        out = torch.empty_like(hidden)
        self.helpers.sum_choices(rows, out, k, problem.topk_weights[index])
        return out

    def sorting(self, index: int, block: int) -> dict:
        order, owners, padded = self.align(self.problem.ids[index], block, self.problem.case.experts)
        return {"sorted_ids": order, "expert_ids": owners, "num_tokens_padded": padded}


class Grouped(Layer):
    """Products of rows that lie sorted by expert."""

    def __init__(self, ops, *layer):
        super().__init__(*layer)
        self.ops = ops
        problem = self.problem
        slots = torch.arange(self.slots, dtype=torch.int32, device=problem.device)
        self.slot_numbers = slots.view(problem.tokens, problem.case.top_k)

    def run(self, index: int):
        problem, case = self.problem, self.problem.case
        hidden, ids = problem.hidden[index], problem.ids[index]
        rows = hidden.new_empty(self.slots, case.hidden)
        starts = ids.new_empty(case.experts + 1, dtype=torch.int64)
        places, sources = torch.empty_like(ids), ids.new_full((self.slots,), self.slots)
        no_map = None
        self.ops.moe_permute(
            hidden, ids, self.slot_numbers, no_map, case.experts, case.experts, case.top_k, rows, starts, places, sources
        )
        both = self.product("gate_up", self.operand(rows), expert_layout=starts)
        rows = self.product("down", self.activated(both), expert_layout=starts)
        out = torch.empty_like(hidden)
        self.ops.moe_unpermute(rows, problem.topk_weights[index], places.flatten(), starts, case.top_k, out)
        return out


def choices_of_cell(products: dict, case, tokens: int, has_grouped: bool) -> list:
    slots = tokens * case.top_k
    grouped = has_grouped and slots >= LEAST_GROUPED_ROWS * case.experts
    return choices(products, slots, [INDEXED, GROUPED] if grouped else [INDEXED])


def ask_for(kernels: Kernels, products: dict, choice: Choice) -> dict:
    return {name: kernels.ask(products[name], choice.kind, choice.tunings[name]) for name in NAMES}


def compile_ahead(case, tokens_list: list) -> None:
    """Compiles the kernels of cells into Humming's cache, without weights and beside each other."""
    engine = Engine()
    kernels = Kernels(engine)
    products = {name: Description(engine, case, name) for name in NAMES}
    asked = [
        ask_for(kernels, products, choice)
        for tokens in tokens_list
        for choice in choices_of_cell(products, case, tokens, has_grouped=True)
    ]
    concurrent.futures.wait([kernel for pair in asked for kernel in pair.values()])


def permuting_operators():
    """vLLM's, or None where they are not here."""
    from . import _vllm_ops

    try:
        return _vllm_ops.load("moe_permute", "moe_unpermute")
    except Missing:
        return None


def open():
    engine = Engine()
    from . import _triton_helpers as helpers
    from ._vllm_align import choose_align

    kernels, ops = Kernels(engine), permuting_operators()
    align, how = choose_align(os.environ.get("PAIRED_VLLM_OPS"))

    def candidates(problem):
        weights = problem.weights
        products = weights.derived("humming", lambda: {name: Product(engine, weights, name) for name in NAMES})
        found = choices_of_cell(products, problem.case, problem.tokens, ops is not None)
        asked = [ask_for(kernels, products, choice) for choice in found]
        # A kernel that is loaded while another thread records a graph would break the recording.
        concurrent.futures.wait([kernel for pair in asked for kernel in pair.values()])
        for choice, pair in zip(found, asked):
            layer = (helpers, problem, products, choice, pair)
            if choice.kind == INDEXED:
                yield Candidate(choice.label + how, Indexed(align, *layer).run, problem.layer_error)
            else:
                yield Candidate(choice.label, Grouped(ops, *layer).run, problem.layer_error)

    return candidates
