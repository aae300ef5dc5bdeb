"""The quantisation of a `FusedMoE`: from a configuration to its parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from conclave.errors import ConclaveUnsupportedError, ConclaveValueError
from conclave.vllm import _method_readers
from conclave.vllm._formats import format_of, refuse_unsupported
from conclave.vllm._gguf import GgufScheme
from conclave.vllm._method_readers import Method, kernel_order, refuse_order
from conclave.vllm._method_schemes import Declared, MethodScheme, PackedScheme
from conclave.vllm._modules import LayerNames, ignored_entries, is_ignored, modules_by_rules
from conclave.vllm._statements import stated_by
from conclave.vllm.activation import MoEActivation
from conclave.vllm.quant import FusedMoEQuantConfig
from conclave.vllm.quant_builders import (
    biased_moe_quant_config,
    fp8_w8a8_moe_quant_config,
    fp8_w8a16_moe_quant_config,
    int8_w8a16_moe_quant_config,
)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """What shares a scale, and how rows are quantised."""

    weights: str = "none"  # tensor, channel, block
    rows: str = "none"  # static, dynamic, token
    block: tuple[int, int] | None = None
    suffix: str = "weight_scale"  # of the scales' names, as the checkpoint has them
    fixed: FusedMoEQuantConfig | None = None  # with scales and biases of its own
    codes: torch.dtype = torch.float8_e4m3fn
    encodes: bool = False  # weights of values become codes when they are loaded
    scale_fmt: str | None = None  # "ue8m0": scales of rows are powers of two

    @property
    def is_coded(self) -> bool:
        return self.weights != "none"

    @property
    def column_unit(self) -> int | None:
        """Columns that stay on one rank together; None: ranks have equal parts."""
        if self.fixed is not None and format_of(self.fixed) is not None:
            return None
        return 1 if self.block is None else math.lcm(*self.block)

    def check(self, inner: int, tp_size: int, activation: MoEActivation) -> None:
        """Nothing: columns are cut between blocks."""

    def parameters(
        self, experts: int, rows: int, inner: int, hidden: int, dtype: torch.dtype, ranks: int = 1
    ) -> Iterator[Declared]:
        """Those of w13 [rows, hidden] and w2 [hidden, inner], which no number of ranks changes."""
        del ranks
        for name, shape in (
            ("w13_weight", (experts, rows, hidden)),
            ("w2_weight", (experts, hidden, inner)),
        ):
            scale = f"{name}_scale" if self.encodes else None
            attributes = {} if scale is None else {"encoded_with": scale}
            if self.fixed is not None and (kind := format_of(self.fixed)) is not None:
                bytes_of_row = -(-shape[2] * kind.bits // 8)
                stored = self.codes if kind.bits == 8 else torch.uint8
                yield Declared(name, (*shape[:2], bytes_of_row), stored, attributes)
                continue
            yield Declared(name, shape, self.codes if self.is_coded else dtype, attributes)
        for name, (shape, kind) in self.shapes(experts, rows, inner, hidden).items():
            of_scales: dict[str, Any] = {
                "quant_method": kind,
                "takes_exponents": not self.encodes,
            }
            if "input_scale" in name:
                of_scales["of_all_ranks"] = True
            if self.block is not None:
                of_scales["column_step"] = self.block[1 if name.startswith("w2") else 0]
            yield Declared(name, shape, torch.float32, of_scales)

    def shapes(self, experts: int, rows: int, inner: int, hidden: int) -> dict[str, Any]:
        """Parameters of scales: name to shape and kind. rows: of w13; inner: columns of w2."""
        w13: tuple[int, ...]
        w2: tuple[int, ...]
        found: dict[str, tuple[tuple[int, ...], str]]
        if self.fixed is not None or not self.is_coded:
            return {}
        if self.block is not None:
            high, wide = self.block
            parts = 2 if rows == 2 * inner else 1
            w13 = (experts, parts * -(-(rows // parts) // high), -(-hidden // wide))
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
        if not self.is_coded:
            return biased_moe_quant_config(w1_bias, w2_bias)
        scales = {
            "w1_scale": getattr(layer, f"w13_{self.suffix}"),
            "w2_scale": getattr(layer, f"w2_{self.suffix}"),
            "block_shape": list(self.block) if self.block is not None else None,
            "per_out_ch_quant": self.weights == "channel",
            "w1_bias": w1_bias,
            "w2_bias": w2_bias,
        }
        if self.codes == torch.int8:
            found = int8_w8a16_moe_quant_config(
                scales["w1_scale"], scales["w2_scale"], None, None, None
            )
            return found if w1_bias is None else _with_biases(found, w1_bias, w2_bias)
        if self.rows == "none":
            return fp8_w8a16_moe_quant_config(**scales)
        return fp8_w8a8_moe_quant_config(
            **scales,
            a1_scale=getattr(layer, "w13_input_scale", None),
            a2_scale=getattr(layer, "w2_input_scale", None),
            per_act_token_quant=self.rows == "token",
            scale_fmt=self.scale_fmt,
        )


def _with_biases(config: FusedMoEQuantConfig, w1_bias: Any, w2_bias: Any) -> FusedMoEQuantConfig:
    """A copy of the configuration that has these biases too."""
    return dataclasses.replace(
        config,
        _w1=dataclasses.replace(config._w1, bias=w1_bias),
        _w2=dataclasses.replace(config._w2, bias=w2_bias),
    )


def read_scheme(
    quant_config: Any, names: LayerNames, has_bias: bool = False
) -> Scheme | PackedScheme:
    """The scheme of None, a `FusedMoEQuantConfig`, a mapping as in config.json, or an object of
    vLLM's `QuantizationConfig` kind, as its rules for modules say of a layer.

    Raises ConclaveUnsupportedError with the reason, ConclaveValueError for biases that both the
    layer and the configuration would have, and an Error that names the value for one that no such
    method writes.
    """
    if quant_config is None:
        return Scheme()
    if isinstance(quant_config, FusedMoEQuantConfig):
        return _fixed(quant_config, has_bias)
    stated = stated_by(quant_config)
    name = str(stated["quant_method"]).replace("_", "-")
    name = _OTHER_NAMES.get(name, name)
    if is_ignored(names.prefix, ignored_entries(stated)):
        return Scheme()
    reader = _READERS.get(name)
    if reader is None:
        _refuse(name)
    modules = modules_by_rules({**stated, "quant_method": name}, names)
    return Scheme() if modules is None else reader(stated, modules)


def is_read(quant_config: Any) -> bool:
    """Whether the name of a configuration's method is one that is read here, or refused by name."""
    if isinstance(quant_config, FusedMoEQuantConfig):
        return True
    name = str(stated_by(quant_config)["quant_method"]).replace("_", "-")
    return name in _OTHER_NAMES or name in _READERS or name in WITHOUT_PARAMETERS


