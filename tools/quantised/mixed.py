"""Modules with schemes of their own: written by compressed-tensors as several groups, or left as they are."""

import re

import torch

from quantised.case import qwen3
from quantised.compressed import CompressedTensors
from quantised.compressed_codes import Int8Asymmetric, Mxfp4, Nvfp4, PackedAsymmetric
from quantised.fp8 import SharedPlain
from quantised.packaged import Mixtral, Packaged


class Int4(PackedAsymmetric):
    codes = PackedAsymmetric.codes | {"symmetric": True}


class Int8Channel(PackedAsymmetric):
    codes, strategy = {"num_bits": 8, "type": "int", "symmetric": True}, "channel"


class Float8Channel(Int8Asymmetric):
    codes, format = {"num_bits": 8, "type": "float", "symmetric": True}, "float-quantized"

    def read(self, disk, module):
        return disk[f"{module}.weight"].to(torch.float64).numpy() * disk[f"{module}.weight_scale"].to(torch.float64).numpy()


class Mixed(CompressedTensors, Packaged):
    """Each group is a class of ours and the expression of its modules."""

    hidden, inner, experts, top_k = 96, 64, 4, 2
    groups: list[tuple[type, str]]

    def kind(self, module: str):
        for kind, expression in self.groups:
            if re.match(expression, module):
                return kind()
        return None

    def compressed(self):
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config

        schemes = {
            f"group_{i}": QuantizationScheme(targets=[f"re:{expression}"], weights=kind().arguments(), format=kind.format)
            for i, (kind, expression) in enumerate(self.groups)
        }
        model = self.tree()
        config = QuantizationConfig(
            config_groups=schemes, ignore=self.ignore, quantization_status="initialized", format="mixed-precision"
        )
        apply_quantization_config(model, config)
        for name, module in model.named_modules():
            if hasattr(module, "weight_scale"):
                self.kind(name).calibrate(module)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        return model, compressor

    def read(self, disk, module):
        kind = self.kind(module)
        return kind.read(disk, module) if kind else disk[f"{module}.weight"].to(torch.float64).numpy()

    def packaged(self, disk, module):
        kind = self.kind(module)
        return kind.packaged(disk, module) if kind else disk[f"{module}.weight"]


class MixedDown(Mixed):
    """Gate and up in int4, down in int8."""

    groups = [(Int4, ".*[.](gate|up)_proj$"), (Int8Channel, ".*down_proj$")]


class MixedFloats(Mixtral, Mixed):
    """Small floats of gate and up beside e4m3 of down."""

    experts, top_k = 3, 1
    groups = [(Mxfp4, ".*[.]w[13]$"), (Float8Channel, ".*[.]w2$")]


class MixedExperts(Mixed):
    """Every expert in a form of its own, one of them plain."""

    groups = [
        (PackedAsymmetric, ".*experts[.]0[.].*"), (Float8Channel, ".*experts[.]1[.].*"), (Nvfp4, ".*experts[.]2[.].*"),
    ]  # fmt: skip
    agreement = 2.0**-22


class MixedShared(SharedPlain, Mixed):
    """Shared experts in codes of another type than the routed ones."""

    hidden, inner, experts, top_k = 64, 32, 5, 2
    groups = [(Int4, ".*[.]experts[.].*"), (Float8Channel, ".*shared_expert[.].*")]
    ignore = ["re:.*gate$"]

    @property
    def config(self):
        config = qwen3(type(self), shared_expert_intermediate_size=self.shared_inner)
        return config | {"model_type": "qwen2_moe"}


CASES = {
    "qwen3_moe-mixed-int4-int8-down": MixedDown,
    "mixtral-mixed-mxfp4-fp8-down": MixedFloats,
    "qwen3_moe-mixed-experts": MixedExperts,
    "qwen2_moe-mixed-shared": MixedShared,
}
