"""Locks that a forked child finds free: the thread that held one does not live in it."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any


class ForkSafeLock:
    """A lock by the name of `now`, which is another one in a child.

    `with lock.now:` lets go of what it took, also where the fork was made in between.
    """

    __slots__ = ("__weakref__", "_make", "now")

    def __init__(self, make: Callable[[], Any] = threading.Lock) -> None:
        self._make = make
        self.now = make()
        _locks.add(self)

    def renew(self) -> None:
        self.now = self._make()


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _renew_in_child() -> None:
    for lock in list(_locks):
        lock.renew()


os.register_at_fork(after_in_child=_renew_in_child)
