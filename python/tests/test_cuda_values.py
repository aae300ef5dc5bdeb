"""Values of layers on a GPU, against float64 on some of their tokens."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import conclave  # noqa: E402
from conclave.errors import ConclaveRuntimeError  # noqa: E402
from support.device import make_device_problem, token_errors  # noqa: E402
from support.problems import FLOAT32_BAR, HALF_BAR  # noqa: E402

pytestmark = pytest.mark.cuda

BLOCK = conclave.QuantSpec(weights="block", activations="group")
CHANNEL = conclave.QuantSpec(weights="channel", activations="token")

SIZES = {
    "small": {},
    "odd": {"experts": 10, "top_k": 3, "hidden": 136, "inner": 72, "tokens": 65},
    "one": {"experts": 60, "top_k": 5, "hidden": 512, "inner": 256, "tokens": 1},
    "unaligned": {"experts": 6, "top_k": 1, "hidden": 100, "inner": 36, "tokens": 17},
    "large": {"experts": 64, "top_k": 8, "hidden": 2048, "inner": 768, "tokens": 2000},
}


def some_tokens(count: int, wanted: int = 24) -> list[int]:
    """The first, the last and some between."""
    step = max(1, count // wanted)
    return sorted({*range(0, count, step), count - 1})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("size", SIZES)
def test_half_precision(dtype: torch.dtype, size: str) -> None:
    problem = make_device_problem(dtype=dtype, **SIZES[size])
    out = problem.layer()(problem.hidden, **problem.routing)
    assert out.dtype == dtype and out.device == problem.hidden.device
    assert token_errors(problem, out, some_tokens(len(out))).max() <= HALF_BAR


@pytest.mark.parametrize("size", ["small", "odd", "unaligned"])
def test_float32(size: str) -> None:
    problem = make_device_problem(dtype=torch.float32, **SIZES[size])
    out = problem.layer()(problem.hidden, **problem.routing)
    assert out.dtype == torch.float32
    assert token_errors(problem, out, some_tokens(len(out))).max() <= FLOAT32_BAR


@pytest.mark.parametrize("quant", [BLOCK, CHANNEL], ids=["block", "channel"])
@pytest.mark.parametrize("size", ["small", "one", "large"])
def test_float8(quant: conclave.QuantSpec, size: str) -> None:
    problem = make_device_problem(quant=quant, **SIZES[size])
    layer = problem.layer()
    assert layer.spec.weight_dtype == "float8_e4m3fn"
    out = layer(problem.hidden, **problem.routing)
    assert out.dtype == torch.bfloat16
    assert token_errors(problem, out, some_tokens(len(out))).max() <= HALF_BAR


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 16, 33, 48])
def test_every_number_of_tokens(tokens: int) -> None:
    problem = make_device_problem()
    hidden, routing = problem.first(tokens)
    out = problem.layer()(hidden, **routing)
    assert token_errors(problem, out, list(range(tokens))).max() <= HALF_BAR


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_other_types_than_the_weights(out_dtype: torch.dtype) -> None:
    problem = make_device_problem()
    layer = problem.layer()
    problem.hidden = problem.hidden.to(out_dtype)
    out = layer(problem.hidden, **problem.routing)
    assert out.dtype == out_dtype
    assert token_errors(problem, out, some_tokens(len(out))).max() <= HALF_BAR


def test_rows_that_lie_apart_and_outputs_that_are_given() -> None:
    problem = make_device_problem()
    layer = problem.layer()
    expected = layer(problem.hidden, **problem.routing)
    wide = torch.full((48, 512), 3.0, dtype=torch.bfloat16, device="cuda")
    wide[:, :256] = problem.hidden
    target = torch.full((48, 512), 5.0, dtype=torch.bfloat16, device="cuda")
    out = layer(wide[:, :256], **problem.routing, out=target[:, 256:])
    assert out.data_ptr() == target[:, 256:].data_ptr()
    assert torch.equal(out, expected) and (target[:, :256] == 5).all()
    long = {"topk_ids": problem.topk_ids.long(), "topk_weights": problem.topk_weights}
    assert torch.equal(layer(problem.hidden, **long), expected)
    same = problem.hidden.clone()
    assert layer(same, **problem.routing, out=same) is same and torch.equal(same, expected)


def test_a_gate_routes_and_padding_is_zero() -> None:
    problem = make_device_problem()
    router = torch.randn(16, 256, device="cuda").bfloat16()
    layer = problem.layer(router=router)
    ids = torch.empty(48, 4, dtype=torch.int32, device="cuda")
    weights = torch.empty(48, 4, device="cuda")
    logits = torch.empty(48, 16, device="cuda")
    captured = {"captured_ids": ids, "captured_weights": weights, "captured_logits": logits}
    out = layer(problem.hidden, **captured)
    expected = problem.hidden.double() @ router.double().T
    assert torch.allclose(logits.double(), expected, rtol=1e-4, atol=1e-4)
    problem.topk_ids, problem.topk_weights = ids, weights
    assert token_errors(problem, out, some_tokens(48)).max() <= HALF_BAR
    assert torch.allclose(weights.sum(1), torch.ones(48, device="cuda"), atol=1e-6)
    again = problem.layer()(problem.hidden, router_logits=logits)
    assert token_errors(problem, again, some_tokens(48)).max() <= HALF_BAR
    mask = torch.arange(48, device="cuda") % 3 != 0
    masked = layer(problem.hidden, padding_mask=mask)
    assert (masked[~mask] == 0).all() and torch.equal(masked[mask], out[mask])
    live = torch.tensor([20], device="cuda")
    part = layer(problem.hidden, num_tokens=live)
    assert torch.equal(part[:20], out[:20])


def test_ids_of_other_ranks_contribute_nothing() -> None:
    problem = make_device_problem()
    layer = problem.layer(options={"id_policy": "skip"})
    keep = torch.rand(48, 4, device="cuda") < 0.5
    dropped = torch.where(keep, problem.topk_ids, 16)
    garbage = torch.where(keep, problem.topk_weights, 9.0)
    problem.topk_weights = torch.where(keep, problem.topk_weights, 0.0)
    clean = layer(problem.hidden, topk_ids=dropped, topk_weights=problem.topk_weights)
    assert torch.equal(layer(problem.hidden, topk_ids=dropped, topk_weights=garbage), clean)
    some = [t for t in range(48) if keep[t].any()]
    assert token_errors(problem, clean, some).max() <= HALF_BAR
    empty = [t for t in range(48) if not keep[t].any()]
    assert (clean[empty] == 0).all()


def test_weights_that_change_in_place_are_read() -> None:
    problem = make_device_problem()
    layer = problem.layer()
    problem.weights["down"].mul_(2)
    out = layer(problem.hidden, **problem.routing)
    assert token_errors(problem, out, some_tokens(48)).max() <= HALF_BAR
    layer.reload(mode="in_place", **problem.weights)
    assert torch.equal(layer(problem.hidden, **problem.routing), out)
    others = {name: weight.flip(0).clone() for name, weight in problem.weights.items()}
    with pytest.raises(ConclaveRuntimeError, match="in-place"):
        layer.reload(mode="in_place", **others)


def test_other_weights_are_staged() -> None:
    problem = make_device_problem()
    layer = problem.layer()
    layer(problem.hidden, **problem.routing)
    torch.cuda.synchronize()
    problem.weights = {n: w.flip(0).contiguous() for n, w in problem.weights.items()}
    layer.reload(mode="staged", **problem.weights)
    out = layer(problem.hidden, **problem.routing)
    assert token_errors(problem, out, some_tokens(48)).max() <= HALF_BAR


@pytest.mark.parametrize("layout", ["apart", "lists", "interleaved"])
def test_layouts_that_are_copied(layout: str) -> None:
    problem = make_device_problem()
    expected = problem.layer()(problem.hidden, **problem.routing)
    gate_up, down = problem.weights["gate_up"], problem.weights["down"]
    gate, up = (half.contiguous() for half in gate_up.chunk(2, dim=1))
    arguments = {}
    if layout == "apart":
        weights = {"gate": gate, "up": up, "down": down}
    elif layout == "lists":
        weights = {"gate_up": list(gate_up.unbind()), "down": list(down.unbind())}
    else:
        mixed = torch.stack([gate, up], dim=2).reshape(gate_up.shape)
        weights = {"gate_up": mixed, "down": down}
        arguments = {"gate_up_order": "interleaved"}
    layer = conclave.Layer.from_tensors(problem.spec, **weights, **arguments)
    assert torch.equal(layer(problem.hidden, **problem.routing), expected)


def test_interleaved_biases_of_gated_experts() -> None:
    problem = make_device_problem()
    gate_up, bias = problem.weights["gate_up"], torch.randn(16, 256, device="cuda").bfloat16()
    spec = conclave.MoeSpec(top_k=4, has_bias=True)
    others = {"down": problem.weights["down"], "down_bias": bias.flip(0)}
    layer = conclave.Layer.from_tensors(spec, gate_up=gate_up, gate_up_bias=bias, **others)
    mixed = torch.stack(gate_up.chunk(2, dim=1), dim=2).reshape(gate_up.shape)
    mixed_bias = torch.stack(bias.chunk(2, dim=1), dim=2).reshape(bias.shape)
    other = conclave.Layer.from_tensors(
        spec, gate_up=mixed, gate_up_bias=mixed_bias, gate_up_order="interleaved", **others
    )
    expected = layer(problem.hidden, **problem.routing)
    assert torch.equal(other(problem.hidden, **problem.routing), expected)


@pytest.mark.parametrize("order", ["concatenated", "interleaved"])
def test_biases_of_shared_experts(order: str) -> None:
    problem = make_device_problem()
    generator = torch.Generator("cuda").manual_seed(9)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda") / 8

    gate_up, down = normal(192, 256).bfloat16(), normal(256, 96).bfloat16()
    bias, down_bias = normal(192).bfloat16(), normal(256).bfloat16()
    gate, up = (problem.hidden.double() @ gate_up.double().T + bias.double()).chunk(2, dim=1)
    inner = torch.nn.functional.silu(gate) * up
    exact = inner @ down.double().T + down_bias.double()
    if order == "interleaved":
        gate_up = torch.stack(gate_up.chunk(2), dim=1).reshape(gate_up.shape)
        bias = torch.stack(bias.chunk(2), dim=1).reshape(bias.shape)
    shared = conclave.SharedExpertSpec(mode="add", intermediate_size=96, has_bias=True)
    layer = conclave.Layer.from_tensors(
        conclave.MoeSpec(top_k=4, shared=shared),
        **problem.weights,
        shared_gate_up=gate_up,
        shared_down=down,
        shared_gate_up_bias=bias,
        shared_down_bias=down_bias,
        shared_gate_up_order=order,
    )
    part = torch.empty_like(problem.hidden)
    layer(problem.hidden, **problem.routing, shared_out=part)
    error = (part.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() <= HALF_BAR


def test_a_part_of_the_experts() -> None:
    problem = make_device_problem()
    whole = problem.layer()(problem.hidden, **problem.routing).float()
    total = torch.zeros_like(whole)
    for first in (0, 8):
        held = range(first, first + 8)
        layer = conclave.Layer.from_tensors(
            problem.spec,
            **{name: weight[first : first + 8] for name, weight in problem.weights.items()},
            expert_map=[e - first if e in held else -1 for e in range(16)],
            parallel={
                "placement": "custom",
                "rank_of": [0 if e in held else -1 for e in range(16)],
                "reduce": "partial",
            },
        )
        total += layer(problem.hidden, **problem.routing).float()
    assert torch.allclose(total, whole, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("tokens", [3, 65])
def test_adapters_change_the_weights_that_they_name(dtype: torch.dtype, tokens: int) -> None:
    problem = make_device_problem(dtype=dtype, tokens=tokens)
    experts, width, hidden = problem.weights["gate_up"].shape
    layer = problem.layer(options={"max_adapter_rank": 8})
    generator = torch.Generator().manual_seed(5)

    def factor(*shape: int) -> torch.Tensor:
        return torch.randn(experts, *shape, generator=generator) / shape[-1] ** 0.5

    up_a, up_b = factor(8, hidden), factor(width // 2, 8)
    down_a, down_b = factor(4, width // 2), factor(hidden, 4)
    adapter = layer.load_adapter(up_a=up_a, up_b=up_b, down_a=down_a, down_b=down_b, scale=0.5)
    # The layer may use the tensors themselves.
    merged = {name: matrix.float().clone() for name, matrix in problem.weights.items()}
    merged["gate_up"][:, width // 2 :] += 0.5 * (up_b @ up_a).cuda()
    merged["down"] += 0.5 * (down_b @ down_a).cuda()
    other = conclave.Layer.from_tensors(problem.spec, **merged)
    expected = other(problem.hidden.float(), **problem.routing)
    out = layer(problem.hidden, adapter_ids=adapter, **problem.routing)
    error = (out.float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() <= (FLOAT32_BAR if dtype == torch.float32 else HALF_BAR)
    ids = torch.full((tokens,), -1, device="cuda")
    ids[1::2] = adapter
    mixed = layer(problem.hidden, adapter_ids=ids, **problem.routing)
    plain = problem.layer()(problem.hidden, **problem.routing)
    assert torch.equal(mixed[1::2], out[1::2]) and torch.equal(mixed[::2], plain[::2])
    layer.remove_adapter(adapter)
    with pytest.raises(conclave.ConclaveValueError, match="adapter"):
        layer(problem.hidden, adapter_ids=adapter, **problem.routing)
