"""Modules around models, and blocks without one."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

H = 32


class Pair(nn.Module):
    """Two language models, of which the second reads what the first writes."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, ids: Any) -> Any:
        written = self.first(ids).logits.argmax(-1) % 50
        return self.second(written).logits


class Block(nn.Module):
    """A softmax router and stacked experts of transformers."""

    def __init__(self) -> None:
        super().__init__()
        fields = {"hidden_size": H, "intermediate_size": 24, "num_local_experts": 4}
        config = transformers.MixtralConfig(**fields)
        config._experts_implementation = "eager"
        self.gate = nn.Linear(H, 4, bias=False)
        experts: Any = transformers.models.mixtral.modeling_mixtral.MixtralExperts
        self.experts = experts(config)

    def forward(self, hidden: Any) -> Any:
        rows = hidden.reshape(-1, H)
        weights, ids = self.gate(rows).softmax(-1).topk(2, dim=-1)
        return self.experts(rows, ids, weights * 1.5).view(hidden.shape)


def stacked_block() -> Block:
    torch.manual_seed(5)
    block = Block()
    for weights in block.parameters():
        nn.init.normal_(weights, std=0.2)
    return block.eval()
