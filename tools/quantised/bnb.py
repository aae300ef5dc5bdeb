"""bitsandbytes: blocks of a flattened matrix in a table of 16 values, or rows in int8."""

import numpy as np
import torch

from quantised.bits import bytes_of
from quantised.case import LAYER, draw
from quantised.packaged import Mixtral, Packaged


class Bnb4(Packaged):
    """Linear4bit quantises and names the tensors; scales are float32 as it decodes them."""

    hidden, inner, experts, top_k = 128, 64, 4, 2
    values, nested, storage, flat_block = "nf4", False, torch.uint8, 64
    agreement = 2.0**-24

    @property
    def method(self):
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": self.values,
            "bnb_4bit_use_double_quant": self.nested,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": str(self.storage).removeprefix("torch."),
            "llm_int8_skip_modules": ["lm_head", "gate"],
            "llm_int8_threshold": 6.0,
        }

    def encoded(self, module, weight):
        import bitsandbytes

        given = bitsandbytes.nn.Params4bit(
            torch.from_numpy(weight).to(torch.bfloat16), requires_grad=False, compress_statistics=self.nested,
            quant_type=self.values, quant_storage=self.storage, blocksize=self.flat_block,
        )  # fmt: skip
        rows, cols = weight.shape
        layer = bitsandbytes.nn.Linear4bit(cols, rows, bias=False, quant_type=self.values)
        layer.weight = given.to("cpu")
        return {name: tensor.clone() for name, tensor in layer.state_dict().items()}

    def state(self, disk: dict, module: str):
        from bitsandbytes.functional import QuantState

        return QuantState.from_dict(
            {name: t.clone() for name, t in self.part_of(disk, f"{module}.weight").items()}, torch.device("cpu")
        )

    def packaged(self, disk, module):
        # The package's plain rule: its AVX-512 one mixes up scales of rows that are no whole number of blocks.
        from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

        packed, state = disk[f"{module}.weight"].reshape(-1).view(torch.uint8), self.state(disk, module)
        return _dequantize_4bit_compute(
            packed, self.scales(disk, module), state.code, self.flat_block, state.shape, torch.float32
        )

    def scales(self, disk: dict, module: str) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_blockwise

        state = self.state(disk, module)
        return dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax

    def read(self, disk, module):
        pairs = bytes_of(disk[f"{module}.weight"].reshape(-1))[0]
        codes = np.stack([pairs >> 4, pairs & 15], axis=1).reshape(-1)
        shape = tuple(self.state(disk, module).shape)
        table = disk[f"{module}.weight.quant_map"].to(torch.float64).numpy()
        scales = np.repeat(self.scales(disk, module).to(torch.float64).numpy(), self.flat_block)
        return (table[codes] * scales[: len(codes)])[: shape[0] * shape[1]].reshape(shape)


class Fp4(Mixtral, Bnb4):
    hidden, inner = 96, 64
    values = "fp4"


class Nested(Mixtral, Bnb4):
    """Scales are codes themselves, less their mean."""

    hidden, inner = 128, 160
    experts, nested = 3, True


class Straddling(Bnb4):
    """Blocks reach over the ends of rows, and the last is partial."""

    hidden, inner = 72, 40


class NestedStraddling(Bnb4):
    hidden, inner, values, nested = 72, 40, "fp4", True


class Blocks128(Bnb4):
    """Larger blocks, over the ends of rows, with nested scales."""

    hidden, inner, experts, nested, flat_block = 160, 96, 3, True, 128


class Blocks32(Mixtral, Bnb4):
    hidden, inner, experts, values, flat_block = 96, 64, 3, "fp4", 32


class Stored(Bnb4):
    """The same bytes under another type."""

    hidden, inner = 64, 96
    storage = torch.bfloat16


