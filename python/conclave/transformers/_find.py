"""Where a model's MoE blocks are."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator

import torch

_EXPERTS = ("experts", "text_moe.experts")
_ROUTERS = ("gate", "router")
# Classes that by their name hold experts, in a form that no rule here finds.
_NAMED = re.compile(r"(Experts|Mo[eE]|Mo[eE]Block|SparseMLP)$")
_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A module that may be a MoE block."""

    path: str
    block: torch.nn.Module
    experts: torch.nn.Module  # the module that holds the experts' weights
    in_layer: bool = False  # the decoder layer itself calls router and experts
    is_unknown: bool = False  # its name says that it has experts, and nothing else does

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
        # Some quantisers' modules have neither: their codes are objects.
        matrices = (part for part in module.modules() if hasattr(part, "in_features"))
        return any(True for _ in (*module.parameters(), *module.buffers(), *matrices))
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


def _is_named(module: torch.nn.Module) -> bool:
    """Whether a module's class says that it holds experts, and is not a model that has them."""
    return (
        _NAMED.search(type(module).__name__) is not None
        and not hasattr(module, "config_class")
        and any(True for _ in module.parameters())
    )


def _is_below(path: str, others: Iterable[str]) -> bool:
    return any(f"{path}.".startswith(f"{other}.") for other in others)


def find_candidates(model: torch.nn.Module) -> Iterator[Candidate]:
    """Every module that has experts below it, outermost first; then those whose names alone say
    so, that nothing is left out without a word."""
    found: list[str] = []
    named: dict[str, torch.nn.Module] = {}
    for path, module in model.named_modules():
        if not path or _is_below(path, found):
            continue
        experts = _experts_of(module)
        if experts is None:
            if _is_named(module):
                named[path] = module
            continue
        children = dict(module.named_children())
        found.append(path)
        yield Candidate(path, module, experts, any(_is_attention(name) for name in children))
    for path, module in named.items():
        holds_others = any(_is_below(other, [path]) for other in found)
        if not holds_others and not _is_below(path, (n for n in named if n != path)):
            yield Candidate(path, module, module, is_unknown=True)


def router_of(block: torch.nn.Module) -> torch.nn.Module | None:
    """The module whose output transformers records as router logits."""
    for name in _ROUTERS:
        found = getattr(block, name, None)
        if isinstance(found, torch.nn.Module):
            return found
    return None
