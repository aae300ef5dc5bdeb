"""Arguments that are no values of theirs, of layers, checkpoints, ranks, refits and what else takes
some: every one is a `conclave.Error` that begins with the argument's name, and nothing has changed.
"""

from __future__ import annotations

import pathlib
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
SPEC_FIELDS = {
    "num_experts": E,
    "top_k": 2,
    "hidden_size": H,
    "intermediate_size": INNER,
    "weight_dtype": "float32",
}
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


MODEL = pathlib.Path(__file__).parents[2] / "testdata" / "qwen3-moe-tiny"
CONFIG = MODEL.joinpath("config.json").read_text()
NO_TEXTS = (3, b"cpu", [], object())
NO_RECORDS = (3, "x", [1], object(), conclave.MoeSpec)


def from_checkpoint(**given: Any) -> None:
    conclave.Layer.from_checkpoint(**({"checkpoint": MODEL, "layer": 0} | given))


def from_tensors(**given: Any) -> None:
    conclave.Layer.from_tensors(**({"spec": SPEC} | weights() | given))


def reload(**given: Any) -> None:
    conclave.Layer.from_tensors(SPEC, **weights()).reload(**(weights() | given))


def reload_model(**given: Any) -> None:
    layer = conclave.Layer.from_checkpoint(MODEL, 0)
    layer.reload(**({"checkpoint": MODEL, "layer": 0} | given))


def on_ranks(**given: Any) -> None:
    conclave.Layer.from_tensors(SPEC, **weights()).on_ranks(**(weights() | given))


def load_adapter(**given: Any) -> None:
    options = conclave.LayerOptions(max_adapter_rank=4)
    layer = conclave.Layer.from_tensors(SPEC, options=options, **weights())
    arrays = {"down_a": ROWS, "down_b": ROWS} if "scale" in given or "name" in given else {}
    layer.load_adapter(**((arrays or {"directory": MODEL, "layer": 0}) | given))


def open_model(**given: Any) -> None:
    conclave.Checkpoint(**({"directory": MODEL} | given))


def feed(**given: Any) -> None:
    of_layers = {"spec": SPEC, "model_type": "qwen3_moe", "layers": [0]}
    conclave.Feed(**(given if "config_json" in given else of_layers | given))


def put(**given: Any) -> None:
    array = numpy.zeros((2, 2), dtype="float32")
    conclave.Feed(CONFIG).put(**({"name": "x", "tensor": array} | given))


def ask_feed(call: str) -> Callable[..., None]:
    def ask(**given: Any) -> None:
        getattr(conclave.Feed(CONFIG), call)(**given)

    return ask


def connect(**given: Any) -> None:
    conclave.connect(**({"transport": "local"} | given))


def survive(**given: Any) -> None:
    conclave.survivors(**({"failed": everyone()} | given))


def group_of(**given: Any) -> None:
    conclave.local_group(**({"num_ranks": 1} | given))


def operation(call: str, *names: str) -> Callable[..., None]:
    """An operation of a rank, whose other arguments are right."""

    def operate(**given: Any) -> None:
        send, recv = numpy.zeros(2, dtype="float32"), numpy.zeros(2, dtype="float32")
        right = {"send": send, "recv": recv, "send_counts": [2], "recv_counts": [2], "reason": ""}
        getattr(everyone(), call)(**({name: right[name] for name in names} | given))

    return operate


def candidates(**given: Any) -> None:
    conclave.tuning_candidates(**({"spec": SPEC, "tokens": 1} | given))


