"""A checkpoint: sizes, family, weights, and what is recorded of its layer."""

import json
import pathlib
import zlib

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from quantised.arithmetic import F32, decode, encode, expand, mlp

LAYER = "model.layers.0."
TOKENS = 9


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
        if self.rows["form"] != "static" and self.rows.get("scale") != "two_level":
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

    def mlp(self, disk: dict, number: int, x: np.ndarray) -> np.ndarray:
        """What an expert makes of rows."""
        return mlp(self.expert(disk, number), x, *self.rules(disk))

    def golden(self, disk: dict) -> dict[str, torch.Tensor]:
        x = torch.from_numpy(draw("hidden", TOKENS, self.hidden)).to(torch.bfloat16)
        hidden = x.to(torch.float64).numpy()
        ids = np.argsort(-draw("choice", TOKENS, self.experts), axis=1)[:, : self.top_k].astype(np.int32)
        weights = (0.2 + np.abs(draw("weights", TOKENS, self.top_k))).astype(F32)
        rows = [self.mlp(disk, e, hidden) for e in range(self.experts)]
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