def _refuse(name: str) -> NoReturn:
    """Raises ConclaveUnsupportedError for a method without parameters here."""
    if name in WITHOUT_PARAMETERS:
        raise ConclaveUnsupportedError(
            f"quant_config: {name} does not run here; {WITHOUT_PARAMETERS[name]}"
        )
    if order := kernel_order(name):
        refuse_order(order)
    known = ", ".join(sorted(_READERS))
    raise ConclaveUnsupportedError(f"quant_config: {name} does not run here; {known} do")


def _fixed(config: FusedMoEQuantConfig, has_bias: bool) -> Scheme:
    refuse_unsupported(config)
    if has_bias and not (config.w1_bias is None and config.w2_bias is None):
        raise ConclaveValueError("has_bias: expected False, since quant_config has biases")
    kind = format_of(config)
    if kind is None:
        return Scheme(fixed=config)
    codes = torch.float8_e4m3fn
    if kind.bits == 8 and kind.codes == "int8":
        # Codes of groups, and those with zero points, are unsigned ones.
        signed = config.block_shape is None and config.w1_zp is None
        codes = torch.int8 if signed or config.quant_dtype is not None else torch.uint8
    return Scheme(weights="tensor", fixed=config, codes=codes)


# The reader's names of rows are the keys, those of a `Scheme` the values.
_ROWS = {"none": "none", "tensor_static": "static", "token": "token", "group": "dynamic"}


