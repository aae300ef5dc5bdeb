"""NVIDIA ModelOpt's small codes: its export functions pack them, its tensor classes decode them."""

import copy
import functools

import numpy as np
import torch
from torch import nn

from quantised.arithmetic import decode, quantised_rows, silu
from quantised.bits import E2M1, codes_of, powers, spread
from quantised.case import LAYER, draw, mixtral
from quantised.packaged import Mixtral, Packaged, linear


def bf16(weight: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(weight).to(torch.bfloat16)


class Exported(Packaged):
    """Described in config.json; Listed has hf_quant_config.json as well."""

    hidden, inner, experts, top_k = 96, 64, 4, 2
    algorithm: str
    exclude = ["lm_head", "*.mlp.gate"]
    group: int
    more: dict = {}

    @property
    def method(self):
        return {
            "quant_method": "modelopt",
            "quant_algo": self.algorithm,
            "producer": {"name": "modelopt", "version": "0.47.0"},
            "ignore": self.exclude,
            "config_groups": {"group_0": {"targets": ["Linear"], **self.groups_described()}},
        }

    def groups_described(self) -> dict:
        return {"weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": self.group}}


class Listed(Mixtral, Exported):
    """Described by hf_quant_config.json alone."""

    exclude = ["lm_head", "*block_sparse_moe.gate"]

    @property
    def config(self):
        return mixtral(type(self))

    def files(self):
        described = {
            "producer": {"name": "modelopt", "version": "0.47.0"},
            "quantization": {
                "quant_algo": self.algorithm,
                "kv_cache_quant_algo": None,
                "group_size": self.group,
                "exclude_modules": self.exclude,
                **self.more,
            },
        }
        return {"config.json": self.config, "hf_quant_config.json": described}


class Nvfp4(Exported):
    """A number of the matrix multiplies its scales; gate and up share it."""

    algorithm, group = "NVFP4", 16
    rows = {"form": "group", "width": 16, "codes": "e2m1", "scale": "two_level"}
    agreement = 2.0**-22

    def of_matrix(self, module: str) -> torch.Tensor:
        from modelopt.torch.quantization.qtensor import NVFP4QTensor

        place, leaf = module.rsplit(".", 1)
        sharing = [self.leaves["gate"], self.leaves["up"]]
        weights = self.matrices()
        found = [bf16(weights[f"{place}.{name}"]) for name in (sharing if leaf in sharing else [leaf])]
        return torch.stack([NVFP4QTensor.get_weights_scaling_factor_2(weight) for weight in found]).max()

    def encoded(self, module, weight):
        from modelopt.torch.export.quant_utils import to_quantized_weight
        from modelopt.torch.quantization.qtensor import NVFP4QTensor

        whole = self.of_matrix(module)
        scale, _ = NVFP4QTensor.get_weights_scaling_factor(bf16(weight), self.group, whole)
        packed = to_quantized_weight(bf16(weight), scale, "nvfp4", whole, self.group)
        step = torch.tensor((3 + abs(draw(module + " step", 1)[0])) / (6 * 448), dtype=torch.float32)
        return {"weight": packed, "weight_scale": scale, "weight_scale_2": whole, "input_scale": step}

    def packaged(self, disk, module):
        from modelopt.torch.quantization.qtensor import NVFP4QTensor

        state = self.part_of(disk, module)
        rows, half = state["weight"].shape
        return NVFP4QTensor((rows, 2 * half), torch.float32, state["weight"]).dequantize(
            torch.float32, scale=state["weight_scale"], double_scale=state["weight_scale_2"], block_sizes={-1: self.group}
        )

    def read(self, disk, module):
        codes = codes_of(disk[f"{module}.weight"], 4, 2 * disk[f"{module}.weight"].shape[1])
        scales = spread(decode(disk[f"{module}.weight_scale"]), self.group, codes.shape[1])
        return E2M1[codes] * scales * disk[f"{module}.weight_scale_2"].item()


class MixtralNvfp4(Listed, Nvfp4):
    hidden, inner = 80, 48


