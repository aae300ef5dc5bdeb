"""The table of a forward's arguments, `Layer.forward` and the library say the same."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import conclave
from conclave import _conclave
from conclave.errors import ConclaveTypeError

ROWS = _conclave.call_arguments()
NAMES = [row["name"] for row in ROWS if not row["is_scratch"]]
TYPED = {row["name"]: row["dtypes"] for row in ROWS if row["dtypes"]}
DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "uint8", "bool")
E, H, INNER, T, K = 4, 16, 8, 3, 2


def test_forward_has_the_arguments_of_the_table() -> None:
    parameters = inspect.signature(conclave.Layer.forward).parameters
    assert set(parameters) == {"self", *NAMES, "stream", "workspace"}
    assert [name for name in NAMES if parameters[name].default is inspect.Parameter.empty] == [
        "hidden"
    ]


@pytest.mark.parametrize("name", NAMES)
def test_documentation_names_the_argument(name: str) -> None:
    assert name in (conclave.Layer.forward.__doc__ or "")


class Recorder:
    """Stands for the compiled layer and keeps what a call hands to it."""

    device = "cpu"

    def forward(self, *objects: Any) -> None:
        self.objects = objects


def test_every_argument_reaches_its_place() -> None:
    recorder = Recorder()
    given = {name: object() for name in NAMES}
    conclave.Layer(recorder).forward(**given)  # type: ignore[arg-type]
    assert dict(zip(NAMES, recorder.objects, strict=True)) == given


@pytest.fixture(scope="module")
def layer() -> conclave.Layer:
    """A layer whose calls may have any argument."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    spec = conclave.MoeSpec(
        top_k=K,
        shared=conclave.SharedExpertSpec(mode="add", intermediate_size=INNER),
        residual=conclave.ResidualMlpSpec(intermediate_size=INNER, activation="silu"),
    )
    matrices = {
        "gate_up": torch.rand(E, 2 * INNER, H),
        "down": torch.rand(E, H, INNER),
        "router": torch.rand(E, H),
        "shared_gate_up": torch.rand(2 * INNER, H),
        "shared_down": torch.rand(H, INNER),
        "residual_gate_up": torch.rand(2 * INNER, H),
        "residual_down": torch.rand(H, INNER),
    }
    layer = conclave.Layer.from_tensors(spec, options={"max_adapter_rank": 2}, **matrices)
    for _ in range(2):
        layer.load_adapter(up_a=torch.rand(E, 2, H), up_b=torch.rand(E, INNER, 2))
    return layer


SIZES = {"T": T, "hidden_size": H, "num_experts": E, "top_k": K, "1": 1}


def shape_of(name: str) -> list[int]:
    text = next(row["shape"] for row in ROWS if row["name"] == name)
    return [SIZES[letters] for letters in text.strip("[]").split(", ")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TYPED)
def test_the_types_of_the_table_are_taken_and_no_others(
    layer: conclave.Layer, torch: Any, name: str, dtype: str
) -> None:
    given = {"hidden": torch.rand(T, H)}
    if name == "topk_weights":
        given["topk_ids"] = torch.zeros(T, K, dtype=torch.int32)
    # A ban of every expert would leave nothing to choose.
    fill = torch.zeros if name == "banned_experts" else torch.ones
    given[name] = fill(shape_of(name), dtype=getattr(torch, dtype))
    if dtype in TYPED[name]:
        layer.forward(**given)
        return
    with pytest.raises(ConclaveTypeError) as refused:
        layer.forward(**given)
    assert refused.value.tensor == name


@pytest.mark.parametrize("name", TYPED)
def test_the_shape_of_the_table_is_asked_for(layer: conclave.Layer, torch: Any, name: str) -> None:
    given = {"hidden": torch.rand(T, H)}
    if name == "topk_weights":
        given["topk_ids"] = torch.zeros(T, K, dtype=torch.int32)
    given[name] = torch.ones([*shape_of(name), 1], dtype=getattr(torch, TYPED[name][0]))
    with pytest.raises(conclave.ConclaveValueError) as refused:
        layer.forward(**given)
    assert refused.value.tensor == name
    assert refused.value.expected == next(row["shape"] for row in ROWS if row["name"] == name)
