"""compressed-tensors with zero points, an order of columns, small floats: written and decoded by the package."""

import numpy as np
import torch

from quantised.arithmetic import decode, quantised_rows
from quantised.bits import E2M1, codes_of, powers, spread
from quantised.case import LAYER, draw
from quantised.compressed import CompressedTensors
from quantised.packaged import Mixtral, Packaged


class Codes(CompressedTensors, Packaged):
    """The package also finds the scales."""

    hidden, inner, experts, top_k = 96, 64, 4, 2
    activations = None

    def arguments(self):
        from compressed_tensors.quantization import QuantizationArgs

        return QuantizationArgs(**self.codes, strategy=self.strategy)

    def groups(self, module: torch.nn.Module) -> torch.Tensor:
        weight = module.weight.detach().float()
        return weight.reshape(len(weight), -1, self.codes.get("group_size", weight.shape[1]))

    def calibrate(self, module):
        from compressed_tensors.quantization.utils import calculate_qparams

        parts = self.groups(module)
        scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), self.arguments())
        module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))

    def widened(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return state | {"weight_scale": state["weight_scale"].to(torch.float64)}

    def decompressed(self, state: dict[str, torch.Tensor]) -> torch.Tensor:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationScheme

        scheme = QuantizationScheme(targets=["Linear"], weights=self.arguments())
        return BaseCompressor.get_value_from_registry(self.format).decompress(state, scheme)["weight"]

    def packaged(self, disk, module):
        return self.decompressed(self.widened(self.part_of(disk, module)))


class PackedAsymmetric(Codes):
    """Zero points in words along the rows of the matrix."""

    codes = {"num_bits": 4, "type": "int", "symmetric": False, "group_size": 32}
    strategy, format = "group", "pack-quantized"

    def read(self, disk, module):
        state = self.part_of(disk, module)
        bits = self.codes["num_bits"]
        rows, cols = state["weight_shape"].tolist()
        scales = state["weight_scale"].to(torch.float64).numpy()
        zeros = np.full((rows, scales.shape[1]), 1 << (bits - 1))
        if "weight_zero_point" in state:
            zeros = codes_of(state["weight_zero_point"].T, bits, rows).T
        groups = state["weight_g_idx"].numpy() if "weight_g_idx" in state else np.arange(cols) * scales.shape[1] // cols
        return (codes_of(state["weight_packed"], bits, cols) - zeros[:, groups]) * scales[:, groups]


class PackedAsymmetricOdd(Mixtral, PackedAsymmetric):
    """Rows and columns that fill no whole word of zero points."""

    hidden, inner, experts = 72, 40, 4
    codes = PackedAsymmetric.codes | {"group_size": 8}


class PackedChannel(Mixtral, PackedAsymmetric):
    codes, strategy = {"num_bits": 8, "type": "int", "symmetric": True}, "channel"
    hidden, inner = 72, 40


class PackedInt8Asymmetric(PackedAsymmetric):
    codes = PackedAsymmetric.codes | {"num_bits": 8, "group_size": 16}
    hidden, inner = 80, 48


class Ordered(PackedAsymmetric):
    """The file has the columns in another order than the package, and the group of each.

    Earlier versions of the package wrote that order; here it writes the codes, and the tool moves them.
    """

    def files(self):
        described = super().files()
        for group in described["config.json"]["quantization_config"]["config_groups"].values():
            group["weights"]["actorder"] = "group"
        return described

    def order(self, module: str, columns: int) -> np.ndarray:
        return np.argsort(draw(module + " order", columns))

    def tensors(self):
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

        written = super().tensors()
        bits = self.codes["num_bits"]
        for module in self.matrices():
            shape = torch.Size(written[f"{module}.weight_shape"].tolist())
            order = self.order(module, shape[1])
            codes = unpack_from_int32(written[f"{module}.weight_packed"], bits, shape)
            written[f"{module}.weight_packed"] = pack_to_int32(codes[:, order].contiguous(), bits)
            written[f"{module}.weight_g_idx"] = torch.from_numpy(order // self.codes["group_size"]).to(torch.int32)
        return written

    def packaged(self, disk, module):
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

        state = self.widened(self.part_of(disk, module))
        bits, shape = self.codes["num_bits"], torch.Size(state["weight_shape"].tolist())
        order = self.order(module, shape[1])
        codes = unpack_from_int32(state["weight_packed"], bits, shape)[:, np.argsort(order)].contiguous()
        return self.decompressed(state | {"weight_packed": pack_to_int32(codes, bits)})[:, order]


class OrderedSymmetric(Mixtral, Ordered):
    codes = Ordered.codes | {"symmetric": True, "group_size": 16}
    hidden, inner = 80, 48


class Int8Asymmetric(Codes):
    codes, strategy, format = {"num_bits": 8, "type": "int", "symmetric": False}, "channel", "int-quantized"
    hidden, inner, experts = 72, 40, 6

    def read(self, disk, module):
        codes, zeros, scales = (
            disk[f"{module}.{name}"].to(torch.float64).numpy() for name in ("weight", "weight_zero_point", "weight_scale")
        )
        return (codes - zeros) * scales


class MixtralInt8Asymmetric(Mixtral, Int8Asymmetric):
    hidden, inner, experts = 96, 64, 3


class Mxfp4(Codes):
    codes = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 32, "scale_dtype": torch.uint8}
    strategy, format = "group", "mxfp4-pack-quantized"

    def widened(self, state):
        return state

    def read(self, disk, module):
        codes = codes_of(disk[f"{module}.weight_packed"], 4, 2 * disk[f"{module}.weight_packed"].shape[1])
        return E2M1[codes] * spread(powers(disk[f"{module}.weight_scale"]), 32, codes.shape[1])


class MixtralMxfp4(Mixtral, Mxfp4):
    hidden, inner, experts = 160, 96, 3


class Mxfp8(Codes):
    codes = Mxfp4.codes | {"num_bits": 8}
    strategy, format = "group", "mxfp8-quantized"

    def widened(self, state):
        return state

    def read(self, disk, module):
        codes = decode(disk[f"{module}.weight"])
        return codes * spread(powers(disk[f"{module}.weight_scale"]), 32, codes.shape[1])


class MixtralMxfp8(Mixtral, Mxfp8):
    hidden, inner, experts = 64, 96, 3


class Nvfp4(Codes):
    """The number of a matrix divides its scales."""

    codes = {
        "num_bits": 4, "type": "float", "symmetric": True, "group_size": 16, "scale_dtype": torch.float8_e4m3fn,
    }  # fmt: skip
    strategy, format = "tensor_group", "nvfp4-pack-quantized"
    agreement = 2.0**-22

    def calibrate(self, module):
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        parts = self.groups(module)
        divisor = generate_gparam(parts.amin(), parts.amax())
        scale, _ = calculate_qparams(parts.amin(-1), parts.amax(-1), self.arguments(), global_scale=divisor)
        module.weight_global_scale.data.copy_(divisor)
        module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))

    def packaged(self, disk, module):
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        state = self.part_of(disk, module)
        rows, half = state["weight_packed"].shape
        return dequantize(
            x_q=unpack_fp4_from_uint8(state["weight_packed"], rows, 2 * half, dtype=torch.float32),
            scale=state["weight_scale"].float(), args=self.arguments(), global_scale=state["weight_global_scale"],
            dtype=torch.float32,
        )  # fmt: skip

    def read(self, disk, module):
        codes = codes_of(disk[f"{module}.weight_packed"], 4, 2 * disk[f"{module}.weight_packed"].shape[1])
        scales = spread(decode(disk[f"{module}.weight_scale"]), 16, codes.shape[1])
        return E2M1[codes] * scales / disk[f"{module}.weight_global_scale"].to(torch.float64).numpy()


