"""The quantisation of a `FusedMoE`: from a configuration to its parameters."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from conclave.errors import ConclaveTypeError, ConclaveUnsupportedError, ConclaveValueError
from conclave.vllm._arithmetic import refuse_unsupported
from conclave.vllm.quant import FP8, FusedMoEQuantConfig, dtype_text
from conclave.vllm.quant_builders import (
    biased_moe_quant_config,
    fp8_w8a8_moe_quant_config,
    fp8_w8a16_moe_quant_config,
)

_RUN = "fp8 and compressed-tensors of 8-bit floats run"


@dataclasses.dataclass(frozen=True)
class Scheme:
    """What shares a scale, and how rows are quantised."""

    weights: str = "none"  # tensor, channel, block
    rows: str = "none"  # static, dynamic, token
    block: tuple[int, int] | None = None
    suffix: str = "weight_scale"  # of the scales' names, as the checkpoint has them
    fixed: FusedMoEQuantConfig | None = None  # with scales and biases of its own

    @property
    def is_fp8(self) -> bool:
        return self.weights != "none"

    def shapes(self, experts: int, rows: int, inner: int, hidden: int) -> dict[str, Any]:
        """Parameters of scales: name to shape and kind. rows: of w13; inner: columns of w2."""
        w13: tuple[int, ...]
        w2: tuple[int, ...]
        found: dict[str, tuple[tuple[int, ...], str]]
        if self.fixed is not None or not self.is_fp8:
            return {}
        if self.block is not None:
            high, wide = self.block
            w13 = (experts, -(-rows // high), -(-hidden // wide))
            w2 = (experts, -(-hidden // high), -(-inner // wide))
            return {f"w13_{self.suffix}": (w13, "block"), f"w2_{self.suffix}": (w2, "block")}
        if self.weights == "channel":
            w13, w2 = (experts, rows, 1), (experts, hidden, 1)
            found = {"w13_weight_scale": (w13, "channel"), "w2_weight_scale": (w2, "channel")}
        else:
            parts = 2 if rows == 2 * inner else 1
            w13 = (experts, parts) if parts == 2 else (experts,)
            found = {
                "w13_weight_scale": (w13, "tensor"),
                "w2_weight_scale": ((experts,), "tensor"),
            }
        if self.rows == "static":
            found["w13_input_scale"] = ((experts,), "tensor")
            found["w2_input_scale"] = ((experts,), "tensor")
        return found

    def quant_config(self, layer: Any, w2_bias: Any) -> FusedMoEQuantConfig:
        """The configuration with the layer's scales and biases."""
        w1_bias = getattr(layer, "w13_bias", None)
        if self.fixed is not None:
            return self.fixed if w1_bias is None else _with_biases(self.fixed, w1_bias, w2_bias)
        if not self.is_fp8:
            return biased_moe_quant_config(w1_bias, w2_bias)
        scales = {
            "w1_scale": getattr(layer, f"w13_{self.suffix}"),
            "w2_scale": getattr(layer, f"w2_{self.suffix}"),
            "block_shape": list(self.block) if self.block is not None else None,
            "per_out_ch_quant": self.weights == "channel",
            "w1_bias": w1_bias,
            "w2_bias": w2_bias,
        }
        if self.rows == "none":
            return fp8_w8a16_moe_quant_config(**scales)
        return fp8_w8a8_moe_quant_config(
            **scales,
            a1_scale=getattr(layer, "w13_input_scale", None),
            a2_scale=getattr(layer, "w2_input_scale", None),
            per_act_token_quant=self.rows == "token",
        )


def _with_biases(config: FusedMoEQuantConfig, w1_bias: Any, w2_bias: Any) -> FusedMoEQuantConfig:
    """A copy of the configuration that has these biases too."""
    return dataclasses.replace(
        config,
        _w1=dataclasses.replace(config._w1, bias=w1_bias),
        _w2=dataclasses.replace(config._w2, bias=w2_bias),
    )


def read_scheme(quant_config: Any, prefix: str, has_bias: bool = False) -> Scheme:
    """The scheme of None, a `FusedMoEQuantConfig`, a mapping as in config.json, or an object of
    vLLM's `QuantizationConfig` kind.

    Raises ConclaveUnsupportedError with the reason, and ConclaveValueError for biases that both the
    layer and the configuration would have.
    """
    if quant_config is None:
        return Scheme()
    if isinstance(quant_config, FusedMoEQuantConfig):
        refuse_unsupported(quant_config)
        if has_bias and not (quant_config.w1_bias is None and quant_config.w2_bias is None):
            raise ConclaveValueError("has_bias: expected False, since quant_config has biases")
        fp8 = dtype_text(quant_config.weight_quant_dtype) == FP8
        return Scheme(weights="tensor" if fp8 else "none", fixed=quant_config)
    read = _reader(quant_config)
    name = str(read("quant_method") or _name_of(quant_config)).replace("_", "-")
    ignored = read("ignored_layers") or read("modules_to_not_convert") or read("ignore") or ()
    if is_ignored(prefix, ignored):
        return Scheme()
    if name == "fp8":
        return _fp8(read)
    if name == "compressed-tensors":
        return _compressed(read("config_groups"))
    raise ConclaveUnsupportedError(f"quant_config: {name} does not run yet; {_RUN}")


