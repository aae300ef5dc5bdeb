"""Float64 recomputation of Mixture-of-Experts blocks from the tensors of a saved checkpoint.

It reads the names and layouts on disk, not a framework's modules, so that it stays independent of
the code whose output it judges. Nothing is rounded between the stored inputs and the result except
the router logits, which the families treated here round to the model's type before the softmax.
"""

import dataclasses
import json
import pathlib

import numpy as np
import torch
from safetensors.torch import load_file


@dataclasses.dataclass(frozen=True)
class Family:
    """Where a family keeps its experts and how it weighs them."""

    block: str
    gate: str
    up: str
    down: str
    num_experts: str
    renormalise: bool | None  # None: norm_topk_prob of config.json decides
    shared_expert: bool = False


FAMILIES = {
    "mixtral": Family("block_sparse_moe", "w1", "w3", "w2", "num_local_experts", True),
    "qwen2_moe": Family("mlp", "gate_proj", "up_proj", "down_proj", "num_experts", None, shared_expert=True),
    "qwen3_moe": Family("mlp", "gate_proj", "up_proj", "down_proj", "num_experts", None),
    "olmoe": Family("mlp", "gate_proj", "up_proj", "down_proj", "num_experts", None),
}


@dataclasses.dataclass(frozen=True)
class BlockResult:
    """One block's float64 results, and how clear its routing was."""

    router_logits: np.ndarray  # [T, E] float32
    topk_ids: np.ndarray  # [T, k] int32, higher score first, equal scores: lower id first
    topk_weights: np.ndarray  # [T, k] float64
    output: np.ndarray  # [T, H] float64
    decisive: np.ndarray  # [T] bool


class Checkpoint:
    """The MoE blocks of a model directory, widened to float64 on demand."""

    def __init__(self, directory: pathlib.Path):
        self.config = json.loads((directory / "config.json").read_text())
        self.family = FAMILIES[self.config["model_type"]]
        self.tensors: dict[str, torch.Tensor] = {}
        for path in sorted(directory.glob("model*.safetensors")):
            self.tensors.update(load_file(path))

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.config["dtype"])

    def moe_layers(self) -> list[int]:
        layers = range(self.config["num_hidden_layers"])
        return [n for n in layers if f"{self._prefix(n)}.gate.weight" in self.tensors]

    def run_block(self, layer: int, hidden_states: torch.Tensor) -> BlockResult:
        """hidden_states [T, H] in any float type -> the block's results in float64."""
        x = _widen(hidden_states)
        prefix = self._prefix(layer)
        top_k = self.config["num_experts_per_tok"]
        router = self._weight(f"{prefix}.gate.weight")
        exact_logits = x @ router.T
        logits = _widen(torch.from_numpy(exact_logits).to(self.dtype))

        order = np.argsort(-logits, axis=1, kind="stable")
        ids = order[:, :top_k]
        probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        weights = np.take_along_axis(probabilities, ids, axis=1)
        if self._renormalises():
            weights = weights / weights.sum(axis=1, keepdims=True)

        output = np.zeros_like(x)
        for expert in np.unique(ids):
            tokens, slots = np.nonzero(ids == expert)
            rows = self._mlp(f"{prefix}.experts.{expert}", x[tokens], routed=True)
            np.add.at(output, tokens, weights[tokens, slots, None] * rows)
        if self.family.shared_expert:
            gate = 1.0 / (1.0 + np.exp(-(x @ self._weight(f"{prefix}.shared_expert_gate.weight").T)))
            output += gate * self._mlp(f"{prefix}.shared_expert", x, routed=False)

        decisive = _is_decisive(logits, exact_logits, np.abs(x) @ np.abs(router).T, order, top_k, self.dtype)
        return BlockResult(logits.astype(np.float32), ids.astype(np.int32), weights, output, decisive)

    def _prefix(self, layer: int) -> str:
        return f"model.layers.{layer}.{self.family.block}"

    def _weight(self, name: str) -> np.ndarray:
        return _widen(self.tensors[name])

    def _renormalises(self) -> bool:
        fixed = self.family.renormalise
        return self.config["norm_topk_prob"] if fixed is None else fixed

    def _mlp(self, prefix: str, x: np.ndarray, routed: bool) -> np.ndarray:
        names = (self.family.gate, self.family.up, self.family.down)
        gate, up, down = names if routed else ("gate_proj", "up_proj", "down_proj")
        g = x @ self._weight(f"{prefix}.{gate}.weight").T
        u = x @ self._weight(f"{prefix}.{up}.weight").T
        return (g / (1.0 + np.exp(-g)) * u) @ self._weight(f"{prefix}.{down}.weight").T


def worst_relative_error(actual: torch.Tensor, expected: np.ndarray) -> float:
    """The largest per-token relative L2 distance."""
    distance = np.linalg.norm(_widen(actual) - expected, axis=1)
    return float((distance / np.linalg.norm(expected, axis=1)).max())


def _widen(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to(torch.float64).numpy()


def _is_decisive(logits, exact_logits, magnitude, order, top_k, dtype) -> np.ndarray:
    """Whether a float32 router must select the same experts, in the same order, with the same logits.

    Neighbours among the first top_k + 1 scores are two units in the last place apart, and no selected
    logit lies so near a rounding boundary that float32 summation could push it across.
    """
    info = torch.finfo(dtype)
    first = np.take_along_axis(logits, order[:, : top_k + 1], axis=1)
    spacing = info.eps * 2.0 ** np.floor(np.log2(np.maximum(np.abs(first), info.smallest_normal)))
    gaps = first[:, :-1] - first[:, 1:]
    separated = (gaps >= 2.0 * spacing[:, :-1] + 1e-3).all(axis=1)
    if dtype == torch.float32:
        return separated

    selected = order[:, :top_k]
    rounding = np.take_along_axis(np.abs(exact_logits - logits), selected, axis=1)
    summation = 64 * torch.finfo(torch.float32).eps * np.take_along_axis(magnitude, selected, axis=1)
    return separated & (rounding + summation < 0.5 * spacing[:, :-1]).all(axis=1)
