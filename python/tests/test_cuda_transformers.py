"""transformers on a GPU: a tiny model, eager and with the experts of this library."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")
backend = pytest.importorskip("conclave.transformers", reason="no backend for transformers")

pytestmark = pytest.mark.cuda

NEW_TOKENS = 12


def tiny_model(dtype: torch.dtype):
    torch.manual_seed(3)
    config = transformers.Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        initializer_range=0.1,
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("eager")
    return model.to(dtype).cuda().eval()


def generate(model, ids: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    mask = torch.ones_like(ids)
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )


def worst_distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (actual.double() - expected.double()).norm(dim=-1)
    return float((difference / expected.double().norm(dim=-1)).max())


@pytest.fixture(autouse=True)
def warnings_of_the_backend():
    """Fails where experts ran eagerly without being asked to."""
    from conclave.transformers import _experts

    _experts._warned.clear()
    yield
    assert not _experts._warned


@pytest.mark.parametrize(
    ("dtype", "bar"),
    [(torch.float32, 1e-4), (torch.bfloat16, 4e-2)],
    ids=["float32", "bfloat16"],
)
def test_logits_and_generation(dtype: torch.dtype, bar: float) -> None:
    model = tiny_model(dtype)
    ids = torch.randint(1, 127, (2, 11), device="cuda")
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        tokens = generate(model, ids)
        backend.set_implementation(model)
        before = len(backend._packed._packed)
        actual = model(input_ids=ids).logits
        assert len(backend._packed._packed) == before + 3
        assert worst_distance(actual, expected) <= bar
        found = generate(model, ids)
        assert found.shape == tokens.shape
        if dtype == torch.float32:
            assert torch.equal(found, tokens)
        # Along eager's own tokens, where a near tie of two logits changes nothing.
        actual = model(input_ids=tokens).logits
        backend.set_implementation(model, "eager")
        assert worst_distance(actual, model(input_ids=tokens).logits) <= bar


def test_weights_that_change_are_packed_again() -> None:
    model = tiny_model(torch.bfloat16)
    backend.set_implementation(model)
    ids = torch.randint(1, 127, (1, 9), device="cuda")
    with torch.no_grad():
        before = model(input_ids=ids).logits
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.mul_(-0.5)
        after = model(input_ids=ids).logits
        backend.set_implementation(model, "eager")
        expected = model(input_ids=ids).logits
    assert worst_distance(after, expected) <= 4e-2
    assert worst_distance(before, expected) > 4e-2


def test_blocks_that_are_patched() -> None:
    model = tiny_model(torch.bfloat16)
    ids = torch.randint(1, 127, (2, 11), device="cuda")
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        report = backend.patch(model)
        assert len(report.replaced) == 3, str(report)
        assert worst_distance(model(input_ids=ids).logits, expected) <= 4e-2
        backend.unpatch(model)
        assert torch.equal(model(input_ids=ids).logits, expected)