def _plain_e4m3(method: Method, rows_key: str) -> Scheme:
    """Codes of e4m3 under the names of plain matrices. The key states rows, for messages."""
    powers = "ue8m0" if method.row_scales_are_powers else None
    if method.shares == "block":
        return _in_blocks(method, rows_key, powers)
    if method.rows == "group":
        raise ConclaveUnsupportedError(
            f"{rows_key}: rows in groups of {method.row_group} columns go with weights in blocks"
        )
    return Scheme(method.shares, _ROWS[method.rows], scale_fmt=powers)


def _in_blocks(method: Method, rows_key: str, powers: str | None) -> Scheme:
    if method.rows == "tensor_static":
        raise ConclaveUnsupportedError(f"{rows_key}: static scales do not go with blocks")
    if method.rows == "group" and method.row_group != method.block[1]:
        raise ConclaveUnsupportedError(
            f"{rows_key}: rows are quantised in groups of as many columns as a block has, found "
            f"groups of {method.row_group} beside blocks of {list(method.block)}"
        )
    # Rows with a scale each have one for each group beside blocks, as in vLLM.
    rows = "none" if method.rows == "none" else "dynamic"
    return Scheme("block", rows, method.block, method.parameter_of("scale"), scale_fmt=powers)


def _fp8(stated: Mapping[str, Any], modules: tuple[str, ...]) -> Scheme:
    method = Method("fp8", stated, modules)
    found = _plain_e4m3(method, "activation_scheme")
    if found.rows == "token":
        # vLLM calls these rows dynamic by tensor; layers quantise each by itself.
        found = dataclasses.replace(found, rows="dynamic")
    if stated.get("is_checkpoint_fp8_serialized") is not False:
        return found
    if (found.weights, found.rows) != ("tensor", "dynamic"):
        raise ConclaveUnsupportedError(
            "is_checkpoint_fp8_serialized: weights that are quantised when they are loaded have "
            f"one scale a matrix, and rows dynamic ones; found weights by {found.weights}, rows "
            f"{found.rows}"
        )
    return dataclasses.replace(found, encodes=True)


def _compressed(stated: Mapping[str, Any], modules: tuple[str, ...]) -> Scheme | MethodScheme:
    method = Method("compressed-tensors", stated, modules)
    if method.is_plain_e4m3:
        return _plain_e4m3(method, "config_groups")
    return _method_readers.compressed_tensors(method)


def _modelopt(stated: Mapping[str, Any], modules: tuple[str, ...]) -> Scheme | MethodScheme:
    method = Method("modelopt", stated, modules)
    if method.is_plain_e4m3:
        return _plain_e4m3(method, "quant_algo")
    return _method_readers.modelopt(method)


_READERS: dict[str, Callable[[Mapping[str, Any], tuple[str, ...]], Scheme | PackedScheme]] = {
    "fp8": _fp8,
    "experts-int8": lambda *_: Scheme("channel", codes=torch.int8, encodes=True),
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "gptq": _method_readers.gptq,
    "awq": _method_readers.awq,
    "mxfp4": _method_readers.mxfp4,
    "quark": _method_readers.quark,
    "bitsandbytes": _method_readers.bitsandbytes,
    "gguf": lambda *_: GgufScheme(),
}
# "gptq_marlin" and "awq_marlin" name a kernel that reorders plain files after they are loaded.
_OTHER_NAMES = {
    "modelopt-fp4": "modelopt",
    "modelopt-mxfp8": "modelopt",
    "modelopt-mixed": "modelopt",
    "gptq-marlin": "gptq",
    "awq-marlin": "awq",
}
# Methods that the library reads, and for which a `FusedMoE` has no parameters.
WITHOUT_PARAMETERS = {
    "auto-round": "give the quant_method that its packing_format names",
    "mlx": "conclave.Layer.from_checkpoint reads the model itself",
}