class Mxfp8(Exported):
    algorithm, group = "MXFP8", 32
    rows = {"form": "group", "width": 32, "power_of_two": True}

    def groups_described(self):
        return {"weights": {"dynamic": False, "num_bits": 8, "type": "float", "group_size": 32, "scale_dtype": "uint8"}}

    def encoded(self, module, weight):
        from modelopt.torch.export.quant_utils import to_quantized_weight
        from modelopt.torch.quantization.qtensor import MXFP8QTensor

        scale = MXFP8QTensor.get_weights_scaling_factor(bf16(weight))
        return {"weight": to_quantized_weight(bf16(weight), scale, "mxfp8"), "weight_scale": scale}

    def packaged(self, disk, module):
        from modelopt.torch.quantization.qtensor import MXFP8QTensor

        codes = disk[f"{module}.weight"]
        return MXFP8QTensor(codes.shape, torch.float32, codes).dequantize(scale=disk[f"{module}.weight_scale"])

    def read(self, disk, module):
        codes = decode(disk[f"{module}.weight"])
        return codes * spread(powers(disk[f"{module}.weight_scale"]), 32, codes.shape[1])


class MixtralMxfp8(Listed, Mxfp8):
    hidden, inner, experts = 64, 160, 3


class Awq(Exported):
    """Two rows of the matrix in a byte; columns of the input have factors, which are part of the weight."""

    algorithm, group = "W4A16_AWQ", 32
    more = {"has_zero_point": False, "pre_quant_scale": True}

    def groups_described(self):
        return {"weights": {"dynamic": False, "num_bits": 4, "type": "int", "group_size": self.group}}

    def encoded(self, module, weight):
        from modelopt.torch.export.quant_utils import get_scaling_factor_from_weight, to_quantized_weight

        # The factors belong to the input that gate and up share.
        place, leaf = module.rsplit(".", 1)
        shared = place if leaf != self.leaves["down"] else module
        factors = torch.from_numpy(np.exp(0.2 * draw(shared + " factors", weight.shape[1]))).to(torch.bfloat16)
        scaled = torch.from_numpy(weight / factors.to(torch.float64).numpy()).float()
        scale = get_scaling_factor_from_weight(scaled, self.group).float()
        packed = to_quantized_weight(scaled, scale, "int4_awq", block_size=self.group)
        return {"weight": packed, "weight_scale": scale, "pre_quant_scale": factors}

    def codes(self, packed: torch.Tensor) -> np.ndarray:
        pairs = packed.numpy()
        codes = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(2 * len(pairs), -1).astype(np.int64)
        return np.where(codes >= 8, codes - 16, codes)

    def packaged(self, disk, module):
        from modelopt.torch.export.quant_utils import to_quantized_weight

        # The package decodes none: the values of our codes, packed by it, must be the bytes of the file.
        state = self.part_of(disk, module)
        scale = state["weight_scale"]
        values = torch.from_numpy(self.codes(state["weight"])) * scale.repeat_interleave(self.group, dim=1)
        again = to_quantized_weight(values, scale, "int4_awq", block_size=self.group)
        if not torch.equal(again, state["weight"]):
            raise ValueError(f"{module}: not the bytes that the package packs")
        return torch.from_numpy(self.read(disk, module))

    def read(self, disk, module):
        codes = self.codes(disk[f"{module}.weight"])
        scales = spread(disk[f"{module}.weight_scale"].to(torch.float64).numpy(), self.group, codes.shape[1])
        return codes * scales * disk[f"{module}.pre_quant_scale"].to(torch.float64).numpy()


class MixtralAwq(Listed, Awq):
    hidden, inner, experts, top_k = 256, 128, 2, 1
    group = 128


