"""AMD Quark: its quantiser finds scales, its export modules pack, its kernels decode."""

import functools

import numpy as np
import torch
from torch import nn

from quantised.bits import E2M1, E2M3, E3M2, codes_of, powers, spread
from quantised.packaged import Mixtral, Packaged, linear


class Quark(Packaged):
    """fp4: two columns in a byte, scales that are powers of two."""

    hidden, inner, experts, top_k = 96, 64, 4, 2
    spec, spec_of = "FP4PerGroupSpec", {
        "ch_axis": -1, "group_size": 32, "scale_format": "e8m0", "scale_calculation_mode": "even", "is_dynamic": False,
    }  # fmt: skip
    bits, table = 4, E2M1

    @functools.cached_property
    def quark_config(self):
        from quark.torch.quantization.config import config

        spec = getattr(config, self.spec)(**self.spec_of).to_quantization_spec()
        return config.QConfig(global_quant_config=config.QLayerConfig(weight=spec), exclude=["*gate"])

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
        model.forward = lambda *inputs: inputs
        quantised = ModelQuantizer(self.quark_config).quantize_model(model, None)
        quantised = ModelQuantizer.freeze(quantised)
        found = {}
        for name in names:
            module = quantised[name.replace(".", "/")]
            export = QParamsLinear.from_module(module, "quark", "reorder")
            state = {key.replace("weight_quantizer.", "weight_"): t.clone() for key, t in export.state_dict().items()}
            found[name] = (state, export.weight_quantizer(export.weight.data).detach().float())
        return found

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
}
