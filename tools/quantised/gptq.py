"""GPTQ: GPTQModel finds scales and zero points, packs the words and decodes them."""

import functools

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from quantised.bits import codes_of
from quantised.case import draw
from quantised.packaged import Mixtral, Packaged, linear


def package():
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT, QuantizeConfig
    from gptqmodel.quantization.quantizer import Quantizer
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module

    return locals()


class Gptq(Packaged):
    hidden, inner, experts, top_k = 96, 64, 4, 2
    bits, group, sym, ordered, v2 = 4, 32, True, False, False
    positive_groups = False  # some groups have the zero point 0, which v1 stores as -1

    @property
    def method(self):
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group,
            "desc_act": self.ordered,
            "sym": self.sym,
            "lm_head": False,
            "static_groups": False,
            "true_sequential": True,
            "checkpoint_format": "gptq_v2" if self.v2 else "gptq",
        }

    def matrices(self):
        found = super().matrices()
        if self.positive_groups:
            for weight in found.values():
                weight[::5, : self.group] = np.abs(weight[::5, : self.group])
        return found

    @functools.cached_property
    def quantize_config(self):
        names = package()
        return names["QuantizeConfig"](
            bits=self.bits, group_size=self.group, sym=self.sym, desc_act=self.ordered, offload_to_disk=False,
            format=names["FORMAT"].GPTQ_V2 if self.v2 else names["FORMAT"].GPTQ,
        )  # fmt: skip

    def empty(self, names, rows: int, cols: int):
        return names["TorchLinear"](
            bits=self.bits, group_size=self.group, sym=self.sym, desc_act=self.ordered, in_features=cols,
            out_features=rows, bias=False, format=names["FORMAT"].GPTQ_V2,
        )  # fmt: skip

    def groups(self, module: str, cols: int) -> np.ndarray:
        """The group of each column: in order, or as if columns were sorted by what they see."""
        width = cols if self.group == -1 else self.group
        order = np.argsort(draw(module + " order", cols)) if self.ordered else np.arange(cols)
        groups = np.empty(cols, np.int32)
        groups[order] = np.arange(cols) // width
        return groups

    def encoded(self, module, weight):
        names = package()
        rows, cols = weight.shape
        layer = linear(weight)
        groups = torch.from_numpy(self.groups(module, cols))
        found = []
        for group in range(int(groups.max()) + 1):
            quantizer = names["Quantizer"](self.quantize_config)
            quantizer.configure(perchannel=True)
            quantizer.find_params(layer.weight.data[:, groups == group], weight=True)
            found.append((quantizer.scale, quantizer.zero))
        scales = torch.cat([scale for scale, _ in found], dim=1).half().float()
        zeros = torch.cat([zero for _, zero in found], dim=1)
        packed = self.empty(names, rows, cols)
        packed.pack_block(layer, scales, zeros, groups)
        if not self.v2:
            names["convert_gptq_v2_to_v1_format_module"](packed, self.quantize_config)
        return {name: getattr(packed, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}

    def packaged(self, disk, module):
        names = package()
        state = self.part_of(disk, module)
        layer = self.empty(names, state["scales"].shape[1], state["g_idx"].shape[0])
        for name, tensor in state.items():
            layer.register_buffer(name, tensor.to(torch.float64) if name == "scales" else tensor.clone())
        if not self.v2:
            names["convert_gptq_v1_to_v2_format_module"](layer, self.bits, torch.int32)
        return layer.dequantize_weight().T

    def zeros(self, state: dict, rows: int) -> np.ndarray:
        if self.v2 or self.bits == 3:
            stored = codes_of(state["qzeros"], self.bits, rows)
            return stored if self.v2 else (stored + 1) % (1 << self.bits)
        # One was subtracted from each code of a word at once: a code 0 borrows from the next.
        ones = sum(1 << shift for shift in range(0, 32, self.bits))
        words = (state["qzeros"].numpy().view(np.uint32) + np.uint32(ones)).view(np.int32)
        return codes_of(torch.from_numpy(words), self.bits, rows)

    def read(self, disk, module):
        state = self.part_of(disk, module)
        groups, rows = state["g_idx"].numpy(), state["scales"].shape[1]
        codes = codes_of(state["qweight"].T, self.bits, len(groups))
        scales = state["scales"].to(torch.float64).numpy()
        return (codes - self.zeros(state, rows)[groups].T) * scales[groups].T


class GptqGroup128(Mixtral, Gptq):
    hidden, inner, experts, top_k = 160, 96, 3, 2
    group, sym, positive_groups = 128, False, True


class GptqV2(Gptq):
    hidden, inner = 64, 96
    sym, v2, positive_groups = False, True, True


class GptqInt8(Mixtral, Gptq):
    bits = 8


class GptqInt8Asymmetric(Gptq):
    hidden, inner = 64, 96
    bits, sym, positive_groups = 8, False, True


class GptqInt2(Gptq):
    bits, sym, positive_groups = 2, False, True


class GptqInt2Group128(Mixtral, Gptq):
    hidden, inner, experts, top_k = 160, 96, 3, 2
    bits, group = 2, 128


class GptqInt3(Mixtral, Gptq):
    bits, sym, positive_groups = 3, False, True


class GptqInt3Channel(Gptq):
    hidden, inner = 64, 96
    bits, group = 3, -1


class GptqChannel(Gptq):
    hidden, inner = 160, 96
    group = -1


class GptqOrdered(Gptq):
    ordered = True


class GptqOrderedAsymmetric(Mixtral, Gptq):
    hidden, inner, experts, top_k = 160, 96, 3, 2
    group, ordered, sym = 128, True, False


class Dequantised(Gptq):
    """Small, with the weights as the package decodes them beside the model."""

    hidden, inner, experts = 64, 32, 2
    sym, positive_groups = False, True

    def make(self, folder):
        super().make(folder)
        disk = load_file(folder / "model.safetensors")
        modules = sorted({name.removesuffix(".qweight") for name in disk if name.endswith(".qweight")})
        values = {name: self.packaged(disk, name).to(torch.float32).contiguous() for name in modules}
        save_file(values, folder / "dequantised.safetensors")


class GptqInt2Ordered(Dequantised):
    bits, ordered = 2, True


class GptqInt3Ordered(Dequantised):
    bits, ordered = 3, True


class GptqInt8Ordered(Dequantised):
    bits, ordered = 8, True


class GptqV2Int2(Dequantised):
    bits, v2 = 2, True


class GptqV2Int3(Dequantised):
    bits, v2 = 3, True


class GptqV2Int3Ordered(Dequantised):
    bits, v2, ordered = 3, True, True


class GptqV2Int4Ordered(Dequantised):
    bits, v2, ordered = 4, True, True


CASES = {
    "qwen3_moe-gptq-int2-order": GptqInt2Ordered,
    "qwen3_moe-gptq-int3-order": GptqInt3Ordered,
    "qwen3_moe-gptq-int8-order": GptqInt8Ordered,
    "qwen3_moe-gptq-v2-int2": GptqV2Int2,
    "qwen3_moe-gptq-v2-int3": GptqV2Int3,
    "qwen3_moe-gptq-v2-int3-order": GptqV2Int3Ordered,
    "qwen3_moe-gptq-v2-int4-order": GptqV2Int4Ordered,
    "qwen3_moe-gptq-int4-group32": Gptq,
    "mixtral-gptq-int4-group128-asymmetric": GptqGroup128,
    "qwen3_moe-gptq-v2-int4": GptqV2,
    "qwen3_moe-gptq-int4-channel": GptqChannel,
    "qwen3_moe-gptq-int4-order": GptqOrdered,
    "mixtral-gptq-int4-order": GptqOrderedAsymmetric,
    "mixtral-gptq-int8": GptqInt8,
    "qwen3_moe-gptq-int8-asymmetric": GptqInt8Asymmetric,
    "qwen3_moe-gptq-int2": GptqInt2,
    "mixtral-gptq-int2-group128": GptqInt2Group128,
    "mixtral-gptq-int3": GptqInt3,
    "qwen3_moe-gptq-int3-channel": GptqInt3Channel,
}
