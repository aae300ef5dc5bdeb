"""Two halves of a batch that take turns on one rank: threads that hand over to each other while
rows travel.

Names and meaning of vLLM's hooks for dual-batch overlap. Each half runs in a thread of its own
within its `UBatchContext`; one runs at a time, until it yields or ends. Outside of a context every
hook does nothing, so that kernels may call them always.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from conclave.errors import ConclaveCommError, ConclaveRuntimeError, ConclaveValueError

_local = threading.local()


class _Turn:
    """Whose turn it is among the halves of a batch, and whether one of them failed."""

    def __init__(self, count: int, timeout_s: float) -> None:
        self.changed = threading.Condition()
        self.timeout_s = timeout_s
        self.running = [False] * count
        self.ended = [False] * count
        self.turn = 0
        self.failed = False

    def wait_for(self, index: int) -> None:
        def may_run() -> bool:
            return self.failed or (all(r or e for r, e in self._begun()) and self.turn == index)

        if not self.changed.wait_for(may_run, self.timeout_s):
            self.failed = True
            self.changed.notify_all()
            raise ConclaveCommError(
                f"ubatch {index}: its turn did not come within {self.timeout_s} s"
            )
        if self.failed:
            raise ConclaveCommError(f"ubatch {index}: another half of the batch failed")

    def _begun(self) -> list[tuple[bool, bool]]:
        return list(zip(self.running, self.ended, strict=True))

    def pass_on(self, index: int) -> None:
        """Gives the turn to the next half that has not ended, which may be this one."""
        count = len(self.ended)
        order = [(index + step) % count for step in range(1, count + 1)]
        self.turn = next((i for i in order if not self.ended[i]), index)
        self.changed.notify_all()


class UBatchContext:
    """One half, as a context manager of the thread that runs it.

    Args:
        id: 0 and on. token_offset: where its tokens begin in the batch.
    """

    def __init__(self, id: int, peers: list[UBatchContext], turn: _Turn, token_offset: int) -> None:
        self.id = id
        self.token_offset = token_offset
        self.recv_hook: Callable[[], None] | None = None
        self._peers, self._turn = peers, turn

    def __enter__(self) -> UBatchContext:
        if current() is not None:
            raise ConclaveRuntimeError("ubatch: this thread runs a half of a batch already")
        with self._turn.changed:
            self._turn.running[self.id] = True
            self._turn.changed.notify_all()
            self._turn.wait_for(self.id)
        _local.context = self
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        _local.context = None
        try:
            if kind is None:
                self.maybe_run_recv_hook()
        except BaseException:
            kind = True
            raise
        finally:
            with self._turn.changed:
                self._turn.ended[self.id] = True
                self._turn.failed = self._turn.failed or kind is not None
                self._turn.pass_on(self.id)

    def yield_(self) -> None:
        """Lets the next half run, and returns when the turn comes back."""
        with self._turn.changed:
            self._turn.pass_on(self.id)
            self._turn.wait_for(self.id)

    def register_recv_hook(self, hook: Callable[[], None]) -> None:
        """Leaves a hook for the next half, which runs it before it waits for rows of its own."""
        peer = self._peers[(self.id + 1) % len(self._peers)]
        if peer.recv_hook is not None:
            raise ConclaveRuntimeError(
                f"recv_hook: ubatch {peer.id} has one that did not run; two are not kept"
            )
        peer.recv_hook = hook

    def maybe_run_recv_hook(self) -> None:
        """Runs the hook that another half left, once."""
        hook, self.recv_hook = self.recv_hook, None
        if hook is not None:
            hook()


def make_ubatch_contexts(
    num_micro_batches: int = 2,
    *,
    token_offsets: list[int] | None = None,
    timeout_s: float = 300.0,
) -> list[UBatchContext]:
    """Contexts of the halves of one batch, for one thread each. The first begins when all have
    entered. A half that fails ends the others' waits with ConclaveCommError, and so does a turn
    that does not come within timeout_s."""
    if num_micro_batches < 2:
        raise ConclaveValueError(
            f"num_micro_batches: expected 2 or more, found {num_micro_batches}"
        )
    offsets = [0] * num_micro_batches if token_offsets is None else token_offsets
    if len(offsets) != num_micro_batches:
        raise ConclaveValueError(
            f"token_offsets: expected {num_micro_batches} numbers, found {len(offsets)}"
        )
    turn = _Turn(num_micro_batches, timeout_s)
    contexts: list[UBatchContext] = []
    for index, offset in enumerate(offsets):
        contexts.append(UBatchContext(index, contexts, turn, offset))
    return contexts


def current() -> UBatchContext | None:
    """The context of this thread."""
    return getattr(_local, "context", None)


def dbo_enabled() -> bool:
    """Whether this thread runs a half of a batch."""
    return current() is not None


def dbo_current_ubatch_id() -> int:
    """Of this thread's half; 0 outside."""
    found = current()
    return 0 if found is None else found.id


def dbo_current_ubatch_token_offset() -> int:
    """Where this thread's half begins in the batch; 0 outside."""
    found = current()
    return 0 if found is None else found.token_offset


def dbo_register_recv_hook(recv_hook: Callable[[], None]) -> None:
    """Leaves a hook for the next half; does nothing outside."""
    found = current()
    if found is not None:
        found.register_recv_hook(recv_hook)


def dbo_maybe_run_recv_hook() -> None:
    """Runs the hook that the other half left; does nothing outside."""
    found = current()
    if found is not None:
        found.maybe_run_recv_hook()


def dbo_yield() -> None:
    """Lets the other half run; does nothing outside."""
    found = current()
    if found is not None:
        found.yield_()
