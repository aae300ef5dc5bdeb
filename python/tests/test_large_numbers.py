"""Numbers that no machine has memory for, and values that are none, are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest

import conclave
from conclave.errors import ConclaveTypeError, ConclaveValueError

HUGE = 2**31
HIDDEN = numpy.zeros((2, 4), "float32")
IDS = numpy.zeros((2, 1), "int32")
CALLS: dict[str, Callable[[Any], Any]] = {
    "n_expert": lambda n: conclave.moe_permute(HIDDEN, None, IDS, n),
    "n_local_expert": lambda n: conclave.moe_permute(HIDDEN, None, IDS, 4, n),
    "num_experts": lambda n: conclave.moe_align_block_size(IDS, 4, n),
    "num_ranks": lambda n: conclave.balance_experts([1.0, 2.0], num_ranks=n),
    "num_redundant_experts": lambda n: conclave.balance_experts(
        [1.0, 2.0], num_ranks=2, num_redundant_experts=n
    ),
    "num_nodes": lambda n: conclave.balance_experts([1.0, 2.0], num_ranks=2, num_nodes=n),
    "num_threads": conclave.set_num_threads,
    "ranks": lambda n: conclave.launch_command("mpi", n),
}


@pytest.mark.parametrize("name", CALLS)
def test_numbers_beyond_all_limits_are_named(name: str) -> None:
    with pytest.raises(ConclaveValueError, match=f"{name}: .*{HUGE}"):
        CALLS[name](HUGE)
    for value in ("3", 2.0, True):
        with pytest.raises(ConclaveTypeError, match=f"{name}: expected an integer"):
            CALLS[name](value)


def test_groups_of_threads_have_a_limit() -> None:
    for ranks in (0, 4097, HUGE):
        with pytest.raises(ConclaveValueError, match="num_ranks"):
            conclave.local_group(ranks)
    with pytest.raises(ConclaveTypeError, match="num_ranks: expected an integer"):
        conclave.local_group(2.0)
    with pytest.raises(ConclaveTypeError, match="timeout: expected a number"):
        conclave.local_group(2, timeout="3")


def test_what_is_no_layer_and_what_has_no_rows_is_not_recorded() -> None:
    weights = {
        "gate_up": numpy.ones((2, 6, 4), "float32"),
        "down": numpy.ones((2, 4, 3), "float32"),
        "router": numpy.ones((2, 4), "float32"),
    }
    layer = conclave.Layer.from_tensors({"top_k": 1}, **weights)
    recorder = conclave.RoutingRecorder({0: layer})
    recorder.forward(layer, 0, HIDDEN)
    replay = conclave.RoutingReplay(recorder)
    for wrong in (HIDDEN, None, "layer"):
        with pytest.raises(ConclaveTypeError, match="layer: expected a Layer"):
            recorder.forward(wrong, 0, HIDDEN)
        with pytest.raises(ConclaveTypeError, match="layer: expected a Layer"):
            replay.forward(wrong, 0, HIDDEN, [0, 1])
    with pytest.raises(ConclaveValueError, match="hidden"):
        recorder.forward(layer, 0, numpy.zeros((), "float32"))
    assert recorder.recorded_tokens(0) == 2


def test_what_is_no_tensor_is_no_argument_of_a_module() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from conclave import vllm

    layer = vllm.FusedMoE(4, 1, 4, 2, params_dtype=torch.float32)
    hidden, logits = torch.zeros(2, 4), torch.zeros(2, 4)
    with torch.no_grad():
        with pytest.raises(ConclaveTypeError, match="hidden_states: expected a tensor"):
            layer(HIDDEN, logits)
        for wrong in (HIDDEN, [[0.0]], 3):
            with pytest.raises(ConclaveTypeError, match="router_logits: expected a tensor"):
                layer(hidden, wrong)
    with pytest.raises(ConclaveValueError, match="hidden_states"):
        conclave.fused_topk(torch.zeros(()), logits, 1, True)
