"""Which kernels a layer could take: the list that measured choices are made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conclave import _conclave, _limits, _runtime
from conclave.errors import ConclaveValueError
from conclave.spec import LayerOptions, MoeSpec, ParallelSpec, given_fields, to_dict

_MOST_TOKENS = 2**63 - 1


def tuning_candidates(
    spec: MoeSpec | Mapping[str, Any],
    tokens: int,
    *,
    device: str | None = None,
    options: LayerOptions | Mapping[str, Any] | None = None,
    parallel: ParallelSpec | Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Every kernel and tile that a layer could take for calls of `tokens` tokens, without times.

    Nothing is run. A layer whose ``LayerOptions.tuning`` is ``TuningTable([entry])`` takes that
    entry for calls of up to `tokens` tokens.

    Args:
        spec: what the layer computes, with its sizes and the weights' type; `Layer.spec` has them.
        tokens: T of a call, 1 or more.
        device: "cpu" or "cuda:0"; by default CONCLAVE_DEVICE, else "cpu".
        options, parallel: as the layer would have them.

    Returns:
        A dictionary for each choice, with the fields of `TuningTable.entries`: ``device``,
        ``format``, ``num_experts`` and ``intermediate_size`` of one rank, ``hidden_size``,
        ``top_k``, ``tokens``, ``kernel``, ``tile`` (empty for a kernel without tiles) and
        ``microseconds``, which is 0. An empty list on the CPU, where nothing is to be chosen.

    Raises:
        ConclaveUnsupportedError: the device is not here, or no kernel runs the spec on it.
        ConclaveValueError: tokens is below 1; on a GPU also a value that no layer could have.
        ConclaveTypeError: a field has the wrong type. Both name the argument or field.
    """
    tokens = _limits.integer("tokens", tokens, -_MOST_TOKENS, _MOST_TOKENS)
    if tokens < 1:
        raise ConclaveValueError(f"tokens: expected 1 or more, found {tokens}")
    return _conclave.tuning_candidates(
        _runtime.context(device),
        to_dict(spec, "spec"),
        given_fields("options", options),
        given_fields("parallel", parallel),
        tokens,
    )
