"""vLLM's Marlin experts on four-bit weights: align, product, SiLU times up, product, sum; the fastest of three blocks.

PAIRED_VLLM_OPS names vLLM's library of MoE operators. Weights are brought into Marlin's layout once a case.
"""

import dataclasses
import os
from collections.abc import Callable

import torch

from ..plugin import Candidate
from ._marlin_layout import pack_bias, pack_codes, pack_e4m3_scales, pack_factors, pack_scale_bytes, pack_scales, pad

TITLE = "vLLM Marlin"
WHAT = "whole layer from ids and weights, rows in bf16"
GPT_OSS = True
BLOCKS = (8, 16, 32, 48, 64)


def type_id(*, exponent: int = 0, mantissa: int, signed: bool = False, bias: int = 0, finite: bool = False, nan: int = 1) -> int:
    """The number by which vLLM's operators know an element type: its fields, from the lowest bit up."""
    number, place = 0, 0
    for value, bits in ((exponent, 8), (mantissa, 8), (signed, 1), (bias, 32), (finite, 1), (nan, 8)):
        number |= int(value) << place
        place += bits
    return number


@dataclasses.dataclass(frozen=True)
class Kind:
    """How Marlin takes weights of a format."""

    type_id: int
    scale_dtype: torch.dtype
    pack_scales: Callable
    hidden_step: int  # vLLM rounds the sizes up to multiples of these
    inner_step: int


E2M1 = type_id(exponent=2, mantissa=1, signed=True, finite=True, nan=0)
KINDS = {
    "int4": Kind(type_id(mantissa=4, bias=8), torch.bfloat16, pack_scales, 128, 64),
    "mxfp4": Kind(E2M1, torch.float8_e8m0fnu, pack_scale_bytes, 256, 128),
    "nvfp4": Kind(E2M1, torch.float8_e4m3fn, pack_e4m3_scales, 128, 64),
}
FORMATS = tuple(KINDS)


def blocks(tokens: int, top_k: int, experts: int) -> list:
    """(name, rows of a block): what vLLM takes, the first that an expert's mean rows do not fill, and its neighbours."""
    rows = tokens * top_k / experts
    at = next((i for i, block in enumerate(BLOCKS) if rows / block < 0.9), len(BLOCKS) - 1)
    beside = [BLOCKS[i] for i in (at - 1, at + 1) if 0 <= i < len(BLOCKS)]
    return [(f"default, {BLOCKS[at]} rows", BLOCKS[at])] + [(f"{block} rows", block) for block in beside]


def round_up(size: int, step: int) -> int:
    return (size + step - 1) // step * step


class Weights:
    """Both stacks in Marlin's layout, padded to sizes that its products take."""

    def __init__(self, weights):
        case = weights.case
        self.kind = KINDS[case.format]
        self.hidden = round_up(case.hidden, self.kind.hidden_step)
        self.inner = round_up(case.inner, self.kind.inner_step)
        group = case.weight_format.group[1]
        self.codes, self.scales, self.factors, self.biases = {}, {}, {}, {}
        for name, halves, rows, cols in (("gate_up", 2, self.inner, self.hidden), ("down", 1, self.hidden, self.inner)):
            codes, scales = getattr(weights, name), getattr(weights, name + "_scale")
            self.codes[name] = stack(lambda e: pack_codes(pad(codes[e], halves, rows, cols // 2)), case.experts)
            self.scales[name] = stack(
                lambda e: self.kind.pack_scales(pad(scales[e], halves, rows, cols // group)), case.experts
            ).view(self.kind.scale_dtype)
            factors, bias = getattr(weights, name + "_global_scale"), getattr(weights, name + "_bias")
            self.factors[name] = None if factors is None else pack_factors(factors)
            self.biases[name] = None if bias is None else pack_bias(pad_bias(bias, halves, rows))


def pad_bias(bias: torch.Tensor, halves: int, rows: int) -> torch.Tensor:
    """[E, halves * r] -> [E, halves * rows], zeros behind each half."""
    split = bias.unflatten(1, (halves, -1))
    return torch.nn.functional.pad(split, (0, rows - split.shape[2])).flatten(1).contiguous()


def stack(make: Callable, experts: int) -> torch.Tensor:
    """make(e) of every expert, without holding all of them twice."""
    first = make(0)
    out = first.new_empty(experts, *first.shape)
    out[0] = first
    for expert in range(1, experts):
        out[expert] = make(expert)
    return out


class Layer:
    def __init__(self, ops, align, helpers, problem, weights: Weights, block: int):
        self.ops, self.align, self.helpers, self.problem = ops, align, helpers, problem
        self.weights, self.block = weights, block
        # The products of one stream take turns with it; they leave it zero, as they want to find it.
        multiprocessors = torch.cuda.get_device_properties(problem.device).multi_processor_count
        self.locks = torch.zeros(4 * multiprocessors, dtype=torch.int32, device=problem.device)

    def run(self, index: int):
        case, weights = self.problem.case, self.weights
        # A model of a size that vLLM rounds up has its rows padded in every forward.
        hidden = self.problem.hidden[index]
        if weights.hidden != case.hidden:
            hidden = torch.nn.functional.pad(hidden, (0, weights.hidden - case.hidden))
        slots = hidden.shape[0] * case.top_k
        sorting = self.align(self.problem.ids[index], self.block, case.experts)
        both = hidden.new_empty(slots, 2 * weights.inner)
        self._product(hidden, "gate_up", both, sorting, index, case.top_k, False)
        middle = hidden.new_empty(slots, weights.inner)
        self.helpers.activate(case, both, middle)
        rows = hidden.new_empty(slots, weights.hidden)
        self._product(middle, "down", rows, sorting, index, 1, True)
        if case.top_k == 1:
            return rows[:, : case.hidden]
        out = torch.empty_like(hidden)
        self.helpers.sum_choices(rows, out, case.top_k)
        return out[:, : case.hidden]

    def _product(self, rows, name: str, out, sorting: tuple, index: int, top_k: int, weigh: bool) -> None:
        bias, factors = self.weights.biases[name], self.weights.factors[name]
        row_scales = zeros = group_of_column = column_order = None
        every_group, atomic_add, float32_sums, float_zeros = True, False, True, False
        self.ops.moe_wna16_marlin_gemm(
            rows, out, self.weights.codes[name], bias, self.weights.scales[name], row_scales, factors, zeros,
            group_of_column, column_order, self.locks, *sorting, self.problem.topk_weights[index], self.block, top_k,
            weigh, self.weights.kind.type_id, rows.shape[0], out.shape[1], rows.shape[1], every_group, atomic_add,
            float32_sums, float_zeros, -1, -1, -1,  # threads' tiles and blocks a multiprocessor, left to the operator
        )


def open():
    from . import _vllm_ops

    ops = _vllm_ops.load("moe_wna16_marlin_gemm")
    from . import _triton_helpers as helpers
    from ._vllm_align import choose_align

    align, how = choose_align(os.environ.get("PAIRED_VLLM_OPS"))

    def candidates(problem):
        case = problem.case
        weights = problem.weights.derived("marlin", lambda: Weights(problem.weights))
        for name, block in blocks(problem.tokens, case.top_k, case.experts):
            layer = Layer(ops, align, helpers, problem, weights, block)
            yield Candidate(name + how, layer.run, problem.layer_error)

    return candidates
