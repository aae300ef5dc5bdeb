"""Modules whose names are looked up in a table when they are asked for."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import types
from collections.abc import Sequence
from typing import Any

from conclave.vllm.engine._absent import Absent
from conclave.vllm.engine._names import REASONS, TREE

_MARK = "__conclave_engine__"


def is_ours(module: Any) -> bool:
    """Whether a module of sys.modules was made here."""
    return getattr(module, "__dict__", {}).get(_MARK, False)


class EngineFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the table, and no other."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._names:
            return None
        # All are packages, so that a module of another version's layout may lie below.
        return importlib.machinery.ModuleSpec(fullname, self, origin="conclave", is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        table = _targets(module.__name__)
        module.__dict__.update(
            {
                _MARK: True,
                "__doc__": f"Names of {module.__name__}, by conclave.vllm.",
                "__all__": sorted(table),
                "__getattr__": _lookup(module, table),
            }
        )


def _targets(module: str) -> dict[str, str]:
    """The source of each name of a module: "package.module:name", or "!reason"."""
    found: dict[str, str] = {}
    for source, names in TREE[module]:
        for name in names.split():
            theirs, _, ours = name.partition("=")
            found[theirs] = source if source.startswith("!") else f"{source}:{ours or theirs}"
    return found


def _lookup(module: types.ModuleType, table: dict[str, str]) -> Any:
    def find(name: str) -> Any:
        target = table.get(name)
        if target is None:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        value = resolve(f"{module.__name__}.{name}", target)
        setattr(module, name, value)
        return value

    return find


def resolve(name: str, target: str) -> Any:
    """What a name of the table stands for."""
    if target.startswith("!"):
        return Absent(name, REASONS[target[1:]])
    source, _, attribute = target.partition(":")
    return getattr(importlib.import_module(source), attribute)
