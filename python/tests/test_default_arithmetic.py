"""Quantised checkpoints in the arithmetic of this CPU, which may round rows to bf16."""

import pytest
from test_checkpoint_formats import METHODS, TESTDATA, golden_of

import conclave
from support.problems import HALF_BAR, worst_error


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_within_the_bar_of_bf16(name):
    hidden, routing, expected = golden_of(name)
    folder = TESTDATA / "quantised" / name
    layer = conclave.Layer.from_checkpoint(folder, conclave.inspect(folder).layers[0].index)
    assert worst_error(layer(hidden, **routing), expected) <= HALF_BAR
