"""Whether weights have changed: optimisers, views, and locks of packed layers in children."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import conclave  # noqa: E402
from conclave import vllm  # noqa: E402
from conclave._locks import ForkSafeLock  # noqa: E402
from conclave._watched import Watched  # noqa: E402
from conclave.vllm import _packed  # noqa: E402
from support.devices import host_only  # noqa: E402
from support.optimisers import FUSED, fused_step  # noqa: E402
from support.vllm_reference import random_case  # noqa: E402

pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize("name", FUSED)
def test_fused_step_is_seen(name: str) -> None:
    weights, idle = (torch.nn.Parameter(torch.ones(8)) for _ in range(2))
    watched, unchanged = Watched([weights]), Watched([idle])
    assert watched.is_current([weights])
    weights.grad = torch.ones(8)
    fused_step(name, [weights, idle])
    assert float(weights.detach()[0]) != 1.0
    assert not watched.is_current([weights])
    assert unchanged.is_current([idle])  # had no gradient


@pytest.mark.parametrize("name", FUSED)
def test_fused_step_reaches_fused_moe(name: str) -> None:
    layer = vllm.FusedMoE(
        num_experts=4, top_k=2, hidden_size=24, intermediate_size=16,
        params_dtype=torch.float32, prefix="",
    )  # fmt: skip
    with torch.no_grad():
        for weights in layer.parameters():
            weights.copy_(torch.randn(weights.shape) / 4)
        hidden, scores = torch.randn(5, 24), torch.randn(5, 4)
        before = layer(hidden, scores)
    for weights in layer.parameters():
        weights.grad = torch.ones_like(weights)
    fused_step(name, list(layer.parameters()))
    with torch.no_grad():
        after = layer(hidden, scores)
        vllm.forget_packed_layers()
        assert torch.equal(after, layer(hidden, scores))
    assert not torch.equal(after, before)


def test_writes_are_seen_through_detached_weights() -> None:
    hidden, w1, w2, weights, ids = random_case(2, 9, 40, 48, 6, 2, torch.float32)
    w2 = torch.nn.Parameter(w2)
    first = conclave.fused_experts(hidden, w1, w2.detach(), weights, ids)
    with torch.no_grad():
        w2.mul_(2)
    assert torch.equal(conclave.fused_experts(hidden, w1, w2.detach(), weights, ids), 2 * first)


def exit_of_child(work: Callable[[], bool]) -> int:
    """0: `work` said True in a forked child; 1: it did not; -9: it hung."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def hold() -> Callable[[ForkSafeLock], None]:
    """Another thread takes a lock until the test ends."""
    ends, threads = threading.Event(), []

    def start(lock: ForkSafeLock) -> None:
        taken = threading.Event()

        def work() -> None:
            with lock.now:
                taken.set()
                ends.wait(60)

        threads.append(threading.Thread(target=work))
        threads[-1].start()
        assert taken.wait(60)

    yield start
    ends.set()
    for thread in threads:
        thread.join()


@host_only
def test_child_packs_while_the_parent_packs(hold: Callable) -> None:
    vllm.forget_packed_layers()
    case = random_case(2, 9, 40, 48, 6, 2, torch.float32)
    known = random_case(3, 9, 40, 48, 6, 2, torch.float32)
    expected = conclave.fused_experts(*known)
    (entry,) = _packed._entries.values()
    hold(_packed._lock)
    entry.is_complete = False  # the thread was packing into it

    def work() -> bool:
        out = conclave.fused_experts(*case)
        same = torch.equal(conclave.fused_experts(*known), expected)
        return same and bool(out.any()) and entry not in _packed._entries.values()

    assert exit_of_child(work) == 0


@host_only
def test_fork_inside_a_lock_lets_go_of_it() -> None:
    lock = ForkSafeLock()

    def work() -> bool:
        return lock.now.acquire(timeout=5)

    with lock.now:
        assert exit_of_child(work) == 0
        assert lock.now.locked()
    assert not lock.now.locked()
