"""What a layer computes, as values: the fields and meanings of `MoeSpec` in the C++ interface.

Letters: T tokens, E experts, k choices per token, H hidden size, I intermediate size, Z zero
experts, S shared experts. Types are given by name (``"bfloat16"``) or as a dtype of torch or numpy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from conclave import _conclave
from conclave._conclave import TuningTable
from conclave.errors import ConclaveTypeError, ConclaveValueError

DTypeLike = Any  # "bfloat16", torch.bfloat16, numpy.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedRouting:
    """Routing for load tests, of router ``"simulated"``."""

    distribution: str = "uniform"  # normal, zipf, replay
    seed: int = 0
    zipf_exponent: float = 1.0
    replay_ids: Sequence[int] = ()  # [N * k]
    replay_weights: Sequence[float] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterInputNorm:
    """An RMS norm of the row that the gate reads."""

    enabled: bool = False
    epsilon: float = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """From logits to ids and weights; docs/routing.md has every formula."""

    name: str = "topk"  # hash, sparse_mixer, softmax_threshold, sink_softmax, top_any, ...
    score: str = "softmax"  # sigmoid, sqrtsoftplus, none
    order: str = "score_then_topk"  # topk_then_score
    has_logit_bias: bool = False
    soft_cap: float = 0.0
    has_selection_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str = "top2_sum"  # max
    group_mask: str = "neg_inf"  # zero
    renormalize: str = "sum"  # none, p_norm, softmax
    renormalize_p: float = 1.0
    epsilon: float = 0.0
    epsilon_mode: str = "add"  # clamp_min
    scale: float = 1.0
    has_expert_scale: bool = False
    has_global_scale: bool = False
    jitter_epsilon: float = 0.0
    vocab_size: int = 0
    simulated: SimulatedRouting = SimulatedRouting()
    input_norm: RouterInputNorm = RouterInputNorm()
    logits_dtype: DTypeLike = "float32"
    score_dtype: DTypeLike = "float32"
    # Numbers that only this router reads; a mapping is kept as sorted pairs, so that it has a hash.
    options: Mapping[str, float] | Sequence[tuple[str, float]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(sorted(dict(self.options).items())))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationSpec:
    """A row of the activation list and its parameters; ``*_no_mul`` take no gate."""

    name: str = "silu"
    limit: float = 0.0
    alpha: float = 0.0
    beta: float = 0.0
    linear_beta: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedExpertSpec:
    """Experts that every token uses."""

    mode: str = "none"  # add, sigmoid_gate, average, softmax_mix, router_weight, fused_slots
    intermediate_size: int = 0
    count: int = 1
    activation: ActivationSpec | str = ActivationSpec(name="")  # no name: as the routed experts
    has_bias: bool = False
    slot_weight: float = 1.0
    weight_dtype: DTypeLike | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """A projection that the routed experts work on."""

    size: int = 0
    has_norm: bool = False
    norm_epsilon: float = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidualMlpSpec:
    """A dense MLP beside the experts."""

    intermediate_size: int = 0
    activation: ActivationSpec | str = ActivationSpec(name="")
    weight_dtype: DTypeLike | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixCodes:
    """What codes of gate and up, or of down, are known to be, where another matrix of the layer
    asks for more: a CPU holds them as such. A layer refuses weights that are otherwise."""

    dtype: DTypeLike | None = None  # of fewer bits, with all of their values
    block_cols: int = 0  # columns that share scale and zero, if more than QuantSpec.block_cols
    has_zeros: bool = True  # False: all are 0
    scale_values: str = "float"  # "float": as QuantSpec has them
    zero_values: str = "float"


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """Quantisation of weights that are codes and of the rows they multiply, which are int8 beside
    integers and e4m3 beside all others."""

    weights: str = "none"  # tensor, channel, block
    block_rows: int = 128  # with block_cols; 1: groups of columns of a row
    block_cols: int = 128
    activations: str = "none"  # tensor_static, token, group
    activation_group: int = 128  # columns of a row that share a scale, for group
    # int8 beside int8, int4 and e2m1 weights; with a scale rule but "quotient" any of
    # float8_e4m3fn, float8_e5m2, float6_e2m3, float6_e3m2 and float4_e2m1fn_x2
    activation_dtype: DTypeLike | None = None
    # quotient, floor_power, even_power, half_power, ceil_power, two_level
    activation_scale_rule: str = "quotient"
    power_of_two_scales: bool = False
    signed_scales: bool = False  # scales may be negative, as in GGUF files
    scale_values: str = "float"  # float16, power_of_two, steps, float8: what scales are for sure
    zeros: str = "none"  # point: w = (code - zero) * scale; offset: w = code * scale - zero
    zero_values: str = "float"  # as scale_values, for zeros that are offsets
    has_global_scale: bool = False  # a factor of all scales of a matrix
    has_column_order: bool = False  # the group of each column is given ("act-order")
    has_column_factors: bool = False  # of rows, as "pre_quant_scale" has them
    gate_up_codes: MatrixCodes = MatrixCodes()
    down_codes: MatrixCodes = MatrixCodes()


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightForm:
    """A type of weights with one way to scale weights and rows."""

    name: str  # "fp8-block", "int4-group128"
    dtype: str
    quant: QuantSpec
    method: str  # as config.json states it: "fp8" or "compressed-tensors"; "" for plain types
    format: str  # what "compressed-tensors" calls it: "int-quantized"
    type: str  # what its schemes call the codes: "int"
    packed_in: str | None  # "int32", "uint8": what codes fill in checkpoints, the lowest bits first
    scale_dtype: str  # the type of scales there


def weight_forms() -> tuple[WeightForm, ...]:
    """The forms of weights that tools offer by name, plain types first."""
    return tuple(from_dict(WeightForm, form) for form in _conclave.weight_forms())


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """A whole layer. `Layer.from_tensors` fills sizes and the type that are left out, except
    a ``weight_dtype`` of half a byte ("int4"), which no array says."""

    num_experts: int = 0
    top_k: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    weight_dtype: DTypeLike | None = None
    quant: QuantSpec = QuantSpec()
    router: RouterSpec = RouterSpec()
    activation: ActivationSpec | str = ActivationSpec()
    shared: SharedExpertSpec = SharedExpertSpec()
    has_gate: bool | None = None
    has_bias: bool = False
    has_output_bias: bool = False
    num_zero_experts: int = 0
    weight_on: str = "output"  # input
    output_scale: float = 1.0
    latent: LatentSpec = LatentSpec()
    residual: ResidualMlpSpec = ResidualMlpSpec()

    def with_int8_rows(self) -> MoeSpec:
        """The same layer with rows in int8, in groups of 32 columns, that had been left as they
        are; beside weights of int8, int4 and e2m1."""
        if self.quant.activations != "none":
            raise ConclaveValueError(
                f"rows are quantised already: QuantSpec.activations is {self.quant.activations!r}"
            )
        quant = dataclasses.replace(
            self.quant, activations="group", activation_group=32, activation_dtype="int8"
        )
        return dataclasses.replace(self, quant=quant)

    def with_plain_rows(self) -> MoeSpec:
        """The same layer with rows as they are, whether or not the spec quantises them."""
        usual = QuantSpec()
        quant = dataclasses.replace(
            self.quant,
            activations=usual.activations,
            activation_group=usual.activation_group,
            activation_dtype=usual.activation_dtype,
            activation_scale_rule=usual.activation_scale_rule,
            power_of_two_scales=usual.power_of_two_scales,
        )
        return dataclasses.replace(self, quant=quant)

    def count_parameters(self) -> tuple[int, int]:
        """Weight elements of the layer: all, and those that one token uses."""
        return _conclave.count_parameters(to_dict(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """Which part of a layer this process holds. Sums over ranks are the caller's: ``partial``."""

    ep_size: int = 1
    ep_rank: int = 0
    placement: str = "linear"  # round_robin, custom
    rank_of: Sequence[int] = ()
    num_redundant_experts: int = 0
    replica_of: Sequence[int] = ()
    tp_size: int = 1
    tp_rank: int = 0
    reduce: str = "full"  # partial


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """How a layer runs; the result's meaning does not depend on it."""

    max_tokens: int = 4096  # planned for; forward takes more in equal chunks
    id_policy: str = "strict"  # skip
    kernel: str = ""
    arithmetic: str = ""
    transport: str = "variable"  # fixed_slots; between ranks of a layer that exchanges rows itself
    ep_combine: str = "unreduced"  # reduced_per_rank; rounded_per_rank, on GPUs
    chunk_order: str = "in_turn"  # by_twos, micro_batches; only where rows travel between ranks
    micro_batch_tokens: int = 0  # from which on a call is cut in two; 0: as the plan finds it
    determinism: str = "repeatable"  # batch_invariant, unordered
    spare_experts: int = 0  # places on each rank for experts that move beside forwards
    max_adapter_rank: int = 0  # of adapters that may be added (0: none can be)
    tuning: TuningTable | str | os.PathLike[str] | None = None  # measured choices, on CUDA


