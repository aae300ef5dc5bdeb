"""Tuning tables as values, and the list of choices; test_cuda.py runs the choices."""

from __future__ import annotations

import pytest

import conclave
from conclave.errors import (
    ConclaveRuntimeError,
    ConclaveTypeError,
    ConclaveUnsupportedError,
    ConclaveValueError,
)

ENTRY = {
    "device": "NVIDIA H200",
    "format": "bf16",
    "num_experts": 128,
    "hidden_size": 2048,
    "intermediate_size": 768,
    "top_k": 8,
    "tokens": 64,
    "kernel": "cuda.stream_sm90",
    "tile": "16x128x128B, 6 stages",
    "microseconds": 71.5,
}
SPEC = conclave.MoeSpec(num_experts=8, top_k=2, hidden_size=64, intermediate_size=64)


def test_a_table_of_entries_is_that_of_their_text() -> None:
    other = {**ENTRY, "tokens": 16}
    table = conclave.TuningTable([ENTRY, other])
    assert table.entries == [other, ENTRY]
    assert conclave.TuningTable.parse(table.to_text()).entries == table.entries
    assert conclave.TuningTable(table.entries).to_text() == table.to_text()
    assert len(conclave.TuningTable([])) == 0


def test_the_later_entry_counts_and_tile_and_time_may_be_missing() -> None:
    short = {n: v for n, v in ENTRY.items() if n not in ("tile", "microseconds")}
    (found,) = conclave.TuningTable([ENTRY, {**short, "kernel": "cuda.decode_sm90"}]).entries
    assert found == {**ENTRY, "kernel": "cuda.decode_sm90", "tile": "", "microseconds": 0.0}


@pytest.mark.parametrize("name", sorted(ENTRY.keys() - {"tile", "microseconds"}))
def test_an_entry_that_no_layer_would_find_is_refused(name: str) -> None:
    less = {key: value for key, value in ENTRY.items() if key != name}
    with pytest.raises(conclave.Error, match="tuning table") as caught:
        conclave.TuningTable([less])
    assert caught.value.name == "kTuningSyntax" and caught.value.file == "entries"


def test_wrong_fields_of_an_entry_are_named() -> None:
    with pytest.raises(ConclaveValueError, match="stages"):
        conclave.TuningTable([{**ENTRY, "stages": 4}])
    with pytest.raises(ConclaveTypeError, match=r"tokens.*an integer"):
        conclave.TuningTable([{**ENTRY, "tokens": "64"}])
    with pytest.raises(conclave.Error, match="tuning table"):
        conclave.TuningTable([{**ENTRY, "kernel": "a | b"}])


def test_the_cpu_has_nothing_to_choose() -> None:
    assert conclave.tuning_candidates(SPEC, 64, device="cpu") == []


def test_candidates_name_what_is_wrong() -> None:
    with pytest.raises(ConclaveValueError, match="tokens: expected 1 or more, found 0"):
        conclave.tuning_candidates(SPEC, 0)
    with pytest.raises(ConclaveTypeError, match="top_k"):
        conclave.tuning_candidates({"top_k": "2"}, 1, device="cpu")
    with pytest.raises(ConclaveValueError, match="tile"):
        conclave.tuning_candidates(SPEC, 1, device="cpu", options={"tile": 1})


def test_candidates_of_a_device_that_is_not_here() -> None:
    # Without a driver CUDA is not supported; with one the number is too high.
    with pytest.raises((ConclaveUnsupportedError, ConclaveRuntimeError)):
        conclave.tuning_candidates(SPEC, 1, device="cuda:63")
