"""Which tensors of a checkpoint belong to which expert, by the names that published code uses."""

from __future__ import annotations

from typing import Any

from conclave.errors import ConclaveValueError
from conclave.vllm.mapping import Row, expert_params_mapping

# Gate, down and up: of most families; of Mixtral, Phi-MoE and Granite; of Grok-1.
_NAMES = (
    ("gate_proj", "down_proj", "up_proj"),
    ("w1", "w2", "w3"),
    ("linear", "linear_1", "linear_v"),
)
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _num_experts(model: Any) -> int:
    """Of a model or its configuration. Raises ConclaveValueError."""
    config = getattr(model, "config", model)
    parts = [config.get_text_config()] if hasattr(config, "get_text_config") else []
    for part in (*parts, config):
        for name in _COUNTS:
            count = getattr(part, name, None)
            count = max(count, default=0) if isinstance(count, (list, tuple)) else count
            if isinstance(count, int) and not isinstance(count, bool) and count > 0:
                return count
    raise ConclaveValueError(
        f"model: {type(config).__name__} does not say how many experts there are; expected one of "
        f"{', '.join(_COUNTS)}"
    )


def get_expert_mapping(model: Any, num_redundant_experts: int = 0) -> list[Row]:
    """Rows (parameter, part of a tensor's name, physical expert, shard) for `load_weights` and the
    `expert_mapping` of `conclave.vllm.FusedMoE`, in one list for all names of published code:
    gate_proj, up_proj and down_proj; w1, w3 and w2; linear, linear_v and linear_1.

    Args:
        model: a model of transformers, or its configuration, which says how many experts there are.
        num_redundant_experts: copies for a balancer, placed as `conclave.vllm` places them.

    Raises:
        ConclaveValueError: for a configuration without a number of experts, or fewer than 0 copies.
    """
    count = _num_experts(model)
    rows = (
        expert_params_mapping(None, n, count, num_redundant_experts, "experts.") for n in _NAMES
    )
    return [row for of_names in rows for row in of_names]
