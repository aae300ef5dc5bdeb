"""Conclave on the same weights in bf16: what decoding costs where products count, so only with many tokens."""

import torch

from ..plugin import Candidate
from ..problem import MATRICES
from . import ours

TITLE = "Conclave, bf16"
WHAT = "whole layer from ids and weights, on the weights of the codes rounded to bf16"
FORMATS = tuple(ours.FORMS)
GPT_OSS = ours.GPT_OSS
LEAST_TOKENS = 16384


def decoded(weights) -> dict:
    """The arguments of Layer.from_tensors."""
    tensors = {}
    for name in MATRICES:
        first = weights.exact(name, 0).bfloat16()
        stack = first.new_empty(weights.case.experts, *first.shape)
        for expert in range(weights.case.experts):
            stack[expert] = weights.exact(name, expert).bfloat16()
        tensors[name] = stack
        if weights.case.gpt_oss:
            tensors[name + "_bias"] = getattr(weights, name + "_bias")
    return tensors


def open():
    conclave = ours.package()

    def candidates(problem):
        if problem.tokens < LEAST_TOKENS:
            return
        torch.cuda.empty_cache()
        layer = ours.layer_of_tensors(conclave, problem.case, "bf16", decoded(problem.weights), problem.tokens)
        yield Candidate("planned", ours.forward_of(layer, problem), problem.layer_error)

    return candidates
