"""Forwards of a model beside each other, and a change of its weights between two of them."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from conclave._locks import ForkSafeLock
from conclave.errors import ConclaveRuntimeError


class _State:
    """Who runs now; another one in a forked child, where other threads do not live."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.running = 0
        self.is_closed = False


class Turns:
    """A gate that forwards of a model pass, and that a commit closes. A commit that waits comes
    before forwards that arrive later. A graph of torch.compile passes without asking."""

    def __init__(self) -> None:
        self.is_refitting = False
        self.epoch = 0  # of the model's weights
        self._state = ForkSafeLock(_State)
        self._depth = threading.local()  # a model may stand in itself
        self._gate: Any = None  # what was installed; held weakly, as the model holds it

    def install(self, model: torch.nn.Module) -> None:
        original = model.forward
        former = model.__dict__.get("forward")

        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            with self.running():
                return original(*args, **kwargs)

        functools.update_wrapper(forward, original)
        forward.former = former  # type: ignore[attr-defined]
        self._gate = weakref.ref(forward)
        model.forward = forward

    def remove(self, model: torch.nn.Module) -> None:
        """Nothing where somebody else's forward stands before it by now."""
        gate = self._gate()
        if gate is None or model.__dict__.get("forward") is not gate:
            return
        former = vars(gate)["former"]
        del model.forward
        if former is not None:
            model.forward = former

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A forward."""
        depth = getattr(self._depth, "value", 0)
        state = self._state.now
        if depth == 0:
            with state.condition:
                state.condition.wait_for(lambda: not state.is_closed)
                state.running += 1
        self._depth.value = depth + 1
        try:
            yield
        finally:
            self._depth.value = depth
            if depth == 0:
                with state.condition:
                    state.running -= 1
                    state.condition.notify_all()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """No forward runs. Raises ConclaveRuntimeError within one."""
        if getattr(self._depth, "value", 0):
            raise ConclaveRuntimeError(
                "refit: it cannot be committed within a forward of the model"
            )
        state = self._state.now
        with state.condition:
            state.condition.wait_for(lambda: not state.is_closed)
            state.is_closed = True
        try:
            with state.condition:
                state.condition.wait_for(lambda: state.running == 0)
            yield
        finally:
            with state.condition:
                state.is_closed = False
                state.condition.notify_all()