VECTORS = ("send", "recv")
BLOCKS = ("send", "send_counts", "recv", "recv_counts")
NO_COUNTS = (3, "x", [1.5], [None], object())
MAKING: list[tuple[Callable[..., None], str, tuple[Any, ...]]] = [
    (from_checkpoint, "checkpoint", (None, 3, [], object())),
    (from_checkpoint, "layer", (None, 1.5, "0", [0], object(), 2**64)),
    (from_checkpoint, "device", NO_TEXTS),
    (from_checkpoint, "isa", NO_TEXTS),
    (from_checkpoint, "options", NO_RECORDS),
    (from_checkpoint, "parallel", NO_RECORDS),
    (from_checkpoint, "count", NO_FLAGS),
    (from_checkpoint, "plain_rows", (None, *NO_FLAGS)),
    (from_checkpoint, "communicator", (3, "x", [])),
    (from_checkpoint, "tensor_communicator", (3, "x", [])),
    (from_tensors, "spec", (None, *NO_RECORDS)),
    (from_tensors, "device", NO_TEXTS),
    (from_tensors, "isa", NO_TEXTS),
    (from_tensors, "options", NO_RECORDS),
    (from_tensors, "parallel", NO_RECORDS),
    (from_tensors, "gate_up_order", (None, *NO_TEXTS, "both")),
    (from_tensors, "shared_gate_up_order", (None, *NO_TEXTS, "both")),
    (from_tensors, "transposed", (None, *NO_FLAGS)),
    (from_tensors, "expert_map", (*NO_LISTS, [0, 1, -2])),
    (from_tensors, "count", NO_FLAGS),
    (from_tensors, "gate_up", (3, "x", object())),
    (from_tensors, "down", (3, "x", object())),
    (from_tensors, "router", (3, "x", object())),
    (reload, "mode", (None, *NO_TEXTS, "anyhow")),
    (reload, "gate_up_order", (None, *NO_TEXTS)),
    (reload, "transposed", (None, *NO_FLAGS)),
    (reload, "expert_map", NO_LISTS),
    (reload_model, "checkpoint", (3, [], object())),
    (reload_model, "layer", (None, 1.5, "0", [0], object())),
    (on_ranks, "transposed", (None, *NO_FLAGS)),
    (on_ranks, "expert_map", NO_LISTS),
    (on_ranks, "old_ranks", NO_LISTS),
    (load_adapter, "directory", (3, [], object())),
    (load_adapter, "layer", (None, 1.5, "0", [0], object())),
    (load_adapter, "checkpoint", (3, "x", object())),
    (load_adapter, "scale", (None, "1", [], object())),
    (load_adapter, "name", (None, *NO_TEXTS)),
    (open_model, "directory", (None, 3, [], object())),
    (open_model, "experts", (None, *NO_TEXTS)),
    (open_model, "extra_layers", (None, *NO_FLAGS)),
    (open_model, "verify", (None, *NO_FLAGS)),
    (feed, "config_json", (3, b"{}", [])),
    (feed, "model_type", (None, *NO_TEXTS)),
    (feed, "layers", (*NO_LISTS, [-1])),
    (feed, "quantization", (3, [], object(), {"bits": object()})),
    (put, "name", (None, *NO_TEXTS)),
    (put, "tensor", (None, 3, "x", object())),
    (put, "type", (1.5, [], object(), -1)),
    (put, "shape", ([2, 2],)),
    (ask_feed("missing"), "limit", NO_NUMBERS),
    (ask_feed("is_complete"), "layer", (None, *NO_NUMBERS[1:])),
    (ask_feed("layer"), "index", (None, *NO_NUMBERS[1:])),
    (ask_feed("release"), "layer", (None, *NO_NUMBERS[1:])),
    (connect, "transport", (None, *NO_TEXTS)),
    (connect, "rank", (None, *NO_NUMBERS[1:])),
    (connect, "size", (None, *NO_NUMBERS[1:])),
    (connect, "meeting_point", (None, *NO_TEXTS)),
    (connect, "device", (None, *NO_TEXTS)),
    (connect, "group", NO_NUMBERS),
    (connect, "timeout", (None, "1", [], object(), 0, -1)),
    (survive, "failed", (None, 3, "x", object())),
    (survive, "deadline", ("1", [], object(), 0, -1)),
    (group_of, "num_ranks", (None, *NO_NUMBERS, 0)),
    (group_of, "timeout", (None, "1", [], object(), 0)),
    (operation("all_gather", *VECTORS), "send", (None, 3, "x", object())),
    (operation("all_gather", *VECTORS), "recv", (None, 3, "x", object())),
    (operation("all_gather", *VECTORS), "counts", (*NO_COUNTS, [3])),
    (operation("all_gather", *VECTORS), "phase", (None, *NO_TEXTS)),
    (operation("all_reduce", *VECTORS), "phase", (None, *NO_TEXTS)),
    (operation("all_to_all", *BLOCKS), "send_counts", (None, *NO_COUNTS, [3])),
    (operation("all_to_all", *BLOCKS), "recv_counts", (None, *NO_COUNTS, [3])),
    (operation("begin_all_to_all", *BLOCKS), "send_counts", (None, *NO_COUNTS, [3])),
    (operation("begin_all_to_all", *BLOCKS), "phase", (None, *NO_TEXTS)),
    (operation("abort"), "reason", (None, *NO_TEXTS)),
    (candidates, "spec", (None, *NO_RECORDS)),
    (candidates, "tokens", (None, *NO_NUMBERS, 0)),
    (candidates, "options", NO_RECORDS),
    (candidates, "parallel", NO_RECORDS),
]


