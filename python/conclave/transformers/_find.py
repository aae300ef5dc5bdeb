"""Where a model's MoE blocks are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

_EXPERTS = ("experts", "text_moe.experts")
_ROUTERS = ("gate", "router")
_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A module that may be a MoE block."""

    path: str
    block: torch.nn.Module
    experts: torch.nn.Module  # the module that holds the experts' weights
    in_layer: bool  # the decoder layer itself calls router and experts

    @property
    def is_list(self) -> bool:
        """Whether every expert is a module of its own."""
        return isinstance(self.experts, _LISTS)

    @property
    def is_attention(self) -> bool:
        return any(_is_attention(name) for name in self.path.split("."))


def _is_attention(name: str) -> bool:
    return "attn" in name or "attention" in name


def _holds_experts(module: torch.nn.Module) -> bool:
    """Whether a module's weights are those of experts: in stacks of its own or of a child's (Aria),
    flat in a child (DBRX), or in a list of modules, as code has them for transformers 4."""
    if isinstance(module, _LISTS):
        return any(True for _ in (*module.parameters(), *module.buffers()))
    if any(_has_stacks(part) for part in (module, *module.children())):
        return True
    return (
        hasattr(module, "num_experts")
        or hasattr(module, "moe_num_experts")
        or any(hasattr(child, "moe_num_experts") for child in module.children())
    )


def _has_stacks(module: torch.nn.Module) -> bool:
    return any(p.dim() == 3 for p in module.parameters(recurse=False))


def _experts_of(block: torch.nn.Module) -> torch.nn.Module | None:
    for path in _EXPERTS:
        try:
            found = block.get_submodule(path)
        except AttributeError:
            continue
        if _holds_experts(found):
            return found
    children = dict(block.named_children())
    for name, child in children.items():
        if isinstance(child, _LISTS) and "expert" in name and "shared" not in name:
            if _holds_experts(child):
                return child
    if {"router", "input_linear", "output_linear"} <= children.keys():  # JetMoE
        return children["input_linear"]
    return None


def find_candidates(model: torch.nn.Module) -> Iterator[Candidate]:
    """Every module that has experts below it, outermost first."""
    inside: list[str] = []
    for path, module in model.named_modules():
        if not path or any(path.startswith(prefix) for prefix in inside):
            continue
        experts = _experts_of(module)
        if experts is None:
            continue
        children = dict(module.named_children())
        in_layer = any(_is_attention(name) for name in children)
        inside.append(f"{path}.")
        yield Candidate(path, module, experts, in_layer)


def router_of(block: torch.nn.Module) -> torch.nn.Module | None:
    """The module whose output transformers records as router logits."""
    for name in _ROUTERS:
        found = getattr(block, name, None)
        if isinstance(found, torch.nn.Module):
            return found
    return None
