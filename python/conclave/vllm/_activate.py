"""Activations of rows in torch, for experts that a program brings itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from conclave.errors import ConclaveValueError
from conclave.spec import ActivationSpec
from conclave.vllm.activation import MoEActivation, activation_spec, parse_activation


@dataclasses.dataclass(frozen=True)
class ApplyMoEActivationConfig:
    """Parameters of an activation; those that a formula does not have are not looked at."""

    clamp_limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0
    activation_situ_beta: float | None = None
    activation_situ_linear_beta: float | None = None

    @classmethod
    def from_configs(cls, moe_config: Any, quant_config: Any) -> ApplyMoEActivationConfig:
        """What a layer and its quantisation say, the latter first."""
        found = {}
        for name, first, second in (
            ("clamp_limit", "gemm1_clamp_limit", "swiglu_limit"),
            ("alpha", "gemm1_alpha", "swiglu_alpha"),
            ("beta", "gemm1_beta", "swiglu_beta"),
            ("activation_situ_beta", "", "activation_situ_beta"),
            ("activation_situ_linear_beta", "", "activation_situ_linear_beta"),
        ):
            value = getattr(quant_config, first, None) if first else None
            value = getattr(moe_config, second, None) if value is None else value
            if value is not None:
                found[name] = value
        return cls(**found)

    def spec(self, kind: MoEActivation) -> ActivationSpec:
        """The formula with these parameters."""
        if kind is MoEActivation.SITU:
            found = activation_spec(kind, beta=self.activation_situ_beta)
            if self.activation_situ_linear_beta is None:
                return found
            return dataclasses.replace(found, linear_beta=self.activation_situ_linear_beta)
        if kind is MoEActivation.SWIGLUOAI_UNINTERLEAVE and self.clamp_limit is not None:
            return activation_spec(kind, alpha=self.alpha, beta=self.beta, limit=self.clamp_limit)
        if kind in (MoEActivation.SILU, MoEActivation.SWIGLUSTEP):
            return activation_spec(kind, limit=self.clamp_limit)
        return activation_spec(kind)


def activate(
    activation: str | MoEActivation,
    output: torch.Tensor,
    input: torch.Tensor,
    spec: ActivationSpec | None = None,
) -> None:
    """Writes the activation of input [..., 2N] ([..., N] without a gate) to output [..., N]. Formed
    in float32 and rounded once. spec: its formula, by default with published parameters."""
    kind = parse_activation(activation)
    spec = activation_spec(kind) if spec is None else spec
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
    if spec.name == "silu_clamp_before":
        gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    return _PLAIN[kind.without_mul()](gate) * up


_PLAIN: dict[MoEActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    MoEActivation.SILU_NO_MUL: functional.silu,
    MoEActivation.GELU_NO_MUL: functional.gelu,
    MoEActivation.GELU_TANH_NO_MUL: lambda rows: functional.gelu(rows, approximate="tanh"),
    MoEActivation.RELU2_NO_MUL: lambda rows: functional.relu(rows).square(),
}