@pytest.mark.parametrize(
    ("call", "name", "values"), MAKING, ids=lambda v: getattr(v, "__name__", v)
)
def test_wrong_types_are_errors_by_name(
    call: Callable[..., None], name: str, values: tuple[Any, ...]
) -> None:
    for value in values:
        with pytest.raises(conclave.Error, match=rf"^{name}\b"):
            call(**{name: value})


def test_fields_of_records_are_named() -> None:
    for fields, name in (
        ({"router": 3}, "router"),
        ({"router": {"options": 3}}, r"router\.options"),
        ({"activation": {"limit": "x"}}, r"activation\.limit"),
        ({3: 3}, "3"),
    ):
        with pytest.raises(conclave.Error, match=f"^{name}"):
            conclave.Layer.from_tensors({**SPEC_FIELDS, **fields}, **weights())


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


def reload_with(made: conclave.Layer, /, **given: Any) -> None:
    made.reload(**given)


BESIDE_FILES: dict[str, Any] = {
    "gate_up_order": "interleaved",
    "shared_gate_up_order": "interleaved",
    "transposed": True,
    "expert_map": [0, 1, 2],
    "down": numpy.zeros((E, H, INNER), "float32"),
}


@pytest.mark.parametrize("call", [reload_with, stage])
@pytest.mark.parametrize("name", BESIDE_FILES)
def test_what_says_how_arrays_lie_is_refused_beside_files(
    layer: conclave.Layer, call: Callable[..., None], name: str
) -> None:
    """Nobody would read it: the caller means something else than what would happen."""
    given = {"checkpoint": "nowhere", "layer": 0, name: BESIDE_FILES[name]}
    if call is stage:
        given.pop("layer")  # which `stage` brings along
    with pytest.raises(ConclaveTypeError, match=rf"^{name}: .*beside a checkpoint"):
        call(layer, **given)


def test_numbers_of_layers_are_refused_beside_arrays(layer: conclave.Layer) -> None:
    refit = layer.refit()
    for call in (layer.reload, refit.stage):
        with pytest.raises(ConclaveTypeError, match=r"^layer: .*beside arrays"):
            call(layer=0, **weights())
    refit.rollback()
    layer.reload(gate_up_order="concatenated", transposed=False, **weights())


def test_adapters_come_from_a_directory_or_from_arrays() -> None:
    made = conclave.Layer.from_tensors(SPEC, options={"max_adapter_rank": 2}, **weights())
    factors = {
        "up_a": numpy.ones((E, 1, H), "float32"),
        "up_b": numpy.ones((E, INNER, 1), "float32"),
    }
    for name, value in (("scale", 0.5), ("name", "x"), ("up_a", factors["up_a"])):
        with pytest.raises(ConclaveTypeError, match=rf"^{name}: .*beside a directory"):
            made.load_adapter("nowhere", 0, **{name: value})
    for name, value in (("layer", 0), ("gate_up_order", "interleaved")):
        with pytest.raises(ConclaveTypeError, match=rf"^{name}: .*beside arrays"):
            made.load_adapter(**{name: value}, **factors)
    assert made.adapters == []


LOGITS = numpy.random.default_rng(3).standard_normal((2, E), dtype="float32")
IDS = numpy.array([[0, 1], [1, 2]], dtype="int32")
SLOTS = conclave.balance_experts([1.0, 2.0, 3.0], num_ranks=1)


def with_right(call: Callable[..., Any], **right: Any) -> Callable[..., None]:
    """The call with right arguments but for those that are given."""

    def made(**given: Any) -> None:
        call(**(right | given))

    made.__name__ = call.__name__
    return made


