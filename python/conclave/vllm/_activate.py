"""Activations of rows in torch, for experts that a program brings itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from conclave.errors import ConclaveValueError
from conclave.spec import ActivationSpec
from conclave.vllm.activation import MoEActivation, activation_spec, parse_activation


def activate(activation: str | MoEActivation, output: torch.Tensor, input: torch.Tensor) -> None:
    """Writes the activation of input [..., 2N] ([..., N] without a gate) to output [..., N]. Formed
    in float32 and rounded once."""
    kind = parse_activation(activation)
    spec = activation_spec(kind)
    columns = output.shape[-1] * (2 if kind.is_gated else 1)
    expected = (*output.shape[:-1], columns)
    if tuple(input.shape) != expected:
        raise ConclaveValueError(
            f"input: expected shape {list(expected)} for activation {kind.value}, "
            f"found {list(input.shape)}"
        )
    rows = input.float()
    if not kind.is_gated:
        output.copy_(_PLAIN[kind](rows))
        return
    if kind.is_interleaved:
        gate, up = rows[..., 0::2], rows[..., 1::2]
    else:
        gate, up = rows.chunk(2, dim=-1)
    output.copy_(_gated(kind, spec, gate, up))


def _gated(
    kind: MoEActivation, spec: ActivationSpec, gate: torch.Tensor, up: torch.Tensor
) -> torch.Tensor:
    kinds = MoEActivation
    if kind in (kinds.SWIGLUOAI, kinds.SWIGLUOAI_UNINTERLEAVE):
        gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
        return gate * torch.sigmoid(spec.alpha * gate) * (up + spec.beta)
    if kind is kinds.SWIGLUSTEP:
        return functional.silu(gate).clamp(max=spec.limit) * up.clamp(-spec.limit, spec.limit)
    if kind is kinds.SITU:
        bounded = spec.linear_beta * torch.tanh(up / spec.linear_beta)
        return spec.beta * torch.tanh(gate / spec.beta) * torch.sigmoid(gate) * bounded
    return _PLAIN[kind.without_mul()](gate) * up


_PLAIN: dict[MoEActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    MoEActivation.SILU_NO_MUL: functional.silu,
    MoEActivation.GELU_NO_MUL: functional.gelu,
    MoEActivation.GELU_TANH_NO_MUL: lambda rows: functional.gelu(rows, approximate="tanh"),
    MoEActivation.RELU2_NO_MUL: lambda rows: functional.relu(rows).square(),
}
