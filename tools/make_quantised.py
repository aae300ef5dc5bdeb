#!/usr/bin/env python3
"""Makes the quantised checkpoints of testdata/quantised/: experts in codes as each method stores them.

    python3 tools/make_quantised.py               remake all
    python3 tools/make_quantised.py --name NAME   remake one
    python3 tools/make_quantised.py --check       remake all aside and compare the model files

compressed-tensors models are written by that package, the stacked fp8 model by the quantiser of
transformers, all others by the published layout. Each golden.safetensors holds hidden states, ids,
weights and the output in float64, computed here from the files on disk in numpy alone: codes and scales
are those stored, rows are quantised by the rule of docs/quantisation.md, sums are float64. Integer codes
are decoded by compressed-tensors instead, and the file also has digests of the weights that it decompresses.
"""

import argparse
import filecmp
import json
import pathlib
import tempfile
import types
import zlib

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODELS = ROOT / "testdata" / "quantised"
LAYER = "model.layers.0."
TOKENS = 9
F32 = np.float32


# ------------------------------------------------------------------------------------------------
# e4m3 from its definition

def e4m3_values() -> np.ndarray:
    """The values of codes 0 to 0x7e, ascending."""
    codes = np.arange(0x7F)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))


VALUES = e4m3_values()


def nearest_e4m3(values: np.ndarray) -> np.ndarray:
    """To nearest, ties to the even code, beyond 448 to 448; as values."""
    magnitude = np.abs(values).astype(np.float64)
    upper = np.clip(np.searchsorted(VALUES, magnitude), 1, len(VALUES) - 1)
    lower = upper - 1
    below, above = magnitude - VALUES[lower], VALUES[upper] - magnitude
    up = (above < below) | ((above == below) & (upper % 2 == 0))
    return np.copysign(np.where(up, VALUES[upper], VALUES[lower]), values)


