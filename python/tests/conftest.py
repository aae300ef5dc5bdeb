"""What the tests share."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator

import numpy
import pytest

import conclave
from conclave import _runtime
from support.devices import DEVICES
from support.problems import Problem, make_problem

ROOT = pathlib.Path(__file__).resolve().parents[2]


# Read by torch.compile when it is imported, here and in programs that tests start. Its compilers
# run in this process, since each process for them imports torch anew; the code around our operators
# has no vectors, whose headers and trials of instruction sets take a third of the compiling.
COMPILER_SETTINGS = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}


def pytest_configure() -> None:
    """Lets processes that run tests side by side share the cores."""
    for name, value in COMPILER_SETTINGS.items():
        os.environ.setdefault(name, value)
    side_by_side = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if side_by_side == 1:
        return
    with contextlib.suppress(ImportError):
        import torch

        torch.set_num_threads(max(1, torch.get_num_threads() // side_by_side))


@pytest.fixture(scope="session")
def testdata() -> pathlib.Path:
    return ROOT / "testdata"


@pytest.fixture
def problem() -> Problem:
    """A small layer of odd sizes, and tokens for it."""
    return make_problem(numpy.random.default_rng(7))


@pytest.fixture
def make() -> Callable[..., Problem]:
    return make_problem


@pytest.fixture(scope="session")
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def float32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of codes keep rows in float32, as that bar asks: bf16 pairs need more than AVX-512."""
    with contextlib.suppress(conclave.Error):
        _runtime.context("cpu", "avx512")
        monkeypatch.setenv("CONCLAVE_ISA", "avx512")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where torch makes tensors that are not told where."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.set_default_device(request.param)
    yield request.param
    torch.set_default_device(None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = no_cuda_reason()
    if reason is None:
        return
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))


def no_cuda_reason() -> str | None:
    """Why tests on a GPU cannot run here."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    import conclave

    for backend in conclave._conclave.backends():
        if backend["name"] == "cuda" and not backend["usable"]:
            return f"conclave: {backend['reason']}"
    return None