def _reader(config: Any) -> Any:
    if isinstance(config, Mapping):
        return config.get
    return lambda name: getattr(config, name, None)


def _name_of(config: Any) -> str:
    get_name = getattr(config, "get_name", None)
    if get_name is None:
        raise ConclaveTypeError(
            "quant_config: expected a FusedMoEQuantConfig, a mapping with quant_method, or an "
            f"object with get_name, found {type(config).__name__}"
        )
    return get_name()


# Names of an expert's matrices in checkpoints: gate, up, down.
_MEMBERS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def is_ignored(prefix: str, entries: Iterable[str]) -> bool:
    """Whether a configuration leaves a layer of experts as it is.

    Args:
        prefix: the layer's name, such as "model.layers.0.mlp.experts".
        entries: names of modules, which hold for all beneath them, or "re:" and a pattern that a
            name must begin with, as compressed-tensors has them; also of an expert's matrices.

    Raises:
        ConclaveUnsupportedError: for a part of an expert's matrices. ConclaveValueError: for what
        is no pattern.
    """
    rules = [_rule(entry) for entry in entries]
    if any(rule(prefix) for rule in rules):
        return True
    for members in _MEMBERS:
        found = [any(rule(f"{prefix}.0.{name}") for rule in rules) for name in members]
        if all(found):
            return True
        if any(found):
            named = [name for name, hit in zip(members, found, strict=True) if hit]
            raise ConclaveUnsupportedError(
                f"quant_config: ignores {', '.join(named)} of the experts of {prefix!r} and "
                "quantises the rest; all matrices of an expert have one scheme"
            )
    return False


def _rule(entry: str) -> Callable[[str], bool]:
    if not entry.startswith("re:"):
        return lambda name: name == entry or name.startswith(f"{entry}.")
    try:
        pattern = re.compile(entry.removeprefix("re:"))
    except re.error as error:
        raise ConclaveValueError(f"ignore: {entry!r} is no pattern: {error}") from None
    return lambda name: pattern.match(name) is not None


def _fp8(read: Any) -> Scheme:
    block = read("weight_block_size")
    scheme = read("activation_scheme") or "dynamic"
    if scheme not in ("dynamic", "static"):
        raise ConclaveValueError(f"activation_scheme: expected dynamic or static, found {scheme!r}")
    if block is None:
        return Scheme("tensor", scheme)
    if scheme == "static":
        raise ConclaveUnsupportedError(
            "activation_scheme: static scales do not go with weight_block_size"
        )
    return _block(block, "dynamic", "weight_scale_inv")


def _block(block: Any, rows: str, suffix: str) -> Scheme:
    if len(block) != 2 or int(block[1]) != 128:
        raise ConclaveUnsupportedError(
            f"weight_block_size: rows are quantised in groups of 128 columns, found {list(block)}"
        )
    return Scheme("block", rows, (int(block[0]), int(block[1])), suffix)


def _compressed(groups: Any) -> Scheme:
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise ConclaveUnsupportedError("config_groups: one group runs, for all experts alike")
    group = next(iter(groups.values()))
    weights, rows = group.get("weights") or {}, group.get("input_activations")
    if weights.get("type") != "float" or weights.get("num_bits") != 8:
        raise ConclaveUnsupportedError(
            f"config_groups: weights of {weights.get('num_bits')} bits, type "
            f"{weights.get('type')}, do not run yet; {_RUN}"
        )
    strategy = weights.get("strategy")
    if strategy == "block":
        if rows is not None and not rows.get("dynamic"):
            raise ConclaveUnsupportedError("config_groups: static scales do not go with blocks")
        kind = "none" if rows is None else "dynamic"
        return _block(weights.get("block_structure") or (), kind, "weight_scale")
    if strategy not in ("tensor", "channel"):
        raise ConclaveUnsupportedError(f"config_groups: strategy {strategy!r} does not run yet")
    if rows is None:
        return Scheme(strategy, "none")
    return Scheme(strategy, "token" if rows.get("dynamic") else "static")
