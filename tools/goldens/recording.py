"""Runs one MoE block of a transformers model on given hidden states and records what it did."""

import dataclasses

import torch


@dataclasses.dataclass
class Recorded:
    """As transformers computed it; ids and weights in its own slot order."""

    logits: torch.Tensor  # [T, E]
    ids: torch.Tensor  # [T, k]
    weights: torch.Tensor  # [T, k]
    output: torch.Tensor  # [T, H]
    hidden_states: torch.Tensor | None = None  # the block's input where it is not what was given
    extra: dict[str, torch.Tensor] | None = None  # side inputs where they are not what was given


def first(value):
    return value[0] if isinstance(value, (tuple, list)) else value


class Hooks:
    """Forward hooks that keep arguments and results by label until the block ends."""

    def __init__(self):
        self.seen: dict[str, tuple] = {}
        self.handles = []

    def watch(self, label: str, module: torch.nn.Module) -> None:
        def keep(_, args, kwargs, out):
            self.seen[label] = (tuple(args) + tuple(kwargs.values()), out)

        self.handles.append(module.register_forward_hook(keep, with_kwargs=True))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()


def record_block(model, family, path: str, hidden_states: torch.Tensor, extra: dict) -> Recorded:
    """The usual case: block.<router> returns (logits, weights, ids); block.experts takes (x, ids, weights)."""
    block = model.get_submodule(path)
    with Hooks() as hooks, torch.no_grad():
        hooks.watch("router", block.get_submodule(family.router_path))
        hooks.watch("experts", block.experts)
        output = first(block(hidden_states[None]))
    logits = first(hooks.seen["router"][1])
    _, ids, weights = hooks.seen["experts"][0][:3]
    return Recorded(logits, ids, weights, output.reshape(hidden_states.shape))
