"""compressed-tensors, written by that package."""

import json
import pathlib
import tempfile
import zlib

import torch
from torch import nn

from quantised.arithmetic import decode
from quantised.case import LAYER, W123, Case, mixtral, qwen3, scales_of
from quantised.fp8 import SharedPlain


class CompressedTensors(Case):
    """Written by the package itself from torch.nn.Linear modules."""

    codes = {"num_bits": 8, "type": "float", "symmetric": True}
    format: str | None = None  # None: as the package chooses
    strategy, activations = "channel", {"dynamic": True, "strategy": "token"}
    ignore = ["re:.*gate$"]

    def scale_name(self, module):
        return f"{module}.weight_scale"

    def tree(self) -> nn.Module:
        root = nn.Module()
        plain = {LAYER + self.router.removesuffix(".weight"): self.plain()[LAYER + self.router]}
        linears = plain | {n: torch.from_numpy(w).to(torch.bfloat16) for n, w in self.matrices().items()}
        for name, weight in linears.items():
            *path, leaf = name.split(".")
            at = root
            for part in path:
                if part not in at._modules:
                    at.add_module(part, nn.Module())
                at = at._modules[part]
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.bfloat16)
            linear.weight.data.copy_(weight)
            at.add_module(leaf, linear)
        return root

    def scales(self, module: nn.Module) -> torch.Tensor:
        shape = tuple(module.weight.shape)
        block = self.block or {"channel": (1, shape[1]), "tensor": shape}[self.strategy]
        return torch.from_numpy(scales_of(module.weight.detach().to(torch.float64).numpy(), block))

    def calibrate(self, module: nn.Module) -> None:
        module.weight_scale.data.copy_(self.scales(module).reshape(module.weight_scale.shape))

    def compressed(self):
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
        from compressed_tensors.quantization import apply_quantization_config

        blocks = {"block_structure": list(self.block)} if self.block else {}
        scheme = QuantizationScheme(
            targets=["Linear"],
            weights=QuantizationArgs(**self.codes, strategy=self.strategy, **blocks),
            input_activations=QuantizationArgs(**self.codes | self.activations) if self.activations else None,
            format=self.format,
        )
        model = self.tree()
        apply_quantization_config(
            model,
            QuantizationConfig(
                config_groups={"group_0": scheme}, ignore=self.ignore, quantization_status="initialized",
                format=self.format or "float-quantized",
            ),
        )
        for name, module in model.named_modules():
            if not hasattr(module, "weight_scale"):
                continue
            self.calibrate(module)
            if hasattr(module, "input_scale"):
                module.input_scale.data.fill_((3 + zlib.crc32(name.encode()) % 3) / 448)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        return model, compressor

    def tensors(self):
        return dict(self.compressed()[0].state_dict())

    def files(self):
        with tempfile.TemporaryDirectory() as scratch:
            path = pathlib.Path(scratch) / "config.json"
            path.write_text(json.dumps(self.config))
            self.compressed()[1].update_config(scratch)
            return {"config.json": json.loads(path.read_text())}


class MixtralChannel(CompressedTensors):
    experts_at, leaves, router = "block_sparse_moe.experts", W123, "block_sparse_moe.gate.weight"
    hidden, inner, experts, top_k = 72, 40, 6, 2
    rows = {"form": "token"}

    @property
    def config(self):
        return mixtral(type(self))


class QwenTensorStatic(CompressedTensors):
    hidden, inner, experts, top_k = 72, 40, 6, 3
    strategy, activations = "tensor", {"dynamic": False, "strategy": "tensor"}
    rows = {"form": "static"}

    @property
    def config(self):
        return qwen3(type(self))


class QwenBlockGroup(CompressedTensors):
    strategy, activations = "block", {"dynamic": True, "strategy": "group", "group_size": 128}
    block = (128, 128)
    rows = {"form": "group"}

    @property
    def config(self):
        return qwen3(type(self))


class QwenBlock64(QwenBlockGroup):
    """Smaller blocks, partial at both ends."""

    hidden, inner = 136, 72
    activations, block, rows = None, (64, 64), {"form": "none"}


class QwenBlock64Rows(QwenBlock64):
    activations, rows = {"dynamic": True, "strategy": "group", "group_size": 64}, {"form": "group", "width": 64}


class MixtralBlock32(MixtralChannel):
    strategy, activations = "block", None
    block, rows = (32, 32), {"form": "none"}


class QwenChannelWeightOnly(CompressedTensors):
    hidden, inner, experts, top_k = 72, 40, 6, 3
    activations = None

    @property
    def config(self):
        return qwen3(type(self))


def digest(tensor: torch.Tensor) -> int:
    """FNV-1a of the bytes, as a signed number."""
    value = 0xCBF29CE484222325
    for byte in tensor.contiguous().view(torch.uint8).numpy().tobytes():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value - 2**64 if value >= 2**63 else value


