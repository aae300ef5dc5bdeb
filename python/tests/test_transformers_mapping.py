"""Tensors of published checkpoints by expert: one mapping for every way to name them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")

from conclave import vllm  # noqa: E402
from conclave.errors import ConclaveValueError  # noqa: E402
from conclave.transformers import get_expert_mapping  # noqa: E402

E, K, H, INNER = 4, 2, 32, 24
NAMES = {
    "gate_proj": ("gate_proj", "up_proj", "down_proj"),
    "w1": ("w1", "w3", "w2"),
    "linear": ("linear", "linear_v", "linear_1"),
}


def config(**fields: Any) -> Any:
    return transformers.MixtralConfig(num_local_experts=E, hidden_size=H, **fields)


def test_rows_are_those_of_all_names() -> None:
    rows = get_expert_mapping(config())
    assert len(rows) == 3 * 3 * E
    assert rows[:3] == [
        ("experts.w13_", "experts.0.gate_proj.", 0, "w1"),
        ("experts.w2_", "experts.0.down_proj.", 0, "w2"),
        ("experts.w13_", "experts.0.up_proj.", 0, "w3"),
    ]
    assert ("experts.w13_", "experts.3.w3.", 3, "w3") in rows
    assert ("experts.w2_", "experts.2.linear_1.", 2, "w2") in rows


def tensors(names: tuple[str, str, str]) -> dict[str, Any]:
    """Of a layer of a checkpoint, under a prefix of its model."""
    numbers = torch.Generator().manual_seed(4)
    shapes = ((INNER, H), (INNER, H), (H, INNER))
    return {
        f"experts.{expert}.{name}.weight": torch.randn(shape, generator=numbers) * 0.2
        for expert in range(E)
        for name, shape in zip(names, shapes, strict=True)
    }


def expected(found: dict[str, Any], names: tuple[str, str, str], rows: Any, logits: Any) -> Any:
    """In float64, one token at a time."""
    weights, ids = logits.double().softmax(-1).topk(K, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros(len(rows), H, dtype=torch.float64)
    for token, slot in torch.cartesian_prod(torch.arange(len(rows)), torch.arange(K)).tolist():
        gate, up, down = (
            found[f"experts.{int(ids[token, slot])}.{name}.weight"].double() for name in names
        )
        row = rows[token].double()
        out[token] += weights[token, slot] * (
            down @ (torch.nn.functional.silu(gate @ row) * (up @ row))
        )
    return out


@pytest.mark.parametrize("copies", [0, 3])
@pytest.mark.parametrize("style", NAMES)
def test_layer_loads_by_the_mapping(style: str, copies: int) -> None:
    names = NAMES[style]
    found = tensors(names)
    layer = vllm.FusedMoE(
        E,
        K,
        H,
        INNER,
        params_dtype=torch.float32,
        prefix="model.layers.0.mlp.experts",
        enable_eplb=copies > 0,
        num_redundant_experts=copies,
        expert_mapping=get_expert_mapping(config(), copies),
    )
    loaded = layer.load_weights(
        (name.removeprefix("experts."), tensor) for name, tensor in found.items()
    )
    assert len(list(loaded)) == 3 * (E + copies)
    if copies:
        one = torch.zeros(1, E + copies, dtype=torch.int32)
        slots = torch.tensor([[[e, e + E if e < copies else -1] for e in range(E)]])
        counts = (slots >= 0).sum(-1)
        layer.set_eplb_state(0, one, slots, counts)
    rows, logits = torch.randn(9, H), torch.randn(9, E)
    actual = layer(rows, logits)
    wanted = expected(found, names, rows, logits)
    assert float((actual.double() - wanted).norm() / wanted.norm()) <= 5e-6
    if copies:
        assert int(one.sum()) == 9 * K
        assert int(one[0, E:].sum()) > 0  # copies serve too


@pytest.mark.parametrize("field", ["num_experts", "n_routed_experts", "moe_num_experts"])
def test_number_of_experts_by_every_name(field: str) -> None:
    given = transformers.PretrainedConfig()
    setattr(given, field, 3)
    assert len(get_expert_mapping(given)) == 27
    setattr(given, field, [2, 5])  # of each layer
    assert len(get_expert_mapping(given)) == 45


def test_text_model_of_a_multimodal_configuration_counts() -> None:
    text = transformers.Qwen3VLMoeTextConfig(num_experts=6)
    whole = transformers.Qwen3VLMoeConfig(text_config=text.to_dict())
    assert len(get_expert_mapping(whole)) == 54


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ConclaveValueError, match="LlamaConfig does not say how many experts"):
        get_expert_mapping(transformers.LlamaConfig())
    with pytest.raises(ConclaveValueError, match="num_redundant_experts"):
        get_expert_mapping(config(), -1)
