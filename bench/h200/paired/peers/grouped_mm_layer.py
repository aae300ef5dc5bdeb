"""A whole layer of torch's grouped product, as transformers' grouped_mm experts do it."""

import torch

from ..plugin import Candidate
from .grouped_mm import grouped_product

TITLE = "torch layer of grouped_mm"
WHAT = "whole layer from ids and weights"
FORMATS = ("bf16",)


def open():
    grouped = grouped_product()

    def candidates(problem):
        case = problem.case
        up, down = problem.weights.gate_up.transpose(1, 2), problem.weights.down.transpose(1, 2)

        def run(index: int):
            ids = problem.ids[index].flatten()
            order = torch.argsort(ids)
            counts = torch.zeros(case.experts, dtype=torch.int32, device=ids.device)
            ends = counts.scatter_add_(0, ids.long(), torch.ones_like(ids)).cumsum(0, dtype=torch.int32)
            rows = problem.hidden[index][order // case.top_k]
            gate, both = grouped(rows, up, offs=ends).chunk(2, dim=-1)
            out = grouped(torch.nn.functional.silu(gate) * both, down, offs=ends)
            out = out * problem.topk_weights[index].flatten()[order, None].to(out.dtype)
            back = torch.empty_like(out)
            back[order] = out
            return back.view(problem.tokens, case.top_k, case.hidden).sum(1)

        yield Candidate("layer", run, problem.layer_error)

    return candidates