class MixtralAwqRows(MixtralAwq):
    """Rows are quantised to e4m3 by one step, after their columns were multiplied."""

    hidden, inner, experts, top_k = 128, 64, 3, 2
    group = 64
    algorithm = "W4A8_AWQ"
    rows = {"form": "static"}

    def encoded(self, module, weight):
        written = super().encoded(module, weight)
        step = (6 + abs(draw(module + " step", 1)[0])) / 448
        second = written["weight_scale"].max() * 7 / 448
        return written | {"input_scale": torch.tensor(step, dtype=torch.float32), "weight_scale_2": second}

    def matrix_and_factors(self, disk, module):
        codes = self.codes(disk[f"{module}.weight"])
        scales = spread(disk[f"{module}.weight_scale"].to(torch.float64).numpy(), self.group, codes.shape[1])
        return codes * scales, disk[f"{module}.pre_quant_scale"].to(torch.float64).numpy()

    def mlp(self, disk, number, x):
        place = f"{LAYER}{self.experts_at}.{number}"
        (gate, factors), (up, _), (down, inner_factors) = (
            self.matrix_and_factors(disk, f"{place}.{self.leaves[part]}") for part in ("gate", "up", "down")
        )
        rows, inner_rows = self.rules(disk)
        seen = quantised_rows(x * factors, rows)
        h = silu(seen @ gate.T) * (seen @ up.T)
        return quantised_rows(h * inner_factors, inner_rows) @ down.T


class Calibrated(MixtralAwqRows):
    """The package's W4A8_AWQ_BETA_CFG: factors and steps are those that it finds and smooths over experts."""

    hidden, inner, experts, top_k = 128, 64, 2, 1
    group = 64

    @functools.cached_property
    def exported(self) -> dict[str, dict[str, torch.Tensor]]:
        """Tensors of all matrices."""
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export.quant_utils import postprocess_state_dict, preprocess_linear_fusion
        from modelopt.torch.export.unified_export_hf import _export_quantized_weight

        config = copy.deepcopy(mtq.W4A8_AWQ_BETA_CFG)
        for entry in config["quant_cfg"]:
            if entry["quantizer_name"] == "*weight_quantizer":
                entry["cfg"][0]["block_sizes"][-1] = self.group
        weights = self.matrices()
        model = nn.ModuleDict({name.replace(".", "/"): linear(w, torch.bfloat16) for name, w in weights.items()})
        model.forward = lambda: [model[n.replace(".", "/")](self.seen(n, w.shape[1])) for n, w in weights.items()]
        mtq.quantize(model, config, lambda module: module())
        modules = {name: model[name.replace(".", "/")] for name in weights}
        for leaves in ([self.leaves["gate"], self.leaves["up"]], [self.leaves["down"]]):
            alike = [module for name, module in modules.items() if name.rsplit(".", 1)[1] in leaves]
            preprocess_linear_fusion(alike, resmooth_only=True)
        found = {}
        for name, module in modules.items():
            rows = module.input_quantizer(self.seen(name, weights[name].shape[1]).float())
            _export_quantized_weight(module, torch.bfloat16)
            found[name] = postprocess_state_dict(module.state_dict(), 448.0, None)
            self.check_rows(name, found[name], rows)
        return found

    def seen(self, module: str, columns: int) -> torch.Tensor:
        """Rows that a matrix reads, some columns larger than others; gate and up of all experts read the same."""
        source = "inner" if module.endswith(self.leaves["down"]) else "hidden"
        sizes = np.exp(draw(f"{source} column sizes", 1, columns))
        return torch.from_numpy(sizes * draw(f"{source} rows", 64, columns)).bfloat16()

    def check_rows(self, module: str, state: dict, theirs: torch.Tensor) -> None:
        """Rows as the package quantises them must be those of our rule."""
        factors = state["pre_quant_scale"].float()
        x = (self.seen(module, len(factors)).float() * factors).numpy()
        ours = quantised_rows(x, {"form": "static", "step": state["input_scale"].item()})
        difference = np.abs(ours - theirs.detach().to(torch.float64).numpy()).max() / np.abs(ours).max()
        if difference > 2.0**-22:  # it multiplies by the inverse of the step
            raise ValueError(f"{module}: rows differ by {difference:.3g}")

    def encoded(self, module, weight):
        return self.exported[module]


CASES = {
    "qwen3_moe-modelopt-nvfp4": Nvfp4,
    "mixtral-modelopt-nvfp4": MixtralNvfp4,
    "qwen3_moe-modelopt-mxfp8": Mxfp8,
    "mixtral-modelopt-mxfp8": MixtralMxfp8,
    "qwen3_moe-modelopt-awq": Awq,
    "mixtral-modelopt-awq-group128": MixtralAwq,
    "mixtral-modelopt-awq-rows": MixtralAwqRows,
    "mixtral-modelopt-awq-rows-calibrated": Calibrated,
}
