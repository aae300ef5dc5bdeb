"""How a transaction ends where its `with` block does."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Transaction(ABC):
    """Commits at the end of a block. Where an exception leaves it, it withdraws, so that other
    ranks hear of it, unless a commit that failed has told them already."""

    _is_open = True
    _has_told = False  # that nothing is committed, by a commit that failed on all ranks

    @abstractmethod
    def commit(self) -> None:
        """Makes what was staged serve."""

    @abstractmethod
    def rollback(self) -> None:
        """Ends it with what there was before; nothing once it has ended."""

    @abstractmethod
    def withdraw(self) -> None:
        """The same, and tells other ranks."""

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if not self._is_open:
            return
        if kind is not None and not self._has_told:
            self.withdraw()
            return
        try:
            if kind is None:
                self.commit()
        finally:
            self.rollback()