class MixtralNvfp4(Mixtral, Nvfp4):
    hidden, inner, experts = 80, 48, 4


class RowsOfPackage(Codes):
    """Rows are codes too; what products read of them must be what the package makes of them."""

    def row_arguments(self):
        from compressed_tensors.quantization import QuantizationArgs

        return QuantizationArgs(**self.codes, **self.activations)

    def packaged_rows(self, x: torch.Tensor, divisor: torch.Tensor | None) -> torch.Tensor:
        from compressed_tensors.quantization import fake_quantize
        from compressed_tensors.quantization.utils import calculate_qparams

        arguments = self.row_arguments()
        parts = x.reshape(len(x), -1, arguments.group_size)
        scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), arguments, global_scale=divisor)
        return fake_quantize(x, scale, zero, arguments, global_scale=divisor)

    def golden(self, disk):
        for seed, rules in enumerate(self.rules(disk)):
            x = torch.from_numpy(np.exp(3 * draw(f"sizes {seed}", 64, 3)).repeat(64, 1) * draw(f"rows {seed}", 64, 192)).float()
            x[0] = 0
            step = rules.get("step")
            ours = quantised_rows(x.numpy(), rules)
            theirs = self.packaged_rows(x, None if step is None else torch.tensor([1 / step], dtype=torch.float32))
            self.row_difference = np.abs(ours - theirs.to(torch.float64).numpy()).max() / np.abs(ours).max()
            if self.row_difference > self.row_agreement:
                raise ValueError(f"{type(self).__name__}: rows differ by {self.row_difference:.3g}")
        return super().golden(disk)

    row_agreement = 0.0


