"""Living layers by name, and by the number under which compiled graphs find them."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import itertools
import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from conclave.errors import ConclaveRuntimeError, ConclaveValueError

logger = logging.getLogger("conclave.vllm")
_told: set[tuple[int, str]] = set()


class LayerRegistry(Mapping[str, Any]):
    """Layers by their prefix, in the order of their making; one that is gone is left out."""

    def __init__(self) -> None:
        self._named: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._numbered: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._numbers = itertools.count(1)
        self._is_paused: contextvars.ContextVar[bool] = contextvars.ContextVar(
            "is_paused", default=False
        )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Layers that are made within are named by somebody else."""
        token = self._is_paused.set(True)
        try:
            yield
        finally:
            self._is_paused.reset(token)

    def __getitem__(self, name: str) -> Any:
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._named))

    def __len__(self) -> int:
        return len(self._named)

    def check(self, name: str) -> None:
        """Raises ConclaveValueError for the name of a living layer."""
        if not name or name not in self._named or self._is_paused.get():
            return
        # Parameters refer to their layer, so that one that is gone waits for the collector.
        gc.collect()
        if name in self._named:
            raise ConclaveValueError(f"prefix: Duplicate layer name: {name}")

    def add(self, name: str, layer: Any) -> None:
        """Names a layer, unless it has no name."""
        if name and not self._is_paused.get():
            self._named[name] = layer

    def number(self, layer: Any) -> int:
        """A new number for a layer."""
        number = next(self._numbers)
        self._numbered[number] = layer
        return number

    def numbered(self, number: int) -> Any:
        """The layer of a number."""
        layer = self._numbered.get(number)
        if layer is None:
            raise ConclaveRuntimeError("fused_moe: the layer of a compiled graph is gone")
        return layer


static_forward_context = LayerRegistry()


def log_once(level: int, text: str) -> None:
    """Logs a line that the process has not logged at this level."""
    if logger.isEnabledFor(level) and (level, text) not in _told:
        _told.add((level, text))
        logger.log(level, text)
