"""cuBLAS: two dense products of the same FLOPs, and batched ones of equal rows for each expert."""

import torch

from ..plugin import Candidate
from ._products import product_error, random_rows, sample

TITLE = "cuBLAS"
WHAT = "two dense products of equal rows for each expert: no routing"
FORMATS = ("bf16",)


def open():
    def candidates(problem):
        case, weights = problem.case, problem.weights
        rows = problem.tokens * case.top_k
        share = max(1, rows // case.experts)
        experts = min(case.experts, rows)
        inputs = {name: random_rows(experts * share, size, problem.device).view(experts, share, size)
                  for name, size in (("gate_up", case.hidden), ("down", case.inner))}
        # Every routing starts at another expert, so that few rows do not find their weights in the cache.
        starts = [j * experts % (case.experts - experts + 1) for j in range(problem.routings)]

        def run(index: int):
            held = slice(starts[index], starts[index] + experts)
            return tuple(torch.bmm(inputs[name], getattr(weights, name)[held].transpose(1, 2)) for name in inputs)

        def error(outputs: list) -> float:
            places = sample(experts * share)
            owners = [starts[0] + place // share for place in places]
            return max(product_error(weights, name, rows.flatten(0, 1)[places], out.flatten(0, 1)[places], owners)
                       for (name, rows), out in zip(inputs.items(), outputs[0]))

        yield Candidate("equal rows", run, error)

    return candidates
