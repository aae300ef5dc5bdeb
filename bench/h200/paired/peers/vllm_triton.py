"""vLLM's Triton experts: align, product, SiLU times up, product, sum; the fastest of several tiles.

PAIRED_VLLM names a folder with its fused_moe.py; PAIRED_VLLM_OPS its library of MoE operators, for
moe_align_block_size and moe_sum. Without that library sorting is done by torch, which the candidate's name says.
"""

import os

import torch

from ..plugin import Candidate

TITLE = "vLLM Triton"
WHAT = "whole layer from ids and weights"
FORMATS = ("bf16", "e4m3")


def tile(rows: int, cols: int, depth: int, group: int, warps: int, stages: int) -> dict:
    return {"BLOCK_SIZE_M": rows, "BLOCK_SIZE_N": cols, "BLOCK_SIZE_K": depth, "GROUP_SIZE_M": group,
            "num_warps": warps, "num_stages": stages}


def other_tiles(case, tokens: int) -> list:
    """Beside what vLLM would choose: tiles found fast for so many rows an expert."""
    mean = tokens * case.top_k / case.experts
    if case.format == "e4m3":
        if mean <= 16:
            return [tile(16, 128, 128, 1, 4, 3)]
        return [tile(64, 128, 128, 8, 4, 3)] + ([tile(128, 128, 128, 16, 8, 3)] if mean > 128 else [])
    if mean <= 16:
        return [tile(16, 128, 128, 1, 4, 3), tile(16, 64, 128, 1, 4, 4)]
    if mean <= 64:
        return [tile(16, 128, 128, 1, 4, 3), tile(64, 128, 64, 1, 4, 4)]
    return [tile(128, 128, 64, 8, 4, 3), tile(128, 256, 64, 8, 8, 3), tile(128, 256, 64, 16, 8, 4)]


def tiles(source, module, case, tokens: int) -> list:
    """(name, tile), each once."""
    shipped = source.shipped_config(case, tokens)
    block = [128, 128] if case.format == "e4m3" else None
    kind = "fp8_w8a8" if block else None
    default = module.get_default_config(tokens, case.experts, case.inner, case.hidden, case.top_k, kind, block)
    named = ([("shipped", shipped)] if shipped else []) + [("default", default)]
    named += [("x".join(map(str, t.values())), t) for t in other_tiles(case, tokens)]
    seen, unique = set(), []
    for name, config in named:
        config = {key: value for key, value in config.items() if key != "SPLIT_K"}
        key = tuple(sorted(config.items()))
        if key not in seen:
            seen.add(key)
            unique.append((name, config))
    return unique


class Layer:
    def __init__(self, module, align, helpers, problem, config: dict):
        self.module, self.align, self.helpers, self.problem, self.config = module, align, helpers, problem, config

    def run(self, index: int):
        problem, case = self.problem, self.problem.case
        hidden, ids = problem.hidden[index], problem.ids[index]
        tokens, k, inner = problem.tokens, case.top_k, case.inner
        # vLLM does not sort few choices over many experts either.
        if tokens * k * 4 <= case.experts:
            count = torch.full((1,), ids.numel() * self.config["BLOCK_SIZE_M"], dtype=torch.int32, device=ids.device)
            sorting = (None, ids.view(-1), count)
        else:
            sorting = self.align(ids, self.config["BLOCK_SIZE_M"], case.experts)
        both = torch.empty(tokens, k, 2 * inner, dtype=hidden.dtype, device=hidden.device)
        self._product(hidden, "gate_up", both, sorting, index, False, k)
        middle = torch.empty(tokens * k, inner, dtype=hidden.dtype, device=hidden.device)
        self.helpers.silu_mul(both, middle)
        rows = torch.empty(tokens, k, case.hidden, dtype=hidden.dtype, device=hidden.device)
        self._product(middle, "down", rows, sorting, index, True, 1)
        out = torch.empty_like(hidden)
        self.helpers.sum_choices(rows, out, k)
        return out

    def _product(self, rows, name: str, out, sorting: tuple, index: int, weigh: bool, top_k: int) -> None:
        weights, is_fp8 = self.problem.weights, self.problem.case.format == "e4m3"
        codes, scales = self.helpers.quantise_rows(rows) if is_fp8 else (rows, None)
        self.module.invoke_fused_moe_triton_kernel(
            codes, getattr(weights, name), out, scales, getattr(weights, name + "_scale"),
            self.problem.topk_weights[index], *sorting, weigh, top_k, self.config,
            compute_type=self.module.tl.bfloat16, use_fp8_w8a8=is_fp8, use_int8_w8a8=False, use_int8_w8a16=False,
            use_int4_w4a16=False, per_channel_quant=False, block_shape=[128, 128] if is_fp8 else None,
        )


def open():
    from . import _vllm_source as source
    from ._vllm_align import choose_align

    module = source.load()
    from . import _triton_helpers as helpers

    align, how = choose_align(os.environ.get("PAIRED_VLLM_OPS"))

    def candidates(problem):
        for name, config in tiles(source, module, problem.case, problem.tokens):
            layer = Layer(module, align, helpers, problem, config)
            yield Candidate(name + how, layer.run, problem.layer_error)

    return candidates
