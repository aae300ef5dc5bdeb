"""Arguments of refits, shared weights and regrouping that are no values of theirs: every one is a
`conclave.Error` that begins with the argument's name, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest

import conclave
from conclave.errors import ConclaveTypeError, ConclaveValueError

E, H, INNER = 3, 16, 8
SPEC = conclave.MoeSpec(
    num_experts=E, top_k=2, hidden_size=H, intermediate_size=INNER, weight_dtype="float32"
)
ROWS = numpy.random.default_rng(1).standard_normal((2, H), dtype="float32")

NO_NUMBERS = (-1, 2**64, 1.5, "x", [1], object())
NO_LISTS = (7, "router", object(), numpy.zeros(()), ["a"], [None], [1.0])
NO_FLAGS = (1, "yes", [], object())


def weights() -> dict[str, Any]:
    random = numpy.random.default_rng(2)
    return {
        "gate_up": random.standard_normal((E, 2 * INNER, H), dtype="float32"),
        "down": random.standard_normal((E, H, INNER), dtype="float32"),
        "router": random.standard_normal((E, H), dtype="float32"),
    }


def begin(layer: conclave.Layer, **given: Any) -> None:
    layer.refit(**given)


def stage(layer: conclave.Layer, **given: Any) -> None:
    arrays = {"layer": 0} if "checkpoint" in given else weights()
    refit = layer.refit()
    try:
        refit.stage(**arrays, **given)
    finally:
        refit.rollback()


def everyone() -> conclave.Communicator:
    return conclave.local_group(1)[0]


def migrate(layer: conclave.Layer, **given: Any) -> None:
    conclave.Migration(layer, layer.slots, **({"communicator": everyone()} | given))


def place(layer: conclave.Layer, **given: Any) -> None:
    layer.update_placement(layer.slots, **given)


def regroup(layer: conclave.Layer, **given: Any) -> None:
    layer.regroup(everyone(), **given)


def hand_over(layer: conclave.Layer, **given: Any) -> None:
    layer.hand_over(everyone(), **given)


def forward(layer: conclave.Layer, **given: Any) -> None:
    layer(ROWS, **given)


WRONG: list[tuple[Callable[..., None], str, tuple[Any, ...]]] = [
    (begin, "mode", (None, 3, b"staged", [])),
    (begin, "experts", (*NO_LISTS, [], [1, 1], [-1], [2**31], [E], [[0]])),
    (begin, "tensors", (7, "router", [], [b"down"], ["down", "down"], ["gait"])),
    (begin, "epoch", (*NO_NUMBERS, 0)),
    (begin, "threads", (*NO_NUMBERS, 0, 2**31)),
    (begin, "keeps_memory", (None, *NO_FLAGS)),
    (stage, "experts", (*NO_LISTS, [], [1, 1])),
    (stage, "tensors", (7, "router", [], ["router", "router"])),
    (stage, "gate_up_order", (None, 3)),
    (stage, "shared_gate_up_order", (None, 3)),
    (stage, "transposed", (None, *NO_FLAGS)),
    (stage, "expert_map", (*NO_LISTS, [0, 1, -2], [0, 1, 2**31])),
    (stage, "root", NO_NUMBERS),
    (stage, "checkpoint", (3, [], object())),
    (migrate, "processor_share", ("x", None, [])),
    (migrate, "piece_bytes", NO_NUMBERS),
    (migrate, "communicator", (None, 3, "x")),
    (migrate, "source", ((), 3, (3, 0), "ab")),
    (place, "piece_bytes", NO_NUMBERS),
    (place, "communicator", (3, "x")),
    (place, "source", ((), 3, (3, 0), "ab")),
    (regroup, "processor_share", ("x", None, [])),
    (regroup, "piece_bytes", NO_NUMBERS),
    (regroup, "source", ((), 3, (3, 0), "ab")),
    (hand_over, "processor_share", ("x", None, [])),
    (hand_over, "piece_bytes", NO_NUMBERS),
    (forward, "num_tokens", (-1, 2**64, 1.5, "x")),
]


@pytest.fixture(scope="module")
def layer() -> conclave.Layer:
    return conclave.Layer.from_tensors(SPEC, **weights())


@pytest.mark.parametrize(("call", "name", "values"), WRONG, ids=lambda v: getattr(v, "__name__", v))
def test_wrong_values_are_errors_by_name(
    layer: conclave.Layer, call: Callable[..., None], name: str, values: tuple[Any, ...]
) -> None:
    before = layer(ROWS)
    for value in values:
        with pytest.raises(conclave.Error, match=rf"^(RefitScope\.)?{name}"):
            call(layer, **{name: value})
    layer.refit().rollback()  # none of them holds the layer
    assert numpy.array_equal(layer(ROWS), before)


def test_named_experts_may_be_an_array(layer: conclave.Layer) -> None:
    named = numpy.array([2, 0])
    part = {name: array[named] for name, array in weights().items() if name != "router"}
    with layer.refit(experts=named) as refit:
        refit.stage(experts=named, **part)
    assert layer.content_hash() == conclave.Layer.from_tensors(SPEC, **weights()).content_hash()


def test_writers_and_readers_of_shared_memory(tmp_path: Any) -> None:
    path = tmp_path / "weights"
    for name, values in (
        ("path", (None, 3, [])),
        ("layer", NO_NUMBERS),
        ("experts", (*NO_LISTS, [], [1, 1])),
        ("gate_up_order", (None, 3)),
        ("transposed", (None, *NO_FLAGS)),
    ):
        for value in values:
            given = {"path": path, name: value}
            with pytest.raises(conclave.Error, match=f"^{name}"):
                conclave.SharedWeightsWriter(given.pop("path"), SPEC, **given, **weights())
    writer = conclave.SharedWeightsWriter(path, SPEC, **weights())
    for value in (*NO_NUMBERS, 0):
        with pytest.raises(conclave.Error, match=r"^version"):
            writer.publish(version=value, **weights())
    assert writer.publish(**weights()) == 1
    for value in NO_FLAGS:
        with pytest.raises(ConclaveTypeError, match=r"^verify"):
            conclave.SharedWeights(path, verify=value)
    with pytest.raises(ConclaveTypeError, match=r"^path"):
        conclave.SharedWeights(3)  # type: ignore[arg-type]


def test_slots_of_other_ranks_are_not_compared() -> None:
    two, one = conclave.ExpertSlots(2, (0, 1), (0, 1, 2)), conclave.ExpertSlots(2, (0, 1), (0, 2))
    with pytest.raises(ConclaveValueError, match="moved_experts"):
        conclave.moved_experts(two, one)