def decode(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor.to(torch.float64).numpy()
    codes = tensor.view(torch.uint8).numpy()
    return np.where(codes >= 0x80, -1.0, 1.0) * VALUES[codes & 0x7F]


def nearest_int8(values: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(values.astype(np.float64)), -128, 127)


def encode(values: np.ndarray) -> torch.Tensor:
    rounded = nearest_e4m3(values)
    codes = np.searchsorted(VALUES, np.abs(rounded)).astype(np.uint8) | (np.signbit(rounded).astype(np.uint8) << 7)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


# ------------------------------------------------------------------------------------------------
# A block in float64

def quantised_rows(x: np.ndarray, rows: dict) -> np.ndarray:
    """What products see of the rows of x: codes times their steps."""
    if rows["form"] == "none":
        return x
    x = x.astype(F32)
    seen = np.empty(x.shape)
    largest, nearest = (127, nearest_int8) if rows.get("codes") == "int8" else (448, nearest_e4m3)
    width = 128 if rows["form"] == "group" else x.shape[1]
    for begin in range(0, x.shape[1], width):
        part = x[:, begin : begin + width]
        if rows["form"] == "static":
            step = np.full((len(x), 1), rows["step"], F32)
        else:
            step = np.abs(part).max(axis=1, keepdims=True) / F32(largest)
            step[step == 0] = 1
            if rows.get("power_of_two"):
                step = np.exp2(np.ceil(np.log2(step.astype(np.float64)))).astype(F32)
        seen[:, begin : begin + width] = nearest(part / step) * step.astype(np.float64)
    return seen


def expand(scale: np.ndarray, shape: tuple[int, int], block: tuple[int, int] | None) -> np.ndarray:
    """A scale for every element of a matrix."""
    if block is None:
        return np.broadcast_to(scale.reshape(-1, 1), shape) if scale.size > 1 else np.full(shape, scale.item())
    wide = np.repeat(np.repeat(scale, block[0], axis=0), block[1], axis=1)
    return wide[: shape[0], : shape[1]]


def silu(x: np.ndarray) -> np.ndarray:
    return x * np.exp(-np.logaddexp(0.0, -x))


def mlp(expert: dict, x: np.ndarray, rows: dict, inner_rows: dict) -> np.ndarray:
    seen = quantised_rows(x, rows)
    h = silu(seen @ expert["gate"].T) * (seen @ expert["up"].T)
    return quantised_rows(h, inner_rows) @ expert["down"].T


# ------------------------------------------------------------------------------------------------
# Weights and how each method stores them

def draw(name: str, *shape: int) -> np.ndarray:
    stream = np.random.Generator(np.random.PCG64([20261120, zlib.crc32(name.encode())]))
    return stream.standard_normal(shape)


def matrix(name: str, rows: int, cols: int) -> np.ndarray:
    # Rows of different size, so that a scale taken from another row or block shows.
    size = np.exp(0.5 * draw(name + " rows", rows, 1)) * np.exp(0.3 * draw(name + " cols", 1, cols))
    return 1.5 * size * draw(name, rows, cols) / np.sqrt(cols)


def scales_of(weight: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    rows, cols = (-(-n // b) for n, b in zip(weight.shape, block))
    amax = [
        [np.abs(weight[r * block[0] :][: block[0], c * block[1] :][:, : block[1]]).max() for c in range(cols)]
        for r in range(rows)
    ]
    return (np.array(amax) / 448).astype(F32)


def store(weight: np.ndarray, block: tuple[int, int], to=lambda scale: scale) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales, the latter first brought to the type they are stored in."""
    scale = to(torch.from_numpy(scales_of(weight, block)))
    return encode(weight / expand(scale.to(torch.float64).numpy(), weight.shape, block)), scale


PROJ = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
W123 = {"gate": "w1", "up": "w3", "down": "w2"}


class Case:
    """One checkpoint: sizes, family and how it is quantised. Subclasses write the tensors."""

    experts_at, leaves = "mlp.experts", PROJ
    router = "mlp.gate.weight"
    hidden, inner, experts, top_k = 136, 132, 3, 2
    shared: str | None = None  # where shared experts lie
    shared_inner = 0
    block: tuple[int, int] | None = None  # of scales, None: a row or the matrix
    rows: dict = {"form": "none"}
    config: dict = {}

    def matrices(self) -> dict[str, np.ndarray]:
        """All matrices of experts and shared experts, by module name."""
        found = {}
        places = [(f"{LAYER}{self.experts_at}.{e}", self.inner) for e in range(self.experts)]
        if self.shared:
            places.append((LAYER + self.shared, self.shared_inner))
        for place, inner in places:
            for part, leaf in self.leaves.items():
                shape = (self.hidden, inner) if part == "down" else (inner, self.hidden)
                found[f"{place}.{leaf}"] = matrix(f"{place}.{leaf}", *shape)
        return found

    def plain(self) -> dict[str, torch.Tensor]:
        """What no method quantises."""
        gate = 2 * draw("router", self.experts, self.hidden) / np.sqrt(self.hidden)
        return {LAYER + self.router: torch.from_numpy(gate).to(torch.bfloat16)}

    def tensors(self) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def files(self) -> dict[str, dict]:
        return {"config.json": self.config}

    # Reading back, by the published layout of each method.
    def scale_name(self, module: str) -> str:
        return f"{module}.weight_scale_inv"

    def is_quantised(self, disk: dict, module: str) -> bool:
        return disk[f"{module}.weight"].dtype == torch.float8_e4m3fn

    def read(self, disk: dict, module: str) -> np.ndarray:
        weight = decode(disk[f"{module}.weight"])
        if not self.is_quantised(disk, module):
            return weight
        return weight * expand(decode(disk[self.scale_name(module)]), weight.shape, self.block)

    def read_expert(self, disk: dict, place: str) -> dict[str, np.ndarray]:
        return {part: self.read(disk, f"{place}.{leaf}") for part, leaf in self.leaves.items()}

    def expert(self, disk: dict, number: int) -> dict[str, np.ndarray]:
        return self.read_expert(disk, f"{LAYER}{self.experts_at}.{number}")

    def steps(self, disk: dict) -> tuple[float, float]:
        """The static steps of inputs and of activated rows: the largest of all experts."""
        of = lambda leaf: max(
            float(disk[f"{LAYER}{self.experts_at}.{e}.{leaf}.input_scale"].item()) for e in range(self.experts)
        )
        return max(of(self.leaves["gate"]), of(self.leaves["up"])), of(self.leaves["down"])

    def rules(self, disk: dict) -> tuple[dict, dict]:
        if self.rows["form"] != "static":
            return self.rows, self.rows
        inputs, inner = self.steps(disk)
        return {**self.rows, "step": inputs}, {**self.rows, "step": inner}

    def shared_rows(self, disk: dict, x: np.ndarray) -> np.ndarray:
        if not self.shared:
            return np.zeros_like(x)
        plain = {"form": "none"}
        place = LAYER + self.shared
        quantised = self.is_quantised(disk, f"{place}.{self.leaves['down']}")
        rules = self.rules(disk) if quantised else (plain, plain)
        return mlp(self.read_expert(disk, place), x, *rules) * self.shared_factor(disk, x)

    def shared_factor(self, disk: dict, x: np.ndarray) -> np.ndarray:
        return np.ones((len(x), 1))

    def golden(self, disk: dict) -> dict[str, torch.Tensor]:
        x = torch.from_numpy(draw("hidden", TOKENS, self.hidden)).to(torch.bfloat16)
        hidden = x.to(torch.float64).numpy()
        ids = np.argsort(-draw("choice", TOKENS, self.experts), axis=1)[:, : self.top_k].astype(np.int32)
        weights = (0.2 + np.abs(draw("weights", TOKENS, self.top_k))).astype(F32)
        rules = self.rules(disk)
        rows = [mlp(self.expert(disk, e), hidden, *rules) for e in range(self.experts)]
        output = self.shared_rows(disk, hidden)
        for slot in range(self.top_k):
            chosen = np.stack([rows[e][t] for t, e in enumerate(ids[:, slot])])
            output = output + weights[:, slot : slot + 1].astype(np.float64) * chosen
        return {
            "hidden_states": x,
            "topk_ids": torch.from_numpy(ids),
            "topk_weights": torch.from_numpy(weights),
            "float64.output": torch.from_numpy(output),
        }

    def make(self, directory: pathlib.Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in (self.plain() | self.tensors()).items()}
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        for name, content in self.files().items():
            (directory / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        disk = load_file(directory / "model.safetensors")
        save_file(self.golden(disk), directory / "golden.safetensors")


def qwen3(case: type[Case], **more) -> dict:
    return {
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": case.hidden,
        "moe_intermediate_size": case.inner,
        "norm_topk_prob": True,
        "num_experts": case.experts,
        "num_experts_per_tok": case.top_k,
        "num_hidden_layers": 1,
        **more,
    }


def mixtral(case: type[Case], **more) -> dict:
    return {
        "model_type": "mixtral",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": case.hidden,
        "intermediate_size": case.inner,
        "num_local_experts": case.experts,
        "num_experts_per_tok": case.top_k,
        "num_hidden_layers": 1,
        **more,
    }


def deepseek(case: type[Case], **more) -> dict:
    return {
        "model_type": "deepseek_v3",
        "dtype": "bfloat16",
        "first_k_dense_replace": 0,
        "hidden_act": "silu",
        "hidden_size": case.hidden,
        "moe_intermediate_size": case.inner,
        "n_group": 1,
        "n_routed_experts": case.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": case.top_k,
        "num_hidden_layers": 1,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "topk_group": 1,
        **more,
    }


class DeepseekBlock(Case):
    """float32 scales of 128x128 blocks, partial ones at both ends; steps of rows are powers of two."""

    shared, shared_inner = "mlp.shared_experts", 132
    block = (128, 128)
    rows = {"form": "group", "power_of_two": True}

    @property
    def config(self):
        return deepseek(
            type(self),
            quantization_config={
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "scale_fmt": "ue8m0",
                "weight_block_size": list(self.block),
            },
        )

    def plain(self):
        bias = torch.from_numpy(0.1 * draw("bias", self.experts)).to(torch.float32)
        return super().plain() | {f"{LAYER}mlp.gate.e_score_correction_bias": bias}

    def tensors(self):
        written = {}
        for module, weight in self.matrices().items():
            written[f"{module}.weight"], written[f"{module}.weight_scale_inv"] = store(weight, self.block)
        return written


class SharedPlain(Case):
    """The quantiser left the shared expert, its gate and the router in bf16."""

    shared, shared_inner = "mlp.shared_expert", 44

    def plain(self):
        gate = torch.from_numpy(draw("shared gate", 1, self.hidden) / 10).to(torch.bfloat16)
        return super().plain() | {f"{LAYER}mlp.shared_expert_gate.weight": gate}

    def shared_factor(self, disk, x):
        return 1 / (1 + np.exp(-x @ decode(disk[f"{LAYER}mlp.shared_expert_gate.weight"]).T))


class QwenSharedPlain(SharedPlain):
    """bf16 scales."""

    inner, hidden = 72, 200
    block = (128, 128)
    rows = {"form": "group"}

    @property
    def config(self):
        config = qwen3(
            type(self),
            shared_expert_intermediate_size=self.shared_inner,
            quantization_config={
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": list(self.block),
                "modules_to_not_convert": ["mlp.gate", "shared_expert", "shared_expert_gate"],
            },
        )
        return config | {"model_type": "qwen2_moe"}

    def tensors(self):
        written = {}
        for module, weight in self.matrices().items():
            if ".experts." not in module:
                written[f"{module}.weight"] = torch.from_numpy(weight).to(torch.bfloat16)
                continue
            codes, scale = store(weight, self.block, lambda s: s.to(torch.bfloat16))
            written[f"{module}.weight"], written[f"{module}.weight_scale_inv"] = codes, scale
        return written


class QwenStacked(Case):
    """Three-dimensional tensors, quantised by the code that transformers saves fp8 models with."""

    hidden, inner, experts, top_k = 256, 128, 2, 1
    block = (128, 128)
    rows = {"form": "group"}

    @property
    def config(self):
        return qwen3(
            type(self),
            quantization_config={
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": list(self.block),
            },
        )

    def tensors(self):
        from transformers import FineGrainedFP8Config
        from transformers.integrations.finegrained_fp8 import Fp8Quantize

        quantise = Fp8Quantize(types.SimpleNamespace(quantization_config=FineGrainedFP8Config()))
        weights = self.matrices()
        at = lambda e, leaf: weights[f"{LAYER}{self.experts_at}.{e}.{leaf}"]
        stack = lambda make: torch.from_numpy(np.stack([make(e) for e in range(self.experts)])).to(torch.bfloat16)
        base = LAYER + self.experts_at
        return quantise.convert({
            f"{base}.gate_up_proj": stack(lambda e: np.concatenate([at(e, "gate_proj"), at(e, "up_proj")])),
            f"{base}.down_proj": stack(lambda e: at(e, "down_proj")),
        })

    def expert(self, disk, number):
        base = LAYER + self.experts_at
        read = lambda name: decode(disk[f"{base}.{name}"][number]) * expand(
            decode(disk[f"{base}.{name}_scale_inv"][number]), disk[f"{base}.{name}"].shape[1:], self.block
        )
        fused = read("gate_up_proj")
        return {"gate": fused[: self.inner], "up": fused[self.inner :], "down": read("down_proj")}


class StackedStatic(Case):
    """One scale an expert [E, 1, 1], gate and up sharing it, and static steps [E]."""

    hidden, inner, experts, top_k = 72, 40, 6, 3
    rows = {"form": "static"}

    @property
    def config(self):
        return qwen3(
            type(self),
            quantization_config={"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        )

    def tensors(self):
        weights = self.matrices()
        at = lambda e, leaf: weights[f"{LAYER}{self.experts_at}.{e}.{leaf}"]
        base = LAYER + self.experts_at
        written = {}
        for name, make in {
            "gate_up_proj": lambda e: np.concatenate([at(e, "gate_proj"), at(e, "up_proj")]),
            "down_proj": lambda e: at(e, "down_proj"),
        }.items():
            pairs = [store(make(e), make(e).shape) for e in range(self.experts)]
            written[f"{base}.{name}"] = torch.stack([codes for codes, _ in pairs])
            written[f"{base}.{name}_scale_inv"] = torch.stack([scale for _, scale in pairs])
            steps = (3.0 + np.arange(self.experts) % 3) / 448
            written[f"{base}.{name}_activation_scale"] = torch.from_numpy(steps.astype(F32))
        return written

    def steps(self, disk):
        base = LAYER + self.experts_at
        return tuple(disk[f"{base}.{n}_activation_scale"].max().item() for n in ("gate_up_proj", "down_proj"))

    def expert(self, disk, number):
        base = LAYER + self.experts_at
        read = lambda name: decode(disk[f"{base}.{name}"][number]) * disk[f"{base}.{name}_scale_inv"][number].item()
        fused = read("gate_up_proj")
        return {"gate": fused[: self.inner], "up": fused[self.inner :], "down": read("down_proj")}


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

    def compressed(self):
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
        from compressed_tensors.quantization import apply_quantization_config

        blocks = {"block_structure": list(self.block)} if self.block else {}
        scheme = QuantizationScheme(
            targets=["Linear"],
            weights=QuantizationArgs(**self.codes, strategy=self.strategy, **blocks),
            input_activations=QuantizationArgs(**self.codes, **self.activations) if self.activations else None,
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
            module.weight_scale.data.copy_(self.scales(module).reshape(module.weight_scale.shape))
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


class QwenInt4SharedPlain(SharedPlain, QwenInt4):
    hidden, inner, experts, top_k = 64, 32, 5, 2
    ignore = ["re:.*gate$", "re:.*shared_expert[.].*"]

    @property
    def config(self):
        config = qwen3(type(self), shared_expert_intermediate_size=self.shared_inner)
        return config | {"model_type": "qwen2_moe"}


class ModelOpt(Case):
    """Described by hf_quant_config.json beside config.json."""

    experts_at, leaves, router = "block_sparse_moe.experts", W123, "block_sparse_moe.gate.weight"
    hidden, inner, experts, top_k = 72, 40, 6, 2
    algorithm = "FP8"
    rows = {"form": "static"}

    @property
    def config(self):
        return mixtral(type(self))

    def files(self):
        described = {
            "producer": {"name": "modelopt"},
            "quantization": {
                "quant_algo": self.algorithm,
                "kv_cache_quant_algo": None,
                "exclude_modules": ["lm_head", "*block_sparse_moe.gate"],
            },
        }
        return {"config.json": self.config, "hf_quant_config.json": described}

    def scale_name(self, module):
        return f"{module}.weight_scale"

    def scale_block(self, shape):
        return shape

    def shape_scale(self, scale):
        return scale.reshape(())

    def tensors(self):
        written = {}
        for module, weight in self.matrices().items():
            codes, scale = store(weight, self.scale_block(weight.shape))
            written[f"{module}.weight"], written[f"{module}.weight_scale"] = codes, self.shape_scale(scale)
            if self.rows["form"] == "static":
                step = (3 + zlib.crc32(module.encode()) % 3) / 448
                written[f"{module}.input_scale"] = torch.tensor(step, dtype=torch.float32)
        return written


class ModelOptChannel(ModelOpt):
    algorithm = "FP8_PER_CHANNEL_PER_TOKEN"
    rows = {"form": "token"}

    def scale_block(self, shape):
        return (1, shape[1])

    def shape_scale(self, scale):
        return scale.reshape(-1)


class ModelOptBlock(ModelOpt):
    hidden, inner, experts, top_k = 136, 132, 3, 2
    algorithm = "FP8_PB_WO"
    block = (128, 128)
    rows = {"form": "none"}

    def scale_block(self, shape):
        return self.block

    def shape_scale(self, scale):
        return scale.reshape(scale.shape[0], 1, scale.shape[1], 1)

    def read(self, disk, module):
        flat = dict(disk)
        name = self.scale_name(module)
        flat[name] = disk[name].reshape(disk[name].shape[0], disk[name].shape[2])
        return super().read(flat, module)


CASES = {
    "deepseek_v3-fp8-block": DeepseekBlock,
    "qwen2_moe-fp8-block-shared-bf16": QwenSharedPlain,
    "qwen3_moe-fp8-stacked": QwenStacked,
    "qwen3_moe-fp8-static-stacked": StackedStatic,
    "mixtral-compressed-channel": MixtralChannel,
    "qwen3_moe-compressed-tensor-static": QwenTensorStatic,
    "qwen3_moe-compressed-block": QwenBlockGroup,
    "qwen3_moe-compressed-weight-only": QwenChannelWeightOnly,
    "mixtral-compressed-int8-token": MixtralInt8Token,
    "qwen2_moe-compressed-int4-shared-bf16": QwenInt4SharedPlain,
    "qwen3_moe-compressed-int4-group128": QwenInt4Group128,
    "qwen3_moe-compressed-int4-group32": QwenInt4,
    "qwen3_moe-compressed-int8-channel": QwenInt8Channel,
    "mixtral-modelopt-fp8": ModelOpt,
    "mixtral-modelopt-channel": ModelOptChannel,
    "mixtral-modelopt-block": ModelOptBlock,
}


def check(name: str, case: Case) -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        remade = pathlib.Path(scratch)
        case.make(remade)
        return [
            f"{name}/{path.name} differs"
            for path in sorted(remade.iterdir())
            if path.name != "golden.safetensors" and not filecmp.cmp(path, MODELS / name / path.name, shallow=False)
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", choices=CASES, help="remake only this one")
    parser.add_argument("--check", action="store_true", help="remake aside and compare the model files")
    options = parser.parse_args()
    problems = []
    for name, case in CASES.items():
        if options.name not in (None, name):
            continue
        if options.check:
            problems += check(name, case())
        else:
            case().make(MODELS / name)
            size = sum(path.stat().st_size for path in (MODELS / name).iterdir()) // 1024
            print(f"{name:36} {size:5} KiB", flush=True)
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
