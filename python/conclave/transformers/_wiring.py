"""Which modules a block consists of, to see when one of them is replaced or wrapped.

PEFT puts adapters around modules of a model that is there already. A block that the library has
taken over would go on without them.
"""

from __future__ import annotations

from typing import Any

import torch


def is_parametrized(module: torch.nn.Module) -> bool:
    """Whether something computes its weights anew at every access, as PEFT's wrappers do."""
    return "parametrizations" in module._modules


class Wiring:
    """The children of every module of a block, by identity."""

    def __init__(self, block: torch.nn.Module) -> None:
        self._children: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
            (m._modules, tuple(map(id, m._modules.values()))) for m in block.modules() if m._modules
        ]

    def why_other(self) -> str:
        """What has changed since; empty if nothing has."""
        for children, ids in self._children:
            if tuple(map(id, children.values())) == ids:
                continue
            names = (type(m).__name__ for m in children.values() if id(m) not in ids)
            found = next(names, "nothing")
            return (
                f"a module of the block was replaced after patch ({found}); to run it here, patch "
                "the model again after merging adapters"
            )
        return ""
