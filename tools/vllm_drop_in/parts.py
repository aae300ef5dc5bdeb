"""Layers of a trunk in eager torch, by the names and arguments of vLLM's, on one rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn


def default_weight_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    assert param.shape == loaded_weight.shape, (param.shape, loaded_weight.shape)
    param.data.copy_(loaded_weight)


def maybe_remap_kv_scale_name(name: str, params_dict: dict[str, Any]) -> str:
    return name


def remap_moe_expert_weights(
    weights: Iterable[tuple[str, torch.Tensor]], params_dict: dict[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        inner = name.replace(".mlp.experts.", ".mlp.experts.routed_experts.")
        yield inner if inner in params_dict else name, tensor


def make_attention_sink(num_heads: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(num_heads), requires_grad=False)


class _Linear(nn.Module):
    def __init__(self, inputs: int, outputs: list[int], bias: bool, names: list[Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sum(outputs), inputs), requires_grad=False)
        self.weight.weight_loader = self._load
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(sum(outputs)), requires_grad=False)
            self.bias.weight_loader = self._load
        starts = [sum(outputs[:i]) for i in range(len(outputs))]
        self._places = dict(zip(names, zip(starts, outputs, strict=True), strict=True))

    def _load(self, param: Any, loaded_weight: torch.Tensor, shard_id: Any = None) -> None:
        shard_id = getattr(loaded_weight, "shard_id", None) if shard_id is None else shard_id
        if shard_id is None:
            default_weight_loader(param, loaded_weight)
        else:
            default_weight_loader(param.narrow(0, *self._places[shard_id]), loaded_weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return nn.functional.linear(x, self.weight, self.bias), None


class ReplicatedLinear(_Linear):
    def __init__(self, input_size: int, output_size: int, bias: bool = True, **_: Any) -> None:
        super().__init__(input_size, [output_size], bias, [None])


ColumnParallelLinear = RowParallelLinear = DCPGroupColumnParallelLinear = ReplicatedLinear


class MergedColumnParallelLinear(_Linear):
    def __init__(
        self, input_size: int, output_sizes: list[int], bias: bool = True, **_: Any
    ) -> None:
        super().__init__(input_size, output_sizes, bias, list(range(len(output_sizes))))


class QKVParallelLinear(_Linear):
    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = True,
        **_: Any,
    ) -> None:
        wide = head_size * (total_num_kv_heads or total_num_heads)
        super().__init__(hidden_size, [head_size * total_num_heads, wide, wide], bias, list("qkv"))


class RMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is not None:
            x = residual = x + residual
        out = nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return out if residual is None else (out, residual)


def _activation(function: Any, gated: bool = True) -> type[nn.Module]:
    class Activation(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not gated:
                return function(x)
            gate, up = x.chunk(2, dim=-1)
            return function(gate) * up

        forward_native = forward_cuda = forward

    return Activation


SiluAndMul = _activation(nn.functional.silu)


class _Oai(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)

    forward_native = forward_cuda = forward


ACTIVATIONS = {
    "silu_and_mul": SiluAndMul,
    "gelu_and_mul": _activation(nn.functional.gelu),
    "gelu_tanh_and_mul": _activation(lambda x: nn.functional.gelu(x, approximate="tanh")),
    "relu2": _activation(lambda x: nn.functional.relu(x).square(), gated=False),
    "swigluoai_and_mul": _Oai,
}


class VocabParallelEmbedding(nn.Module):
    def __init__(self, num_embeddings: int, embedding_dim: int, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.weight)


class ParallelLMHead(VocabParallelEmbedding):
    def tie_weights(self, embedding: VocabParallelEmbedding) -> ParallelLMHead:
        self.weight = embedding.weight
        return self


class LogitsProcessor(nn.Module):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, lm_head: ParallelLMHead, hidden: torch.Tensor, **_: Any) -> torch.Tensor:
        return nn.functional.linear(hidden, lm_head.weight)


class Attention(nn.Module):
    """Causal attention of one prompt."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        per_layer_sliding_window: int | None = None,
        sinks: torch.Tensor | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = num_heads, num_kv_heads or num_heads
        self.size, self.scale, self.window = head_size, scale, per_layer_sliding_window
        self._sinks = [sinks]  # its owner has it as a parameter

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        count = q.shape[0]
        q = q.reshape(count, self.heads, self.size).transpose(0, 1)
        k, v = (
            rows.reshape(count, self.kv_heads, self.size)
            .repeat_interleave(self.heads // self.kv_heads, dim=1)
            .transpose(0, 1)
            for rows in (k, v)
        )
        place = torch.arange(count)
        away = place.unsqueeze(1) - place
        hidden = (away < 0) | (away >= (self.window or count))
        scores = (q @ k.transpose(1, 2) * self.scale).masked_fill(hidden, -math.inf)
        if self._sinks[0] is not None:
            sink = self._sinks[0].view(-1, 1, 1).expand(-1, count, 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(-1)[..., :count]
        return (weights @ v).transpose(0, 1).reshape(count, -1)


class _Rope(nn.Module):
    def __init__(self, size: int, frequencies: torch.Tensor, scale: float, halves: bool) -> None:
        super().__init__()
        self.size, self.frequencies, self.scale, self.halves = size, frequencies, scale, halves

    def _turn(self, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        angles = positions.unsqueeze(1).float() * self.frequencies
        cos, sin = (f(angles).unsqueeze(1) * self.scale for f in (torch.cos, torch.sin))
        by_head = rows.reshape(rows.shape[0], -1, self.size)
        if self.halves:
            a, b = by_head.chunk(2, dim=-1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        else:
            a, b = by_head[..., 0::2], by_head[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        return turned.reshape(rows.shape)

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Any:
        return self._turn(positions, q), self._turn(positions, k)


def get_rope(
    head_size: int,
    max_position: int = 0,
    is_neox_style: bool = True,
    rope_parameters: dict[str, Any] | None = None,
    **_: Any,
) -> nn.Module:
    given = rope_parameters or {}
    base = given.get("rope_theta", 10000.0)
    steps = torch.arange(0, head_size, 2).float() / head_size
    frequencies, scale = base**-steps, 1.0
    if "yarn" in given.get("rope_type", "default"):
        frequencies, scale = _yarn(frequencies, head_size, base, given)
    return _Rope(head_size, frequencies, scale, is_neox_style)


def _yarn(
    frequencies: torch.Tensor, size: int, base: float, given: dict[str, Any]
) -> tuple[torch.Tensor, float]:
    factor, length = given["factor"], given["original_max_position_embeddings"]

    def place(turns: float) -> float:
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = place(given.get("beta_fast", 32)), place(given.get("beta_slow", 1))
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = ((torch.arange(size // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    mixed = frequencies / factor * ramp + frequencies * (1 - ramp)
    return mixed, 0.1 * math.log(factor) + 1.0


def support_torch_compile(*args: Any, **_: Any) -> Any:
    return args[0] if args else lambda kind: kind


def support_quantized_model_reload_from_hp_weights(function: Any) -> Any:
    return function


def get_pp_indices(layers: int, rank: int, ranks: int) -> tuple[int, int]:
    return 0, layers


class _Here:
    def wrap_modules(self, modules: Any) -> list[nn.Module]:
        return list(modules)


def get_offloader() -> _Here:
    return _Here()


class rocm_aiter_ops:
    is_fused_moe_enabled = is_fusion_moe_shared_experts_enabled = staticmethod(lambda: False)


OCP_MX_BLOCK_SIZE = 32
