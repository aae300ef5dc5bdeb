"""AMD Quark: its quantiser finds scales, its export modules pack, its kernels decode."""

import functools

import numpy as np
import torch
from torch import nn

from quantised.arithmetic import quantised_rows
from quantised.bits import E2M1, E2M3, E3M2, codes_of, powers, spread
from quantised.case import draw
from quantised.packaged import Mixtral, Packaged, linear


class Quark(Packaged):
    """fp4: two columns in a byte, scales that are powers of two."""

    hidden, inner, experts, top_k = 96, 64, 4, 2
    spec, spec_of = "FP4PerGroupSpec", {
        "ch_axis": -1, "group_size": 32, "scale_format": "e8m0", "scale_calculation_mode": "even", "is_dynamic": False,
    }  # fmt: skip
    bits, table = 4, E2M1
    rows_of: dict | None = None  # as spec_of

    @functools.cached_property
    def quark_config(self):
        from quark.torch.quantization.config import config

        spec = getattr(config, self.spec)(**self.spec_of).to_quantization_spec()
        rows = self.rows_of and getattr(config, self.spec)(**self.rows_of).to_quantization_spec()
        return config.QConfig(global_quant_config=config.QLayerConfig(weight=spec, input_tensors=rows), exclude=["*gate"])

    @property
    def method(self):
        return self.quark_config.to_dict() | {
            "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized", "weight_merge_groups": None}
        }

    @functools.cached_property
    def exported(self) -> dict[str, torch.Tensor]:
        """Tensors of all matrices, and what their modules decode."""
        from quark.torch import ModelQuantizer
        from quark.torch.export.nn.modules.qparamslinear import QParamsLinear

        names = list(self.matrices())
        model = nn.ModuleDict({name.replace(".", "/"): linear(w, torch.bfloat16) for name, w in self.matrices().items()})
        model.forward = lambda **batch: [model[name.replace(".", "/")](x) for name, x in batch.items()]
        quantised = ModelQuantizer(self.quark_config).quantize_model(model, [self.batch()] if self.calibrates else None)
        quantised = ModelQuantizer.freeze(quantised)
        found = {}
        for name in names:
            module = quantised[name.replace(".", "/")]
            export = QParamsLinear.from_module(module, "quark", "reorder")
            state = {key.replace("_quantizer.", "_"): t.clone() for key, t in export.state_dict().items()}
            self.check_rows(export.input_quantizer, state)
            found[name] = (state, export.weight_quantizer(export.weight.data).detach().float())
        return found

    calibrates = False

    def batch(self) -> dict[str, torch.Tensor]:
        """Rows of each matrix, of which static steps are made."""
        return {name: torch.from_numpy(3 * draw(name + " rows", 16, w.shape[1])).bfloat16() for name, w in self.matrices().items()}

    def check_rows(self, quantiser, state: dict) -> None:
        """Rows as the package quantises them must be those of our rule."""
        if self.rows_of is None:
            return
        x = torch.from_numpy(np.exp(3 * draw("sizes", 64, 3)).repeat(64, 1) * draw("rows", 64, 192)).float()
        x[0] = 0
        rule = self.rows | ({"step": state["input_scale"].item()} if self.rows["form"] == "static" else {})
        theirs = quantiser(x).to(torch.float64).numpy()
        difference = np.abs(quantised_rows(x.numpy(), rule) - theirs).max(axis=1) / np.maximum(np.abs(theirs).max(axis=1), 1e-30)
        if difference.max() > self.row_agreement:
            raise ValueError(f"{type(self).__name__}: rows differ by {difference.max():.3g}")

    row_agreement = 0.0

    def encoded(self, module, weight):
        return self.exported[module][0]

    def packaged(self, disk, module):
        return self.exported[module][1]

    def read(self, disk, module):
        stored, scale = disk[f"{module}.weight"], disk[f"{module}.weight_scale"]
        codes = codes_of(stored, self.bits, stored.shape[1] * 8 // self.bits)
        return self.table[codes] * spread(powers(scale), 32, codes.shape[1])


class MixtralQuark(Mixtral, Quark):
    hidden, inner, experts = 160, 96, 3


class Fp6E2M3(Quark):
    spec, bits, table = "FP6E2M3PerGroupSpec", 6, E2M3


class MixtralFp6E3M2(Mixtral, Quark):
    spec, bits, table = "FP6E3M2PerGroupSpec", 6, E3M2
    hidden, inner = 64, 96


class Int4(Quark):
    """Words as AWQ's, signed codes, scales [groups, rows]."""

    spec, spec_of = "Int4PerGroupSpec", {"ch_axis": 1, "group_size": 32, "symmetric": True}
    agreement = 2.0**-8
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])

    def unpacked(self, words: torch.Tensor) -> np.ndarray:
        codes = codes_of(words, 4, 8 * words.shape[1]).reshape(len(words), -1, 8)
        ordered = np.empty_like(codes)
        ordered[..., self.order] = codes
        ordered = ordered.reshape(len(words), -1)
        return np.where(ordered >= 8, ordered - 16, ordered) if self.spec == "Int4PerGroupSpec" else ordered

    def read(self, disk, module):
        state = self.part_of(disk, module)
        group = self.spec_of["group_size"]
        codes = self.unpacked(state["weight"])
        scales = np.repeat(state["weight_scale"].to(torch.float64).numpy(), group, axis=0)
        zeros = np.repeat(self.unpacked(state["weight_zero_point"]), group, axis=0)
        return ((codes - zeros) * scales).T


