"""The code of a checkpoint's folder: a language model in the ways in which published code writes
MoE blocks with a module for every expert. Tests copy it beside a config.json, alone."""

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class FolderConfig(PreTrainedConfig):
    model_type = "folder_moe"

    def __init__(
        self,
        names="w",
        router="softmax",
        shared="",
        calls="",
        bias=False,
        renormalize=True,
        **kwargs,
    ):
        self.names, self.router, self.shared, self.calls = names, router, shared, calls
        self.bias, self.renormalize = bias, renormalize
        self.vocab_size, self.hidden_size, self.intermediate_size = 96, 32, 24
        self.num_experts, self.num_experts_per_tok = 8, 2
        self.num_hidden_layers = kwargs.pop("num_hidden_layers", 2)
        super().__init__(**kwargs)


class Expert(nn.Module):
    """w1, w3 and w2; or gate_proj, up_proj and down_proj."""

    def __init__(self, config, width=None):
        super().__init__()
        wide, inner = config.hidden_size, width or config.intermediate_size
        names = ("w1", "w3", "w2") if config.names == "w" else ("gate_proj", "up_proj", "down_proj")
        for name, sizes in zip(names, ((wide, inner), (wide, inner), (inner, wide)), strict=True):
            self.add_module(name, nn.Linear(*sizes, bias=config.bias))
        self.names = names

    def forward(self, x):
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(nn.functional.silu(gate(x)) * up(x))


class FusedExpert(nn.Module):
    """Gate and up in one matrix."""

    def __init__(self, config, width=None):
        super().__init__()
        wide, inner = config.hidden_size, width or config.intermediate_size
        self.gate_up_proj = nn.Linear(wide, 2 * inner, bias=config.bias)
        self.down_proj = nn.Linear(inner, wide, bias=config.bias)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(nn.functional.silu(gate) * up)


def mix(experts, rows, ids, weights):
    out = torch.zeros_like(rows)
    for number, expert in enumerate(experts):
        token, slot = torch.where(ids == number)
        out.index_add_(0, token, expert(rows[token]) * weights[token, slot, None])
    return out


class CalledExperts(nn.ModuleList):
    """A list with a forward of its own, which gets ids, or ones in the place of every choice."""

    def forward(self, rows, choices, weights):
        if choices.dim() == 3:
            ids = choices.argmax(-1)
            ids = torch.where(choices.sum(-1) > 0, ids, -1)
            return mix(self, rows, ids, weights)
        return mix(self, rows, choices, weights)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.top_k = config, config.num_experts_per_tok
        kind = FusedExpert if config.names == "fused" else Expert
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        experts = [kind(config) for _ in range(config.num_experts)]
        self.experts = CalledExperts(experts) if config.calls else nn.ModuleList(experts)
        if config.shared:
            self.shared_expert = kind(config, width=40)
        if config.shared == "gated":
            self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def route(self, logits):
        if self.config.router == "noisy":  # no rule of anyone's: every third token has one expert
            scores = torch.tanh(logits).square() + 0.1
            weights, ids = scores.topk(self.top_k, dim=-1)
            single = torch.arange(len(weights), device=weights.device)[:, None] % 3 == 0
            last = torch.arange(self.top_k, device=weights.device)[None] > 0
            return ids, weights.masked_fill(single & last, 0.0)
        score = torch.sigmoid if self.config.router == "sigmoid" else lambda x: x.softmax(-1)
        weights, ids = score(logits.float()).topk(self.top_k, dim=-1)
        if self.config.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights.to(logits.dtype)

    def forward(self, hidden_states):
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        ids, weights = self.route(self.gate(rows))
        if self.config.calls == "masks":
            ones = nn.functional.one_hot(ids, self.config.num_experts)
            out = self.experts(rows, ones, weights)
        elif self.config.calls:
            out = self.experts(rows, ids, weights)
        else:
            out = mix(self.experts, rows, ids, weights)
        out = out.view(hidden_states.shape)
        if self.config.shared == "gated":
            gate = torch.sigmoid(self.shared_expert_gate(hidden_states))
            return out + gate * self.shared_expert(hidden_states)
        return out + self.shared_expert(hidden_states) if self.config.shared else out


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.mlp = Block(config)

    def forward(self, hidden_states):
        return hidden_states + self.mlp(self.norm(hidden_states))


class FolderModel(PreTrainedModel):
    config_class = FolderConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])
        self.post_init()

    def forward(self, input_ids):
        hidden_states = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


class FolderForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = FolderConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = FolderModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, **kwargs):
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids)))