_Record = TypeVar("_Record")


def to_dict(record: Any, argument: str = "") -> dict[str, Any]:
    """The dictionary that the extension module takes: a record, or a mapping as it is.

    Fields that are None are left out, which gives them their default.

    Raises:
        ConclaveTypeError: naming the argument, if it has a name.
    """
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        items: Any = ((f.name, getattr(record, f.name)) for f in dataclasses.fields(record))
    elif isinstance(record, Mapping):
        items = record.items()
    else:
        named = f"{argument}: " if argument else ""
        raise ConclaveTypeError(
            f"{named}expected MoeSpec, LayerOptions or another record, or a mapping, "
            f"found {type(record).__name__}"
        )
    return {name: _plain(name, value) for name, value in items if value is not None}


def given_fields(argument: str, record: Any) -> dict[str, Any]:
    """The same of an argument that may be None, for all defaults."""
    return {} if record is None else to_dict(record, argument)


def _plain(name: str, value: Any) -> Any:
    if name == "options":
        with contextlib.suppress(TypeError, ValueError):  # the extension module refuses others
            return dict(value)
    if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
        return to_dict(value)
    return list(value) if isinstance(value, tuple) else value


_NESTED: dict[str, type] = {
    "simulated": SimulatedRouting,
    "input_norm": RouterInputNorm,
    "quant": QuantSpec,
    "gate_up_codes": MatrixCodes,
    "down_codes": MatrixCodes,
    "router": RouterSpec,
    "activation": ActivationSpec,
    "shared": SharedExpertSpec,
    "latent": LatentSpec,
    "residual": ResidualMlpSpec,
}


def from_dict(kind: type[_Record], values: Mapping[str, Any]) -> _Record:
    """The record of a dictionary that the extension module returned."""
    return kind(**{name: _record(name, value) for name, value in values.items()})


def _record(name: str, value: Any) -> Any:
    if isinstance(value, Mapping) and name in _NESTED:
        return from_dict(_NESTED[name], value)
    return tuple(value) if isinstance(value, list) else value
