"""Which configuration speaks of a block: that of the model, or of a model inside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from conclave.transformers._find import Candidate, router_of
from conclave.transformers._traits import NotOurs


def _above(model: torch.nn.Module, path: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules that a path leads through, outermost first."""
    yield "", model
    parts = path.split(".")
    for length in range(1, len(parts)):
        above = ".".join(parts[:length])
        yield above, model.get_submodule(above)


def owners_of(model: Any, candidate: Candidate) -> Iterator[tuple[Any, Candidate]]:
    """Models whose configuration may describe a block, with the block by its path in them: the
    outermost, and the innermost if that is of another kind, as the text model of a multimodal one.
    Decoder layers have a configuration too, and are no models. None where nothing has one."""
    from transformers import PreTrainedModel

    found = [
        (path, module)
        for path, module in _above(model, candidate.path)
        if hasattr(module, "config") and (module is model or isinstance(module, PreTrainedModel))
    ]
    kinds: list[type] = []
    for path, module in (*found[:1], *found[1:][-1:]):
        if type(module.config) not in kinds:
            kinds.append(type(module.config))
            below = candidate.path[len(path) + 1 if path else 0 :]
            yield module, dataclasses.replace(candidate, path=below)


def hidden_size_of(model: Any, candidate: Candidate) -> int:
    """Columns of the rows that experts get. Raises NotOurs where nobody says."""
    for owner, _ in owners_of(model, candidate):
        config = owner.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        size = getattr(text, "hidden_size", None)
        if isinstance(size, int):
            return size
    router = router_of(candidate.block)
    for weights in router.parameters() if router is not None else ():
        if weights.dim() == 2:
            return int(weights.shape[1])
    raise NotOurs("nothing says how wide rows are")