route = with_right(
    conclave.route, gating_output=LOGITS, topk=2, router=conclave.RouterSpec(renormalize="sum")
)
fused = with_right(
    conclave.fused_topk, hidden_states=ROWS, gating_output=LOGITS, topk=2, renormalize=True
)
biased = with_right(
    conclave.fused_topk_bias,
    hidden_states=ROWS,
    gating_output=LOGITS,
    e_score_correction_bias=None,
    topk=2,
    renormalize=True,
)
grouped = with_right(
    conclave.grouped_topk,
    hidden_states=ROWS,
    gating_output=LOGITS,
    topk=1,
    renormalize=True,
    num_expert_group=3,
    topk_group=2,
)
align = with_right(conclave.moe_align_block_size, topk_ids=IDS, block_size=2, num_experts=E)
permute = with_right(
    conclave.moe_permute, hidden_states=ROWS, a1q_scale=None, topk_ids=IDS, n_expert=E
)
unpermute = with_right(
    conclave.moe_unpermute,
    out=ROWS.copy(),
    permuted_hidden_states=numpy.zeros((4, H), dtype="float32"),
    topk_weights=numpy.ones((2, 2), dtype="float32"),
    inv_permuted_idx=numpy.arange(4, dtype="int32"),
)
balance = with_right(conclave.balance_experts, load=[1.0, 2.0, 3.0], num_ranks=1)
balanced = with_right(conclave.balancedness, load=[1.0, 2.0, 3.0], slots=SLOTS)
spread = with_right(conclave.spread_over, before=SLOTS, old_ranks=[0])
moved = with_right(conclave.moved_experts, before=SLOTS, after=SLOTS)

NO_ARRAYS = (None, 3, "x", object(), range(3))
OTHERS: list[tuple[Callable[..., None], str, tuple[Any, ...]]] = [
    (route, "gating_output", NO_ARRAYS),
    (route, "topk", (None, *NO_NUMBERS, 0, LOGITS)),
    (route, "router", (None, 3, "topk", {}, conclave.RouterSpec)),
    (route, "tensors", (3, "x", [1], LOGITS)),
    (fused, "topk", (None, *NO_NUMBERS, 0)),
    (fused, "scoring_func", (None, 3, b"softmax", [], LOGITS, "best")),
    (biased, "hash_indices_table", (3, "x", IDS[0])),
    (biased, "routed_scaling_factor", (None, "x", [])),
    (grouped, "num_expert_group", (None, *NO_NUMBERS)),
    (align, "topk_ids", (None, 3, [[0, 1]], IDS[0])),
    (align, "expert_map", (3, "abc", [0])),
    (permute, "hidden_states", (None, 3, ROWS[0])),
    (permute, "topk_ids", (None, 3, [[0, 1]], IDS[0])),
    (unpermute, "permuted_hidden_states", (None, 3, ROWS[0])),
    (unpermute, "inv_permuted_idx", (None, 3, "x", [0, 1, 2, 3])),
    (balance, "load", (None, 3, "abc", ["x"], [None])),
    (balance, "rule", (None, *NO_TEXTS, "best")),
    (balance, "previous", (3, "abc", [None], [0.5], ROWS)),
    (balance, "distinct_ranks", (None, *NO_FLAGS)),
    (balance, "least_gain", (None, "x", [])),
    (balanced, "load", (None, 3, "abc", ["x"])),
    (balanced, "slots", (None, 3, [0, 1, 2])),
    (spread, "before", (None, 3, [0, 1, 2])),
    (spread, "old_ranks", (None, 3, "abc", [0.5], [-2])),
    (moved, "before", (None, 3, "x")),
    (moved, "after", (None, 3, "x")),
]


@pytest.mark.parametrize(
    ("call", "name", "values"), OTHERS, ids=lambda v: getattr(v, "__name__", v)
)
def test_wrong_arguments_of_functions_are_errors_by_name(
    call: Callable[..., None], name: str, values: tuple[Any, ...]
) -> None:
    call()
    for value in values:
        with pytest.raises(conclave.Error, match=rf"^{name}\b"):
            call(**{name: value})


def test_wrong_arguments_of_a_balancer_are_errors_by_name(layer: conclave.Layer) -> None:
    for given, name in (
        ({"layers": 3}, "layers"),
        ({"layers": [ROWS]}, r"layers\[0\]"),
        ({"communicator": "x"}, "communicator"),
        ({"rule": 3}, "rule"),
        ({"num_nodes": "1"}, "num_nodes"),
        ({"use_async": 1}, "use_async"),
        ({"processor_share": "x"}, "processor_share"),
    ):
        right = {"layers": [layer], "communicator": everyone()}
        with pytest.raises(conclave.Error, match=rf"^{name}"):
            conclave.Balancer(**(right | given))
    with pytest.raises(ConclaveTypeError, match=r"^layer\b"):
        conclave.Migration(ROWS, SLOTS, everyone())
