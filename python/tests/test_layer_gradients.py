"""`conclave.Layer` computes no gradients, and says so of every argument that requires them."""

from __future__ import annotations

import re
from typing import Any

import pytest

import conclave

torch = pytest.importorskip("torch", reason="torch is not installed")

E, H, INNER, T, K = 4, 16, 8, 3, 2


def weights() -> dict[str, Any]:
    return {
        "gate_up": torch.rand(E, 2 * INNER, H),
        "down": torch.rand(E, H, INNER),
        "router": torch.rand(E, H),
    }


def arguments(routed_by: str) -> dict[str, Any]:
    given: dict[str, Any] = {"hidden": torch.rand(T, H), "out": torch.empty(T, H)}
    if routed_by == "logits":
        given["router_logits"] = torch.rand(T, E)
    elif routed_by == "ids":
        given["topk_ids"] = torch.zeros(T, K, dtype=torch.int32)
        given["topk_weights"] = torch.rand(T, K)
    else:
        given["router_input"] = torch.rand(T, H)
    return given


CASES = [
    (way, name)
    for way in ("logits", "ids", "gate")
    for name in arguments(way)
    if name not in ("topk_ids",)
]


@pytest.mark.parametrize(("way", "name"), CASES)
def test_argument_that_requires_gradients_is_named(way: str, name: str) -> None:
    layer = conclave.Layer.from_tensors(conclave.MoeSpec(top_k=K), **weights())
    given = arguments(way)
    given[name].requires_grad_()
    with pytest.raises(conclave.ConclaveValueError, match=f"^{name}: it requires gradients"):
        layer(**given)
    with torch.no_grad():
        out = layer(**given)
    given[name] = given[name].detach()
    assert torch.equal(layer(**given), out)


def test_residual_input_that_requires_gradients_is_named() -> None:
    residual = {"residual_gate_up": torch.rand(2 * INNER, H), "residual_down": torch.rand(H, INNER)}
    spec = conclave.MoeSpec(
        top_k=K, residual=conclave.ResidualMlpSpec(intermediate_size=INNER, activation="silu")
    )
    layer = conclave.Layer.from_tensors(spec, **weights(), **residual)
    given = torch.rand(T, H, requires_grad=True)
    with pytest.raises(conclave.ConclaveValueError, match=r"^residual_input: it requires"):
        layer(torch.rand(T, H), residual_input=given)
    layer(torch.rand(T, H), residual_input=given.detach())


@pytest.mark.parametrize("name", ["gate_up", "down", "router"])
def test_weights_that_require_gradients_are_named(name: str) -> None:
    given = weights()
    layer = conclave.Layer.from_tensors(conclave.MoeSpec(top_k=K), **given)
    given[name] = torch.nn.Parameter(given[name])
    for load in (lambda: conclave.Layer.from_tensors(conclave.MoeSpec(top_k=K), **given),
                 lambda: layer.reload(**given)):  # fmt: skip
        with pytest.raises(conclave.ConclaveValueError, match=f"^{name}: it requires gradients"):
            load()
        with torch.no_grad():
            load()


def test_weights_in_a_list_are_named_by_their_place() -> None:
    given = weights()
    down = list(given.pop("down"))
    down[2] = torch.nn.Parameter(down[2])
    with pytest.raises(conclave.ConclaveValueError, match=re.escape("down[2]: it requires")):
        conclave.Layer.from_tensors(conclave.MoeSpec(top_k=K), down=down, **given)
