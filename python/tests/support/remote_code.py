"""MoE blocks as code for transformers 4, and code that comes with checkpoints, writes them: every
expert is a module of its own, in an `nn.ModuleList`."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

E, K, H, INNER, VOCAB = 8, 2, 48, 40, 32


def config(base: str, **fields: Any) -> Any:
    """A configuration of a published family, or of one that nobody knows (base "unknown")."""
    common = {
        "vocab_size": VOCAB,
        "hidden_size": H,
        "intermediate_size": INNER,
        "moe_intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts_per_tok": K,
    }
    if base == "unknown":
        kind = type("NeverHeardOf", (transformers.PretrainedConfig,), {"model_type": "unheard_of"})
        found = kind()
        for name, value in (common | fields).items():
            setattr(found, name, value)
        return found
    return getattr(transformers, base)(**common, **fields)


class MixtralMlp(nn.Module):
    """w1 is the gate, w3 up, w2 down."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.w1 = nn.Linear(H, INNER, bias=False)
        self.w2 = nn.Linear(INNER, H, bias=False)
        self.w3 = nn.Linear(H, INNER, bias=False)
        self.act_fn = transformers.activations.ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Any) -> Any:
        return self.w2(self.act_fn(self.w1(hidden_states)) * self.w3(hidden_states))


class Mlp(nn.Module):
    """gate_proj, up_proj, down_proj."""

    def __init__(self, config: Any, width: int = INNER) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(H, width, bias=False)
        self.up_proj = nn.Linear(H, width, bias=False)
        self.down_proj = nn.Linear(width, H, bias=False)
        self.act_fn = transformers.activations.ACT2FN[config.hidden_act]

    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class FusedMlp(nn.Module):
    """Gate and up in one matrix whose rows alternate, with biases, and bounds."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.fc_in = nn.Linear(H, 2 * INNER)
        self.fc_out = nn.Linear(INNER, H)
        self.limit = 1.5

    def forward(self, x: Any) -> Any:
        gate, up = self.fc_in(x)[..., ::2], self.fc_in(x)[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.fc_out((up + 1) * gate * torch.sigmoid(1.702 * gate))


class NonGatedMlp(nn.Module):
    """Two matrices, a square between."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.fc1 = nn.Linear(H, INNER, bias=False)
        self.fc2 = nn.Linear(INNER, H, bias=False)

    def forward(self, x: Any) -> Any:
        return self.fc2(torch.relu(self.fc1(x)) ** 2)


class NormedMlp(Mlp):
    """With a weight that is no matrix."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norm = nn.LayerNorm(H)

    def forward(self, x: Any) -> Any:
        return super().forward(self.norm(x))


class SineMlp(Mlp):
    """Of a formula that nobody else has."""

    def forward(self, x: Any) -> Any:
        return self.down_proj(torch.sin(self.gate_proj(x)) * self.up_proj(x))


def loop(experts: nn.ModuleList, hidden: Any, ids: Any, weights: Any) -> Any:
    """The loop over experts of transformers 4."""
    out = torch.zeros_like(hidden)
    mask = nn.functional.one_hot(ids, num_classes=len(experts)).permute(2, 1, 0)
    for index in range(len(experts)):
        slot, token = torch.where(mask[index])
        rows = experts[index](hidden[token]) * weights[token, slot, None]
        out.index_add_(0, token, rows.to(hidden.dtype))
    return out


class MixtralBlock(nn.Module):
    """MixtralSparseMoeBlock of 4.x: softmax, the best k, renormalised; returns the logits too."""

    mlp: type[nn.Module] = MixtralMlp

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList([self.mlp(config) for _ in range(E)])

    def weigh(self, scores: Any) -> Any:
        return scores / scores.sum(dim=-1, keepdim=True)

    def forward(self, hidden_states: Any) -> Any:
        batch, tokens, width = hidden_states.shape
        rows = hidden_states.view(-1, width)
        logits = self.gate(rows)
        scores = torch.softmax(logits, dim=1, dtype=torch.float)
        weights, ids = torch.topk(scores, self.top_k, dim=-1)
        out = loop(self.experts, rows, ids, self.weigh(weights).to(rows.dtype))
        return out.view(batch, tokens, width), logits


class QwenBlock(MixtralBlock):
    """Qwen2MoeSparseMoeBlock of 4.x: not renormalised, and a shared expert with a gate."""

    mlp = Mlp

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.shared_expert = Mlp(config, INNER + 8)
        self.shared_expert_gate = nn.Linear(H, 1, bias=False)

    def weigh(self, scores: Any) -> Any:
        return scores

    def forward(self, hidden_states: Any) -> Any:
        out, logits = super().forward(hidden_states)
        shared = torch.sigmoid(self.shared_expert_gate(hidden_states))
        return out + shared * self.shared_expert(hidden_states), logits


class DeepseekGate(nn.Module):
    """MoEGate of the code beside DeepSeek-V3: sigmoid, the best groups, a bias that chooses."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.top_k, self.n_group, self.topk_group = config.num_experts_per_tok, 2, 1
        self.routed_scaling_factor = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(E, H))
        self.e_score_correction_bias = nn.Parameter(torch.empty(E))

    def forward(self, hidden_states: Any) -> Any:
        batch, tokens, width = hidden_states.shape  # as published: rows alone are refused
        rows = hidden_states.view(batch * tokens, width).float()
        scores = nn.functional.linear(rows, self.weight.float()).sigmoid()
        choice = (scores + self.e_score_correction_bias).view(-1, self.n_group, E // self.n_group)
        groups = torch.topk(choice.topk(2, dim=-1)[0].sum(-1), self.topk_group, sorted=False)[1]
        mask = torch.zeros(len(rows), self.n_group, device=rows.device).scatter_(1, groups, 1)
        choice = choice.masked_fill(mask[..., None] == 0, float("-inf")).flatten(1)
        ids = torch.topk(choice, self.top_k, dim=-1, sorted=False)[1]
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return ids, weights * self.routed_scaling_factor


class DeepseekBlock(nn.Module):
    """DeepseekV3MoE: the gate chooses, shared experts are added; returns hidden states alone."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Mlp(config) for _ in range(E)])
        self.gate = DeepseekGate(config)
        self.shared_experts = Mlp(config)

    def forward(self, hidden_states: Any) -> Any:
        ids, weights = self.gate(hidden_states)
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        out = loop(self.experts, rows, ids, weights.to(rows.dtype))
        return out.view(*hidden_states.shape) + self.shared_experts(hidden_states)


class Layer(nn.Module):
    def __init__(self, name: str, block: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.name = name
        self.add_module(name, block)

    def forward(self, hidden: Any) -> Any:
        out = getattr(self, self.name)(self.norm(hidden))
        return hidden + (out[0] if isinstance(out, tuple) else out)


class Trunk(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, H)
        self.layers = nn.ModuleList([layer])

    def forward(self, ids: Any) -> Any:
        hidden = self.embed_tokens(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Model(nn.Module):
    """One layer of such a block, under the names of a published checkpoint."""

    def __init__(self, config: Any, block: type[nn.Module], name: str = "mlp") -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(Layer(name, block(config)))
        numbers = torch.Generator("cpu").manual_seed(17)
        with torch.no_grad():
            for weights in self.parameters():
                values = torch.randn(weights.shape, generator=numbers, device="cpu")
                weights.copy_(values * 0.3)
        self.eval()

    @property
    def block(self) -> Any:
        layer = self.model.layers[0]
        return getattr(layer, layer.name)

    def forward(self, ids: Any) -> Any:
        return self.model(ids)
