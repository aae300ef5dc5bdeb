"""Names of vLLM that are known and stand for nothing here."""

from __future__ import annotations

from typing import Any, NoReturn

from conclave.errors import ConclaveUnsupportedError


class ConclaveAbsentError(ConclaveUnsupportedError, AttributeError):
    """A name of vLLM that stands for nothing here was used."""

    code: int = 113
    name: str = "kUnsupported"  # both bases have such an attribute


class Absent:
    """Can be imported and named in annotations, and does nothing else: to call it, to derive from
    it or to read an attribute of it raises ConclaveAbsentError. Nothing is an instance of it."""

    def __init__(self, name: str, reason: str) -> None:
        self.__dict__.update(__conclave_name=name, __conclave_reason=reason)

    def _refuse(self) -> NoReturn:
        state = self.__dict__
        raise ConclaveAbsentError(f"{state['__conclave_name']}: {state['__conclave_reason']}")

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # the interpreter asks for these of any object
        self._refuse()

    def __mro_entries__(self, _: Any) -> NoReturn:
        self._refuse()

    def __getitem__(self, _: Any) -> NoReturn:
        self._refuse()

    def __instancecheck__(self, _: Any) -> bool:
        return False

    def __subclasscheck__(self, _: Any) -> bool:
        return False

    def __or__(self, _: Any) -> Absent:
        return self

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<{self.__dict__['__conclave_name']}, which is not here>"