class Integers(CompressedTensors):
    """Integer codes, whose scales compressed-tensors finds and which it also decodes."""

    def arguments(self):
        from compressed_tensors.quantization import QuantizationArgs

        return QuantizationArgs(**self.codes, strategy=self.strategy)

    def scales(self, module):
        from compressed_tensors.quantization.utils import calculate_qparams

        weight = module.weight.detach()
        parts = weight.reshape(len(weight), -1, self.codes.get("group_size", weight.shape[1]))
        return calculate_qparams(parts.amin(-1), parts.amax(-1), self.arguments())[0]

    def is_quantised(self, disk, module):
        return self.scale_name(module) in disk

    def decompressed(self, disk: dict, module: str, to: torch.dtype) -> torch.Tensor:
        """What the package makes of a module if its scales have the type."""
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationScheme

        start = f"{module}."
        state = {name.removeprefix(start): tensor for name, tensor in disk.items() if name.startswith(start)}
        state["weight_scale"] = state["weight_scale"].to(to)
        scheme = QuantizationScheme(targets=["Linear"], weights=self.arguments())
        return BaseCompressor.get_value_from_registry(self.format).decompress(state, scheme)["weight"]

    def read(self, disk, module):
        if not self.is_quantised(disk, module):
            return decode(disk[f"{module}.weight"])
        return decode(self.decompressed(disk, module, torch.float64))

    def golden(self, disk):
        written = super().golden(disk)
        for part, leaf in self.leaves.items():
            modules = [f"{LAYER}{self.experts_at}.{e}.{leaf}" for e in range(self.experts)]
            digests = [digest(self.decompressed(disk, module, torch.bfloat16)) for module in modules]
            written[f"decompressed.{part}"] = torch.tensor(digests, dtype=torch.int64)
        return written


class QwenInt8Channel(Integers):
    codes, format = {"num_bits": 8, "type": "int", "symmetric": True}, "int-quantized"
    hidden, inner, experts, top_k = 72, 40, 6, 3
    activations = None

    @property
    def config(self):
        return qwen3(type(self))


class MixtralInt8Token(Integers):
    codes, format = {"num_bits": 8, "type": "int", "symmetric": True}, "int-quantized"
    experts_at, leaves, router = "block_sparse_moe.experts", W123, "block_sparse_moe.gate.weight"
    hidden, inner, experts, top_k = 72, 40, 6, 2
    rows = {"form": "token", "codes": "int8"}

    @property
    def config(self):
        return mixtral(type(self))


class MixtralInt8Rows32(MixtralInt8Token):
    activations = {"dynamic": True, "strategy": "group", "group_size": 32}
    rows = {"form": "group", "codes": "int8", "width": 32}


class QwenInt4(Integers):
    """Groups of 32 columns in words."""

    codes = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32}
    strategy, format, activations = "group", "pack-quantized", None
    hidden, inner, experts, top_k = 96, 64, 8, 2

    @property
    def config(self):
        return qwen3(type(self))


class QwenInt4Group128(QwenInt4):
    codes = QwenInt4.codes | {"group_size": 128}
    hidden, inner, experts, top_k = 256, 128, 2, 1


class QwenInt4E4m3Rows(QwenInt4):
    """Rows of e4m3 by token, as the preset W4AFP8 of llm-compressor has them."""

    activations = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token", "group_size": None}
    hidden, inner, experts, top_k = 160, 96, 4, 2
    rows = {"form": "token"}


class QwenInt4SharedPlain(SharedPlain, QwenInt4):
    hidden, inner, experts, top_k = 64, 32, 5, 2
    ignore = ["re:.*gate$", "re:.*shared_expert[.].*"]

    @property
    def config(self):
        config = qwen3(type(self), shared_expert_intermediate_size=self.shared_inner)
        return config | {"model_type": "qwen2_moe"}


CASES = {
    "mixtral-compressed-channel": MixtralChannel,
    "qwen3_moe-compressed-tensor-static": QwenTensorStatic,
    "qwen3_moe-compressed-block": QwenBlockGroup,
    "qwen3_moe-compressed-block64": QwenBlock64,
    "mixtral-compressed-block32": MixtralBlock32,
    "qwen3_moe-compressed-weight-only": QwenChannelWeightOnly,
    "mixtral-compressed-int8-token": MixtralInt8Token,
    "mixtral-compressed-int8-rows32": MixtralInt8Rows32,
    "qwen3_moe-compressed-block64-rows": QwenBlock64Rows,
    "qwen2_moe-compressed-int4-shared-bf16": QwenInt4SharedPlain,
    "qwen3_moe-compressed-int4-group128": QwenInt4Group128,
    "qwen3_moe-compressed-int4-group32": QwenInt4,
    "qwen3_moe-compressed-int4-e4m3-rows": QwenInt4E4m3Rows,
    "qwen3_moe-compressed-int8-channel": QwenInt8Channel,
}
