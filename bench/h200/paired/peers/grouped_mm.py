"""torch's grouped product: the two products on rows sorted beforehand."""

import torch

from ..plugin import Candidate, Missing
from ._products import product_error, random_rows, sample

TITLE = "torch grouped_mm"
WHAT = "two bare products of sorted rows"
FORMATS = ("bf16",)


def grouped_product():
    found = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if found is None:
        raise Missing(f"torch {torch.__version__} has no grouped_mm")
    return found


def open():
    grouped = grouped_product()

    def candidates(problem):
        case, weights = problem.case, problem.weights
        rows = problem.tokens * case.top_k
        inputs = {"gate_up": random_rows(rows, case.hidden, problem.device),
                  "down": random_rows(rows, case.inner, problem.device)}
        ends = [problem.rows_of_experts(j).cumsum(0).to(torch.int32) for j in range(problem.routings)]
        up, down = weights.gate_up.transpose(1, 2), weights.down.transpose(1, 2)

        def run(index: int):
            return grouped(inputs["gate_up"], up, offs=ends[index]), grouped(inputs["down"], down, offs=ends[index])

        def error(outputs: list) -> float:
            places = sample(rows)
            experts = problem.ids[0].flatten().long()[problem.order(0)][places].tolist()
            return max(product_error(weights, name, inputs[name][places], out[places], experts)
                       for name, out in zip(inputs, outputs[0]))

        yield Candidate("products", run, error)

    return candidates
