"""Puts this package where code written for vLLM looks for its MoE modules.

    import conclave.vllm

    with conclave.vllm.install():
        from vllm.model_executor.layers.fused_moe import FusedMoEFactory

Every name is this package's own and works, or is known by name alone and raises a
ConclaveUnsupportedError that says why when it is used. A module that is not in the table
(`_names.py`) is not found, as if vLLM were not installed.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from conclave.errors import ConclaveRuntimeError
from conclave.vllm.engine import groups
from conclave.vllm.engine._finder import EngineFinder, is_ours
from conclave.vllm.engine._names import OVERLAID, TREE

_ROOT = "vllm"


class Installed:
    """What `install` put in place, until `uninstall` or the end of a with statement."""

    def __init__(self, overlay: bool) -> None:
        self.overlay = overlay
        self._replaced: dict[str, types.ModuleType | None] = {}

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()

    def uninstall(self) -> None:
        """Takes back what this call of `install` did, once."""
        _take_back(self)


_in_force: EngineFinder | None = None
_installed: list[Installed] = []


def install(
    *,
    overlay: bool = False,
    tp_group: Any = None,
    dp_group: Any = None,
    pcp_group: Any = None,
    ep_group: Any = None,
) -> Installed:
    """Makes `import vllm...` of this process find this package's modules.

    Args:
        overlay: with vLLM imported, replace its modules of fused_moe and leave the rest to it.
            Without, vLLM need not be there, and what MoE code imports beside them is ours too.
        tp_group, dp_group, pcp_group, ep_group: what `vllm.distributed` gives for groups: each a
            ProcessGroup of torch.distributed. None: this process alone. Not with overlay.

    Returns:
        A handle that is a context manager too. Calls nest: the last `uninstall` takes all away.
        Names that were imported before go on working.

    Raises:
        ConclaveRuntimeError: if vLLM is imported already and overlay is False, or the reverse; if
            a nested call asks for something else.
    """
    global _in_force
    given = {"tp": tp_group, "dp": dp_group, "pcp": pcp_group, "ep": ep_group}
    if _in_force is not None:
        if overlay != _installed[-1].overlay or any(group is not None for group in given.values()):
            raise ConclaveRuntimeError(
                "install: it is installed already, in another way or with other groups; uninstall "
                "it first"
            )
        _installed.append(Installed(overlay))
        return _installed[-1]
    _check_real(overlay, given)
    if not overlay:
        groups.use(given)
    handle = Installed(overlay)
    names = OVERLAID if overlay else tuple(TREE)
    _in_force = EngineFinder(names)
    sys.meta_path.insert(0, _in_force)
    _installed.append(handle)
    if overlay:
        _replace_modules(handle, names)
    return handle


def uninstall() -> None:
    """Takes back what the last `install` did. Does nothing where nothing is installed."""
    if _installed:
        _take_back(_installed[-1])


def _take_back(handle: Installed) -> None:
    global _in_force
    if handle not in _installed:
        return
    _installed.remove(handle)
    if _installed:  # who comes last gives back what the first replaced
        _installed[0]._replaced.update(handle._replaced)
        return
    if _in_force is None:
        return
    sys.meta_path.remove(_in_force)
    _in_force = None
    for name in [name for name, module in sys.modules.items() if is_ours(module)]:
        _forget(name)
    for name, module in handle._replaced.items():
        if module is not None:
            sys.modules[name] = module
            _set_in_parent(name, module)
    if not handle.overlay:
        groups.use({})


def is_installed() -> bool:
    """Whether `import vllm` finds this package's modules."""
    return _in_force is not None


def _check_real(overlay: bool, given: dict[str, Any]) -> None:
    found = sys.modules.get(_ROOT)
    if found is not None and not overlay:
        place = getattr(found, "__file__", None) or "an unknown place"
        raise ConclaveRuntimeError(
            f"install: vllm is imported already, from {place}; install before it is, or with "
            "overlay=True to replace its modules of fused_moe alone"
        )
    if found is None and overlay:
        raise ConclaveRuntimeError("overlay: expected vllm to be imported, found that it is not")
    if overlay and any(group is not None for group in given.values()):
        raise ConclaveRuntimeError("overlay: the groups are vLLM's own; give none")


def _replace_modules(handle: Installed, names: tuple[str, ...]) -> None:
    # The whole folder, so that no module of it that is not ours goes on holding vLLM's classes.
    top = names[0]
    stale = [name for name in sys.modules if name == top or name.startswith(f"{top}.")]
    for name in dict.fromkeys((*names, *stale)):
        handle._replaced[name] = sys.modules.pop(name, None)
    for name in names:
        importlib.import_module(name)


def _forget(name: str) -> None:
    module = sys.modules.pop(name)
    parent, _, last = name.rpartition(".")
    holder = sys.modules.get(parent)
    if holder is not None and getattr(holder, "__dict__", {}).get(last) is module:
        delattr(holder, last)


def _set_in_parent(name: str, module: types.ModuleType) -> None:
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)