class Mxfp4Rows(RowsOfPackage, Mxfp4):
    activations = {"dynamic": True, "strategy": "group"}
    rows = {"form": "group", "width": 32, "codes": "e2m1", "scale": "even"}


class Mxfp8Rows(RowsOfPackage, Mxfp8):
    activations = {"dynamic": True, "strategy": "group"}
    rows = {"form": "group", "width": 32, "scale": "half"}


class Nvfp4Rows(RowsOfPackage, Nvfp4):
    """The number of the rows divides their scales, too; a power of two, so that its inverse is exact."""

    activations = {"dynamic": "local", "strategy": "tensor_group"}
    rows = {"form": "group", "width": 16, "codes": "e2m1", "scale": "two_level"}

    def calibrate(self, module):
        super().calibrate(module)
        module.input_global_scale.data.fill_(2.0 ** (8 + round(module.weight.abs().max().item() * 64) % 2))

    def steps(self, disk):
        of = lambda leaf: min(
            disk[f"{LAYER}{self.experts_at}.{e}.{leaf}.input_global_scale"].item() for e in range(self.experts)
        )
        return 1 / min(of(self.leaves["gate"]), of(self.leaves["up"])), 1 / of(self.leaves["down"])


class Int8AsymmetricToken(MixtralInt8Asymmetric):
    """Rows of int8 by token beside zero points."""

    activations = {"symmetric": True, "dynamic": True, "strategy": "token"}
    rows = {"form": "token", "codes": "int8"}


CASES = {
    "qwen3_moe-compressed-int4-asymmetric": PackedAsymmetric,
    "mixtral-compressed-int4-asymmetric-group8": PackedAsymmetricOdd,
    "mixtral-compressed-packed-int8-channel": PackedChannel,
    "qwen3_moe-compressed-packed-int8-asymmetric": PackedInt8Asymmetric,
    "qwen3_moe-compressed-int4-order": Ordered,
    "mixtral-compressed-int4-order": OrderedSymmetric,
    "qwen3_moe-compressed-int8-asymmetric": Int8Asymmetric,
    "mixtral-compressed-int8-asymmetric": MixtralInt8Asymmetric,
    "mixtral-compressed-int8-asymmetric-token": Int8AsymmetricToken,
    "qwen3_moe-compressed-mxfp4": Mxfp4,
    "mixtral-compressed-mxfp4": MixtralMxfp4,
    "qwen3_moe-compressed-mxfp8": Mxfp8,
    "mixtral-compressed-mxfp8": MixtralMxfp8,
    "qwen3_moe-compressed-nvfp4": Nvfp4,
    "mixtral-compressed-nvfp4": MixtralNvfp4,
    "qwen3_moe-compressed-mxfp4-rows": Mxfp4Rows,
    "qwen3_moe-compressed-mxfp8-rows": Mxfp8Rows,
    "qwen3_moe-compressed-nvfp4-rows": Nvfp4Rows,
}
