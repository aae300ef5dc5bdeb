"""Messages of the library name what Python calls things by."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import re

import numpy as np
import pytest

import conclave
from conclave import _conclave, spec

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORDS: dict[str, str] = _conclave.python_words
ENUMERATIONS = {name.partition("::")[0] for name in WORDS} - {"Checkpoint"}
ENUMERATIONS -= {name for name in ENUMERATIONS if "." in name}
# Of the interface, but no value that Python gives: it never stands in a message of an Error.
LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
# What C++ calls an enumerator, a member of a class, or a field that Python has no record for.
SPELLING = re.compile(r"(?:\b[A-Za-z]\w*::)+\w+|\bk[A-Z]\w*|\bContextOptions\.\w+")
# Their text is code, not words: of the GPU's assembler, of the format of error codes.
NOT_MESSAGES = ("src/cuda/device/", "src/core/error.cc", "src/cpu/ceilings/")


def declared() -> dict[str, set[str]]:
    """The enumerators of every enumeration in the public headers."""
    found = {}
    for header in (ROOT / "include" / "conclave").rglob("*.h"):
        text = re.sub(r"//[^\n]*", "", header.read_text())
        for name, body in re.findall(r"enum class (\w+)[^{;]*\{([^}]*)\}", text):
            found[name] = set(re.findall(r"\b(k[A-Z]\w*)", body))
    return found


def messages() -> list[tuple[str, str]]:
    """(place, text) of every string of the library's sources."""
    found = []
    for path in sorted((ROOT / "src").rglob("*")):
        place = str(path.relative_to(ROOT))
        if path.suffix not in (".cc", ".h", ".cu", ".cuh") or place.startswith(NOT_MESSAGES):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not line.lstrip().startswith(("#include", "//")):
                found += [(f"{place}:{number}", text) for text in LITERAL.findall(line)]
    return found


def test_every_enumerator_of_an_option_has_a_word():
    enumerations = declared()
    for name in ENUMERATIONS:
        words = {key.partition("::")[2] for key in WORDS if key.startswith(f"{name}::")}
        assert words == enumerations[name], name


def test_options_are_arguments_of_python():
    known = {"device", "num_threads", *inspect.signature(conclave.Checkpoint.__init__).parameters}
    known |= inspect.signature(conclave.RoutingRecorder.__init__).parameters.keys()
    known |= inspect.signature(conclave.convert_model).parameters.keys()
    for name in ("from_tensors", "reload"):
        known |= inspect.signature(getattr(conclave.Layer, name)).parameters.keys()
    for record in vars(spec).values():
        if dataclasses.is_dataclass(record):
            known |= {field.name for field in dataclasses.fields(record)}
    for spelling, words in WORDS.items():
        option, _, _ = words.partition("=")
        assert option in known or words == "python -m conclave manifest", spelling


def test_every_name_of_the_sources_is_translated():
    found = [(place, name) for place, text in messages() for name in SPELLING.findall(text)]
    assert len(found) > 20  # or the pattern sees nothing
    unknown = {place: name for place, name in found if name not in WORDS}
    assert not unknown, "write Enumeration::kName, which python/src/wording.cc translates"


def layer_of(**options: str) -> conclave.Layer:
    rows = np.zeros((4, 16, 8), np.float32)
    return conclave.Layer.from_tensors(
        conclave.MoeSpec(top_k=1), gate=rows, up=rows, down=rows.transpose(0, 2, 1), options=options
    )


def test_refused_id_names_the_option_that_takes_it():
    layer = layer_of()
    hidden, weights = np.ones((2, 8), np.float32), np.ones((2, 1), np.float32)
    with pytest.raises(conclave.ConclaveValueError) as caught:
        layer(hidden, topk_ids=np.array([[0], [9]], np.int32), topk_weights=weights)
    assert caught.value.hint == 'id_policy="skip" drops such ids'
    assert 'id_policy="skip" drops such ids' in str(caught.value) and "::" not in str(caught.value)
    skipping = layer_of(id_policy="skip")
    skipping(hidden, topk_ids=np.array([[0], [9]], np.int32), topk_weights=weights)


def test_names_of_vllm_advise_what_their_callers_can_do():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    vllm = pytest.importorskip("conclave.vllm")
    w1, w2 = torch.ones(4, 16, 8), torch.ones(4, 8, 8)
    hidden, weights = torch.ones(2, 8), torch.ones(2, 1)
    ids = torch.tensor([[0], [9]], dtype=torch.int32)
    layer = vllm.FusedMoE(
        4, 1, 8, 8,
        params_dtype=torch.float32,
        custom_routing_function=lambda **arguments: (weights, ids),
    )  # fmt: skip
    with torch.no_grad():
        layer.w13_weight.copy_(w1)
        layer.w2_weight.copy_(w2)
    calls = {
        "fused_experts": lambda: conclave.fused_experts(hidden, w1, w2, weights, ids),
        "FusedMoE": lambda: layer(hidden, torch.zeros(2, 4)),
    }
    for name, call in calls.items():
        with pytest.raises(conclave.ConclaveValueError) as caught:
            call()
        assert caught.value.hint.startswith("write -1 for a slot of no expert"), name
        assert caught.value.hint in str(caught.value), name
        assert "id_policy" not in str(caught.value), name
        assert "topk_ids" in str(caught.value) and caught.value.found == "9", name
    masked = torch.where(ids < 4, ids, -1)
    assert conclave.fused_experts(hidden, w1, w2, weights, masked)[1].eq(0).all()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"shared": {"mode": "add", "intermediate_size": 8, "slot_weight": 2.0}}, "fused_slots"),
        ({"quant": {"activations": "token"}}, 'activations="none" for weights of BF16'),
        ({"router": {"renormalize": "softmax", "epsilon": 1.0}}, 'renormalize="sum" and renorm'),
        ({"router": {"name": "sink_softmax"}}, 'mode="router_weight"'),
    ],
)
def test_refused_spec_speaks_pythons_words(fields: dict, words: str):
    sizes = {"num_experts": 4, "top_k": 1, "hidden_size": 8, "intermediate_size": 8}
    with pytest.raises(conclave.Error) as caught:
        _conclave.check_spec({**sizes, **fields})
    text = str(caught.value)
    assert words in text and not SPELLING.search(text), text


def test_partial_sums_are_named_as_an_argument():
    rows = np.zeros((4, 16, 8), np.float32)
    with pytest.raises(conclave.Error, match='reduce="partial" needs none') as caught:
        conclave.Layer.from_tensors(
            conclave.MoeSpec(top_k=1),
            gate=rows, up=rows, down=rows.transpose(0, 2, 1),
            parallel=conclave.ParallelSpec(tp_size=2),
        )  # fmt: skip
    assert not SPELLING.search(str(caught.value))