class Rows(Quark):
    """Rows in groups of 32 columns as weights are."""

    hidden, inner, experts = 64, 32, 3
    rows_of = {**Quark.spec_of, "is_dynamic": True}
    rows = {"form": "group", "width": 32, "codes": "e2m1", "scale": "even"}


class Fp6FloorRows(Mixtral, Rows):
    spec, bits, table = "FP6E3M2PerGroupSpec", 6, E3M2
    rows_of = {**Rows.rows_of, "scale_calculation_mode": "floor"}
    rows = {"form": "group", "width": 32, "codes": "e3m2", "scale": "floor"}


class Fp6CeilRows(Mixtral, Rows):
    spec, bits, table = "FP6E2M3PerGroupSpec", 6, E2M3
    spec_of = {**Rows.spec_of, "scale_calculation_mode": "ceil"}
    rows_of = {**spec_of, "is_dynamic": True}
    rows = {"form": "group", "width": 32, "codes": "e2m3", "scale": "ceil"}


INTEGERS = {"symmetric": True, "scale_type": "float", "round_method": "half_even"}


class Int8Token(Quark):
    """A scale a row of the matrix, zero points beside it. Rows have one each: of the package amax / 127.5, of engines amax / 127."""

    hidden, inner, experts = 72, 40, 3
    spec, spec_of = "Int8PerChannelSpec", {**INTEGERS, "ch_axis": 0, "is_dynamic": False}
    rows_of = {**INTEGERS, "ch_axis": 1, "is_dynamic": True}
    rows = {"form": "token", "codes": "int8"}
    agreement = 2.0**-8  # its weights are bf16

    def check_rows(self, quantiser, state):
        pass

    def read(self, disk, module):
        state = self.part_of(disk, module)
        codes, zeros = (state[name].to(torch.float64).numpy() for name in ("weight", "weight_zero_point"))
        return (codes - zeros.reshape(-1, 1)) * state["weight_scale"].to(torch.float64).numpy().reshape(-1, 1)


class MixtralInt8Static(Mixtral, Int8Token):
    """The package's scheme "int8": a scale a matrix, and a step of its rows."""

    spec, spec_of = "Int8PerTensorSpec", {**INTEGERS, "observer_method": "min_max", "is_dynamic": False}
    rows_of = spec_of
    rows = {"form": "static", "codes": "int8"}
    calibrates = True
    check_rows = Quark.check_rows


class MixtralUint8(Mixtral, Int8Token):
    """Unsigned, with zero points."""

    spec, spec_of = "Uint8PerChannelSpec", {**INTEGERS, "ch_axis": 0, "is_dynamic": False, "symmetric": False}
    rows_of, rows = None, {"form": "none"}


class ChannelInt4(Int4):
    """Words along the columns of a row."""

    hidden, inner, experts = 72, 40, 3
    spec, spec_of = "Int4PerChannelSpec", {**INTEGERS, "ch_axis": 0, "is_dynamic": False}

    def unpacked(self, words):
        codes = super().unpacked(words)
        return np.where(codes >= 8, codes - 16, codes)

    def read(self, disk, module):
        state = self.part_of(disk, module)
        zeros = self.unpacked(state["weight_zero_point"].reshape(1, -1)).reshape(-1, 1)
        return (self.unpacked(state["weight"]) - zeros) * state["weight_scale"].to(torch.float64).numpy().reshape(-1, 1)


class MixtralUint4(Mixtral, Int4):
    spec, spec_of = "Uint4PerGroupSpec", {"ch_axis": 1, "group_size": 128, "symmetric": False}
    hidden, inner, experts, top_k = 128, 256, 2, 1


CASES = {
    "qwen3_moe-quark-fp4": Quark,
    "mixtral-quark-fp4": MixtralQuark,
    "qwen3_moe-quark-fp6-e2m3": Fp6E2M3,
    "mixtral-quark-fp6-e3m2": MixtralFp6E3M2,
    "qwen3_moe-quark-int4": Int4,
    "mixtral-quark-uint4": MixtralUint4,
    "qwen3_moe-quark-fp4-rows": Rows,
    "mixtral-quark-fp6-e3m2-rows": Fp6FloorRows,
    "mixtral-quark-fp6-e2m3-rows-up": Fp6CeilRows,
    "qwen3_moe-quark-int8-token": Int8Token,
    "mixtral-quark-int8-static": MixtralInt8Static,
    "mixtral-quark-uint8": MixtralUint8,
    "qwen3_moe-quark-channel-int4": ChannelInt4,
}
