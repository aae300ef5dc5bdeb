"""How a transaction ends where its `with` block does."""

from __future__ import annotations

from abc import ABC, abstractmethod


def reason_of(error: BaseException) -> str:
    """What other ranks are told of an exception. One that cannot say what it is has its name."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        return name
    # Texts travel as UTF-8, in which some that Python has are none.
    text = text.encode("utf-8", "replace").decode("utf-8")
    return f"{name}: {text}" if text else name


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
    def withdraw(self, reason: str = "") -> None:
        """The same, and tells other ranks, with the reason."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None = None,
        *where: object,
    ) -> None:
        if not self._is_open:
            return
        if kind is not None and not self._has_told:
            self.withdraw(reason_of(raised) if raised is not None else kind.__name__)
            return
        try:
            if kind is None:
                self.commit()
        finally:
            self.rollback()
