"""Conclave: a layer planned for exactly the cell's tokens, through the Python package."""

import os

import torch

from ..plugin import Candidate, Missing

TITLE = "Conclave"
WHAT = "whole layer from ids and weights"
FORMATS = ("bf16", "e4m3")


def make_layer(conclave, weights, tokens: int, tuning=None):
    case = weights.case
    quant, scales = {}, {}
    if case.format == "e4m3":
        quant = {"quant": conclave.QuantSpec(weights="block", activations="group")}
        scales = {"gate_up_scale": weights.gate_up_scale, "down_scale": weights.down_scale}
    spec = conclave.MoeSpec(
        num_experts=case.experts, top_k=case.top_k, hidden_size=case.hidden, intermediate_size=case.inner,
        has_gate=False, **quant,
    )
    options = conclave.LayerOptions(max_tokens=tokens, id_policy="skip", tuning=tuning)
    return conclave.Layer.from_tensors(
        spec, gate_up=weights.gate_up, down=weights.down, options=options, **scales
    )


def forward_of(layer, problem):
    """Runs routing `index` into an output of its own."""
    outs = [torch.empty_like(hidden) for hidden in problem.hidden]

    def run(index: int):
        layer.forward(
            problem.hidden[index], topk_ids=problem.ids[index], topk_weights=problem.topk_weights[index],
            out=outs[index],
        )
        return outs[index]

    return run


def open():
    try:
        import conclave
    except ImportError as error:
        raise Missing(f"the Python package is not on PYTHONPATH ({error})") from None
    tuning = os.environ.get("PAIRED_TUNING") or None

    def candidates(problem):
        layer = make_layer(conclave, problem.weights, problem.tokens, tuning)
        yield Candidate("planned", forward_of(layer, problem), problem.layer_error)

    return candidates
