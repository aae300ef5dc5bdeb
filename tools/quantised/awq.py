"""AWQ: AutoAWQ packs the words and decodes those of its gemm layout."""

import numpy as np
import torch

from quantised.bits import codes_of
from quantised.packaged import Mixtral, Packaged, linear, without_start

# The column of eight that each half byte of a word holds.
GEMM_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])


class Awq(Packaged):
    """The gemm layout: words of eight rows of the matrix, whose columns lie in the tensor's rows."""

    hidden, inner, experts, top_k = 96, 64, 4, 2
    group, zero_point, version = 32, True, "gemm"

    @property
    def method(self):
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": self.group,
            "zero_point": self.zero_point,
            "version": self.version,
            "modules_to_not_convert": ["gate"],
        }

    def parameters(self, weight: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zero points of groups [rows, groups]."""
        parts = weight.reshape(len(weight), -1, self.group)
        if not self.zero_point:
            scales = np.abs(parts).max(-1) / 7
            return torch.from_numpy(scales).half().float(), torch.full(scales.shape, 8.0)
        low, high = np.minimum(parts.min(-1), 0), np.maximum(parts.max(-1), 0)
        scales = ((high - low) / 15).astype(np.float16)
        return torch.from_numpy(scales).float(), torch.from_numpy(np.clip(np.rint(-low / scales), 0, 15)).float()

    def layer(self):
        without_start("awq")
        from awq.modules.linear.gemm import WQLinear_GEMM

        return WQLinear_GEMM

    def arranged(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.T.contiguous()

    def encoded(self, module, weight):
        scales, zeros = map(self.arranged, self.parameters(weight))
        packed = self.layer().from_linear(linear(self.within(weight)), 4, self.group, scales=scales, zeros=zeros)
        return {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}

    def within(self, weight: np.ndarray) -> np.ndarray:
        """The package rounds codes without a limit: values that have one, so that none spills over."""
        scales, zeros = (np.repeat(p.numpy(), self.group, axis=1) for p in self.parameters(weight))
        return np.clip(weight, -zeros * scales, (15 - zeros) * scales)

    def packaged(self, disk, module):
        without_start("awq")
        from awq.utils.packing_utils import dequantize_gemm

        state = self.part_of(disk, module)
        scales = state["scales"].to(torch.float64)
        return dequantize_gemm(state["qweight"], state["qzeros"], scales, 4, self.group).T

    def unpacked(self, words: torch.Tensor, columns: int) -> np.ndarray:
        codes = codes_of(words, 4, columns).reshape(len(words), -1, 8)
        ordered = np.empty_like(codes)
        ordered[..., GEMM_ORDER] = codes
        return ordered.reshape(len(words), columns)

    def read(self, disk, module):
        state = self.part_of(disk, module)
        rows = state["scales"].shape[1]
        wide = lambda parameter: np.repeat(parameter, self.group, axis=0)
        zeros, scales = wide(self.unpacked(state["qzeros"], rows)), wide(state["scales"].to(torch.float64).numpy())
        return ((self.unpacked(state["qweight"], rows) - zeros) * scales).T


class AwqGroup128(Mixtral, Awq):
    hidden, inner, experts, top_k = 128, 256, 2, 1
    group = 128


class AwqSymmetric(Mixtral, Awq):
    """Every zero point is 8."""

    hidden, inner = 64, 96
    zero_point = False


class AwqGemv(Awq):
    """Words of eight columns in their order; zero points and scales are padded to whole words."""

    version = "gemv"

    def layer(self):
        without_start("awq")
        from awq.modules.linear.gemv import WQLinear_GEMV

        return WQLinear_GEMV

    def arranged(self, parameter):
        return parameter.contiguous()

    def packaged(self, disk, module):
        # The package decodes this layout on a GPU only: what it was given, in the nearest codes.
        scales, zeros = self.parameters(self.matrices()[module])
        wide = lambda parameter: parameter.to(torch.float64).repeat_interleave(self.group, dim=1)
        weight = torch.from_numpy(self.within(self.matrices()[module])).float()
        codes = torch.round((weight + wide(zeros * scales).float()) / wide(scales).float())
        return (codes - wide(zeros)) * wide(scales)

    def read(self, disk, module):
        state = self.part_of(disk, module)
        columns = state["qweight"].shape[1] * 8
        wide = lambda parameter: np.repeat(parameter[:, : columns // self.group], self.group, axis=1)
        zeros = wide(codes_of(state["qzeros"], 4, columns // self.group))
        scales = wide(state["scales"].to(torch.float64).numpy())
        return (codes_of(state["qweight"], 4, columns) - zeros) * scales


class AwqGemvGroup128(Mixtral, AwqGemv):
    hidden, inner, experts, top_k = 128, 256, 2, 1
    group = 128


CASES = {
    "qwen3_moe-awq-group32": Awq,
    "mixtral-awq-group128": AwqGroup128,
    "mixtral-awq-symmetric": AwqSymmetric,
    "qwen3_moe-awq-gemv": AwqGemv,
    "mixtral-awq-gemv-group128": AwqGemvGroup128,
}
