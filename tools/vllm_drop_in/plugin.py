"""A pytest plugin: tests of a vLLM tree import conclave.vllm, and run on the CPU.

DROP_IN_TREE names the tree, DROP_IN_LOG a file that gets a JSON line for each test, DROP_IN_MOST
the most tests of one function that are run. Devices called cuda become cpu, and the platform says
that it is one of CUDA, so that tests that ask for a GPU run at all. What is neither this package's
nor in PURE raises when it is used, so that no stand-in can make a test pass.
"""

from __future__ import annotations

import collections
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import signal
import sys
import types
from typing import Any

import parts
import pytest
import torch
from torch.overrides import TorchFunctionMode

import conclave.vllm
from conclave.vllm.engine import _finder
from conclave.vllm.engine._absent import Absent, ConclaveAbsentError

TREE = pathlib.Path(os.environ["DROP_IN_TREE"])
MOST = int(os.environ.get("DROP_IN_MOST", "24"))
SECONDS = 6  # of processor time for one test, whatever else the machine does
# Files of the tree that only say constants or compute references in torch.
PURE = (
    "vllm.scalar_type",
    "vllm.utils.torch_version",
    "vllm.model_executor.layers.quantization.utils.quant_utils",
    "vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils",
)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Files of PURE from the tree; other modules of vLLM have names that raise when used."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not fullname.startswith("vllm."):
            return None
        if fullname in PURE:
            file = TREE / (fullname.replace(".", "/") + ".py")
            return importlib.util.spec_from_file_location(fullname, file)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__getattr__ = lambda name: _absent(module, name)  # type: ignore[method-assign]


class Unknown(Absent):
    """A name whose attributes can be named too, so that a file can be read. Decorators of Triton
    give one as well: kernels are defined and never run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Unknown(f"{self.__dict__['__conclave_name']}.{name}", _REASON)

    def __call__(self, *args: Any, **named: Any) -> Any:
        name = self.__dict__["__conclave_name"]
        if name.startswith("vllm.triton_utils") and not name.endswith("()"):
            return Unknown(f"{name}()", _REASON)
        return super().__call__(*args, **named)

    def __bool__(self) -> bool:
        self._refuse()


_REASON = "is not part of conclave.vllm"


def _absent(module: types.ModuleType, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name.startswith("has_") or name == "is_deep_gemm_e8m0_used":
        return lambda *_, **__: False  # nothing here uses such a package
    return Unknown(f"{module.__name__}.{name}", _REASON)


def _with_absent_names(lookup: Any) -> Any:
    """Names that the package's modules lack are known to tests, and raise when they are used."""

    def made(module: types.ModuleType, table: dict[str, str]) -> Any:
        find = lookup(module, table)

        def get(name: str) -> Any:
            try:
                found = find(name)
            except AttributeError:
                return _absent(module, name)
            if type(found) is Absent:
                found = _absent(module, name)
                setattr(module, name, found)
            return found

        return get

    return made


class OnCpu(TorchFunctionMode):
    """Calls that name a GPU name the CPU instead."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        named = {name: _place(value) for name, value in (kwargs or {}).items()}
        return function(*map(_place, args), **named)


def _place(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value


_finder._lookup = _with_absent_names(_finder._lookup)
conclave.vllm.install()
sys.meta_path.append(Finder())
sys.path.insert(0, str(TREE))
_mode = OnCpu()
_mode.__enter__()
_set_default = torch.set_default_device
torch.set_default_device = lambda device: _set_default(_place(device))
for _name in ("synchronize", "empty_cache", "manual_seed_all", "set_device"):
    setattr(torch.cuda, _name, lambda *_, **__: None)
for _name in ("synchronize", "empty_cache", "set_device_index", "current_device_index"):
    setattr(torch.accelerator, _name, lambda *_, **__: 0)
torch.accelerator.get_memory_info = lambda *_: (1 << 40, 1 << 40)

import vllm.model_executor.custom_op as custom_op  # noqa: E402
import vllm.model_executor.layers.activation as activation  # noqa: E402
import vllm.v1.worker.workspace as workspace  # noqa: E402
from vllm.platforms import Platform, current_platform  # noqa: E402

# The references of the tests ask for these by name; they are eager torch.
activation.SiluAndMul = parts.SiluAndMul
custom_op.op_registry = parts.ACTIVATIONS
# Layers here have workspaces of their own.
workspace.init_workspace_manager = workspace.reset_workspace_manager = lambda *_, **__: None

Platform.is_cuda = Platform.is_cuda_alike = lambda self: True
Platform.is_cpu = lambda self: False


class Hopper(tuple):
    """A capability of 9.0, as of the GPU that most tests are written for."""

    major, minor = 9, 0

    def to_int(self) -> int:
        return 90


Platform.get_device_capability = lambda self, *_: Hopper((9, 0))
assert current_platform.device_type == "cpu"


@pytest.fixture
def default_vllm_config():
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.fixture
def workspace_init():
    """Layers have workspaces of their own."""


@pytest.fixture
def caplog_vllm(caplog):
    """What the package logs: its logger passes it on."""
    return caplog


@pytest.fixture
def disable_deepgemm_ue8m0():
    """Nothing here is DeepGEMM's."""


@pytest.fixture
def dist_init():
    """One rank needs no groups."""


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--subtests", default=None)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Evenly spaced ones of each function's tests."""
    by_function = collections.defaultdict(list)
    for item in items:
        by_function[item.originalname or item.name].append(item)
    kept = []
    for found in by_function.values():
        step = max(1, -(-len(found) // MOST))
        kept += found[::step]
        _log(function=found[0].nodeid.split("[")[0], collected=len(found), run=len(found[::step]))
    items[:] = kept


def _log(**line: Any) -> None:
    with open(os.environ["DROP_IN_LOG"], "a") as file:
        file.write(json.dumps(line) + "\n")


class Late(Exception):
    """A test took too long on this machine."""


_late: set[str] = set()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: Any) -> Any:
    def stop(*_: Any) -> None:
        _late.add(item.nodeid)
        raise Late(f"ended after {SECONDS} s")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    result = (yield).get_result()
    if result.when != "call" and result.outcome == "passed":
        return
    reason, kind = "", ""
    if result.outcome == "skipped":
        reason = result.longrepr[2] if isinstance(result.longrepr, tuple) else "skipped"
    elif result.outcome == "failed":
        error = call.excinfo.value
        kind = "absent" if isinstance(error, ConclaveAbsentError) else type(error).__name__
        reason = str(error).strip().split("\n")[0][:160] or kind
        if reason.startswith("'_OpNamespace' '_moe_C'"):
            kind = "absent"  # an operator of vLLM's compiled extension, called by the test itself
        if item.nodeid in _late:  # whatever the end of its time was turned into
            kind, reason = "Late", f"ended after {SECONDS} s"
    _log(test=item.nodeid, outcome=result.outcome, kind=kind, reason=reason)


def pytest_collectreport(report: Any) -> None:
    if report.outcome != "passed":
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        last = [line for line in text.split("\n") if line.strip()][-1][:200]
        _log(file=report.nodeid, outcome=report.outcome, reason=last.removeprefix("E   "))
