"""Conclave: a layer planned for exactly the cell's tokens, through the Python package."""

import os

import torch

from ..plugin import Candidate, Missing
from ..problem import ALPHA, CLAMP, MATRICES, PARTS

TITLE = "Conclave"
WHAT = "whole layer from ids and weights"
FORMATS = ("bf16", "e4m3", "int4", "mxfp4", "mxfp4_fp8", "mxfp4_fp8_group", "nvfp4")
GPT_OSS = True
# The package has these names for formats.
FORMS = {
    "int4": "int4-group128", "mxfp4": "mxfp4", "mxfp4_fp8": "mxfp4-fp8", "mxfp4_fp8_group": "mxfp4-fp8-group",
    "nvfp4": "nvfp4",
}
SCALE_TYPES = dict.fromkeys(("mxfp4", "mxfp4_fp8", "mxfp4_fp8_group"), torch.float8_e8m0fnu)


def numbers_of(conclave, form: str) -> dict:
    """The fields of MoeSpec that say what weights are."""
    if form == "e4m3":
        return {"quant": conclave.QuantSpec(weights="block", activations="group")}
    if form not in FORMS:
        return {}
    found = next(row for row in conclave.weight_forms() if row.name == FORMS[form])
    return {"weight_dtype": found.dtype, "quant": found.quant}


def tensors_of(weights) -> dict:
    """The arguments of Layer.from_tensors: codes, scales and biases, those that there are."""
    given = {name + end: getattr(weights, name + end) for name in MATRICES for end in (*PARTS, "_bias")}
    scale_type = SCALE_TYPES.get(weights.case.format)
    if scale_type:
        given |= {name + "_scale": given[name + "_scale"].view(scale_type) for name in MATRICES}
    return {name: tensor for name, tensor in given.items() if tensor is not None}


def layer_of_tensors(conclave, case, form: str, tensors: dict, tokens: int, tuning=None):
    special = {}
    if case.gpt_oss:
        activation = conclave.ActivationSpec(name="swiglu_oai", limit=CLAMP, alpha=ALPHA, beta=1)
        special = {"has_bias": True, "activation": activation}
    spec = conclave.MoeSpec(
        num_experts=case.experts, top_k=case.top_k, hidden_size=case.hidden, intermediate_size=case.inner,
        has_gate=False, **numbers_of(conclave, form), **special,
    )
    options = conclave.LayerOptions(max_tokens=tokens, id_policy="skip", tuning=tuning)
    return conclave.Layer.from_tensors(spec, options=options, **tensors)


def make_layer(conclave, weights, tokens: int, tuning=None):
    return layer_of_tensors(conclave, weights.case, weights.case.format, tensors_of(weights), tokens, tuning)


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


def package():
    try:
        import conclave
    except ImportError as error:
        raise Missing(f"the Python package is not on PYTHONPATH ({error})") from None
    return conclave


def open():
    conclave = package()
    tuning = os.environ.get("PAIRED_TUNING") or None

    def candidates(problem):
        layer = make_layer(conclave, problem.weights, problem.tokens, tuning)
        yield Candidate("planned", forward_of(layer, problem), problem.layer_error)

    return candidates
