"""vLLM's activation names, and the formulas that they stand for here."""

from __future__ import annotations

import dataclasses
import enum
import math

from conclave.errors import ConclaveUnsupportedError, ConclaveValueError
from conclave.spec import ActivationSpec

_OAI_ALPHA, _OAI_LIMIT = 1.702, 7.0
_OPERATORS = {
    "swigluoai_uninterleave": "silu_and_mul_with_clamp",
    "relu2": "relu2",
    "relu2_no_mul": "relu2",
}


class MoEActivation(enum.Enum):
    """vLLM's names. Names that end in ``_no_mul`` take no gate."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU2 = "relu2"
    SWIGLUOAI = "swigluoai"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"
    SWIGLUSTEP = "swiglustep"
    SITU = "situ"
    SILU_NO_MUL = "silu_no_mul"
    GELU_NO_MUL = "gelu_no_mul"
    GELU_TANH_NO_MUL = "gelu_tanh_no_mul"
    RELU2_NO_MUL = "relu2_no_mul"

    @classmethod
    def from_str(cls, name: str) -> MoEActivation:
        """The member of a name; `gelu_pytorch_tanh` is gelu_tanh."""
        known = {member.value: member for member in cls}
        known["gelu_pytorch_tanh"] = cls.GELU_TANH
        if name not in known:
            raise ConclaveValueError(
                f"activation: expected one of {', '.join(known)}, found {name!r}"
            )
        return known[name]

    @property
    def is_gated(self) -> bool:
        return not self.value.endswith("_no_mul")

    @property
    def is_interleaved(self) -> bool:
        """Whether rows of w1 are gate 0, up 0, gate 1, ...; else all gate rows, then all up."""
        return self is MoEActivation.SWIGLUOAI

    @property
    def custom_op_name(self) -> str:
        """The operator of vLLM's registry that computes it."""
        return _OPERATORS.get(self.value) or f"{self.value.removesuffix('_no_mul')}_and_mul"

    def without_mul(self) -> MoEActivation:
        """The form without a gate. Raises ConclaveValueError where there is none."""
        if not self.is_gated:
            return self
        return MoEActivation.from_str(self.value + "_no_mul")


def parse_activation(activation: str | MoEActivation) -> MoEActivation:
    if isinstance(activation, MoEActivation):
        return activation
    value = getattr(activation, "value", activation)  # also vLLM's own enum
    if not isinstance(value, str):
        raise ConclaveValueError(f"activation: expected a name, found {activation!r}")
    return MoEActivation.from_str(value)


def activation_spec(
    activation: MoEActivation,
    *,
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
    linear_beta: float | None = None,
) -> ActivationSpec:
    """The formula with its parameters; None is the published value.

    Raises ConclaveValueError for a parameter that the formula does not have: none is dropped.
    """
    kinds = MoEActivation
    if activation is not kinds.SITU:
        _refuse(activation, linear_beta=linear_beta)
    if activation is kinds.RELU2:
        raise ConclaveUnsupportedError(
            "activation: relu2 with a gate has no formula; relu2_no_mul has"
        )
    if activation in (kinds.SWIGLUOAI, kinds.SWIGLUOAI_UNINTERLEAVE):
        return ActivationSpec(
            name="swiglu_oai",
            alpha=_OAI_ALPHA if alpha is None else alpha,
            beta=1.0 if beta is None else beta,
            limit=_OAI_LIMIT if limit is None else limit,
        )
    if activation is kinds.SITU:
        _refuse(activation, alpha=alpha, limit=limit)
        return ActivationSpec(
            name="situ",
            beta=4.0 if beta is None else beta,
            linear_beta=25.0 if linear_beta is None else linear_beta,
        )
    if activation is kinds.SWIGLUSTEP:
        _refuse(activation, alpha=alpha, beta=beta)
        return ActivationSpec(name="silu_clamp_after", limit=_OAI_LIMIT if not limit else limit)
    if activation is kinds.SILU:
        _refuse(activation, alpha=alpha if alpha != 1.0 else None, beta=beta or None)
        if limit is not None and limit > 0:
            return ActivationSpec(name="silu_clamp_before", limit=limit)
        return ActivationSpec(name="silu")
    _refuse(activation, alpha=alpha, beta=beta, limit=limit or None)
    return ActivationSpec(name=activation.value)


@dataclasses.dataclass(frozen=True)
class ActivationParameters:
    """Those of a layer's formula. None is the published value."""

    alpha: float | None = None
    beta: float | None = None
    limit: float | None = None
    linear_beta: float | None = None

    @staticmethod
    def of(
        activation: MoEActivation,
        *,
        swiglu_alpha: float | None,
        swiglu_beta: float | None,
        swiglu_limit: float | None,
        activation_situ_beta: float | None,
        activation_situ_linear_beta: float | None,
    ) -> ActivationParameters:
        """From a layer's arguments. Raises ConclaveValueError for one that the formula does not
        have, or that is no finite number."""
        named = {
            "swiglu_alpha": swiglu_alpha,
            "swiglu_beta": swiglu_beta,
            "swiglu_limit": swiglu_limit,
            "activation_situ_beta": activation_situ_beta,
            "activation_situ_linear_beta": activation_situ_linear_beta,
        }
        given = {name: value for name, value in named.items() if value is not None}
        is_situ = activation is MoEActivation.SITU
        for name, value in given.items():
            if ("situ" in name) != is_situ and name != "swiglu_limit":
                raise ConclaveValueError(
                    f"{name}: activation {activation.value} has no such parameter, found {value}"
                )
            if not math.isfinite(value):
                raise ConclaveValueError(f"{name}: expected a finite number, found {value}")
        beta = activation_situ_beta if is_situ else swiglu_beta
        found = ActivationParameters(swiglu_alpha, beta, swiglu_limit, activation_situ_linear_beta)
        if given:
            activation_spec(activation, **dataclasses.asdict(found))
        return found


def _refuse(activation: MoEActivation, **parameters: float | None) -> None:
    for name, value in parameters.items():
        if value is not None:
            raise ConclaveValueError(
                f"activation: {activation.value} has no parameter {name}, found {value}"
            )
