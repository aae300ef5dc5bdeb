"""vLLM's compiled MoE operators: its library _moe_C, which PAIRED_VLLM_OPS names."""

import os

import torch

from ..plugin import Missing


def load(*names: str):
    """The namespace of operators, which has all of those named."""
    library = os.environ.get("PAIRED_VLLM_OPS")
    if not library:
        raise Missing("PAIRED_VLLM_OPS names no library of vLLM's MoE operators")
    try:
        torch.ops.load_library(library)
    except (OSError, RuntimeError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise Missing(f"PAIRED_VLLM_OPS={library} cannot be loaded: {first}") from None
    absent = [name for name in names if not hasattr(torch.ops._moe_C, name)]
    if absent:
        raise Missing(f"PAIRED_VLLM_OPS={library} has no operator {', '.join(absent)}: another version of vLLM?")
    return torch.ops._moe_C