class WithRouter(Packaged):
    """Every linear module is packed, the router too, as where nothing is to be skipped."""

    @property
    def config(self):
        config = super().config
        kept = {"llm_int8_skip_modules": ["lm_head"]}
        return config | {"quantization_config": config["quantization_config"] | kept}

    @property
    def gate(self):
        return (LAYER + self.router).removesuffix(".weight")

    def plain(self):
        weight = super().plain()[LAYER + self.router]
        found = self.encoded(self.gate, weight.to(torch.float32).numpy())
        return {f"{self.gate}.{name}": tensor for name, tensor in found.items()}

    def golden(self, disk):
        return super().golden(disk) | {"router": torch.from_numpy(self.read(disk, self.gate))}


class RouterToo(WithRouter, Bnb4):
    hidden, inner, experts = 72, 64, 6


class NestedRouterToo(WithRouter, Mixtral, Bnb4):
    hidden, inner, experts, values, nested = 96, 32, 5, "fp4", True


class WithSharedGate(WithRouter):
    """Qwen2-MoE: the gate of the shared expert is a module of one row."""

    shared = "mlp.shared_expert"
    shared_gate = LAYER + "mlp.shared_expert_gate"

    @property
    def config(self):
        return super().config | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": self.shared_inner}

    def plain(self):
        weight = (draw("shared gate", 1, self.hidden) / 10).astype(np.float32)
        found = self.encoded(self.shared_gate, weight)
        return super().plain() | {f"{self.shared_gate}.{name}": tensor for name, tensor in found.items()}

    def shared_factor(self, disk, x):
        return 1 / (1 + np.exp(-x @ self.read(disk, self.shared_gate).T))


class SharedGateToo(WithSharedGate, Bnb4):
    hidden, inner, experts, shared_inner = 96, 32, 4, 64


class BnbInt8(Packaged):
    """Rows in codes, each with its largest value."""

    hidden, inner, experts, top_k = 72, 40, 6, 2
    agreement = 2.0**-23
    method = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": False,
        "load_in_8bit": True,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": ["lm_head", "gate"],
        "llm_int8_threshold": 6.0,
    }

    def encoded(self, module, weight):
        import bitsandbytes

        rows, cols = weight.shape
        layer = bitsandbytes.nn.Linear8bitLt(cols, rows, bias=False, has_fp16_weights=False)
        layer.weight = bitsandbytes.nn.Int8Params(
            torch.from_numpy(weight).to(torch.float16), requires_grad=False, has_fp16_weights=False
        )
        return {name: tensor.clone() for name, tensor in layer.to("cpu").state_dict().items()}

    def packaged(self, disk, module):
        from bitsandbytes.functional import int8_vectorwise_dequant

        return int8_vectorwise_dequant(disk[f"{module}.weight"], disk[f"{module}.SCB"])

    def read(self, disk, module):
        codes, largest = (disk[f"{module}.{name}"].to(torch.float64).numpy() for name in ("weight", "SCB"))
        return codes * largest[:, None] / 127


class MixtralBnbInt8(Mixtral, BnbInt8):
    hidden, inner, experts = 96, 64, 3


class Int8RouterToo(WithRouter, BnbInt8):
    hidden, inner, experts = 40, 72, 5


class Int8SharedGateToo(WithSharedGate, BnbInt8):
    hidden, inner, experts, shared_inner = 56, 40, 3, 48


CASES = {
    "qwen3_moe-bnb-nf4": Bnb4,
    "qwen3_moe-bnb-nf4-nested-blocks128": Blocks128,
    "mixtral-bnb-fp4-blocks32": Blocks32,
    "mixtral-bnb-fp4": Fp4,
    "mixtral-bnb-nf4-nested": Nested,
    "qwen3_moe-bnb-nf4-straddling": Straddling,
    "qwen3_moe-bnb-fp4-nested-straddling": NestedStraddling,
    "qwen3_moe-bnb-nf4-bf16-storage": Stored,
    "qwen3_moe-bnb-int8": BnbInt8,
    "mixtral-bnb-int8": MixtralBnbInt8,
    "qwen3_moe-bnb-nf4-router": RouterToo,
    "qwen2_moe-bnb-nf4-shared": SharedGateToo,
    "mixtral-bnb-fp4-nested-router": NestedRouterToo,
    "qwen3_moe-bnb-int8-router": Int8RouterToo,
    "qwen2_moe-bnb-int8-shared": Int8SharedGateToo,
}
