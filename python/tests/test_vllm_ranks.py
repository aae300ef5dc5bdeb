"""conclave.vllm.FusedMoE: what joins the routed sum, over ranks, rounded once; what is counted."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from conclave import vllm  # noqa: E402
from conclave.errors import ConclaveUnsupportedError, ConclaveValueError  # noqa: E402
from support.devices import seeded  # noqa: E402
from support.problems import FLOAT32_BAR, HALF_BAR, worst_error  # noqa: E402
from support.vllm_reference import experts_reference  # noqa: E402

pytestmark = pytest.mark.usefixtures("device")

SIZES = {"num_experts": 8, "top_k": 2, "hidden_size": 48, "intermediate_size": 40}
RANKS = 2


def rank_of(rank, expert_parallel, **arguments):
    """A rank's layer, with its part of the same weights."""
    if expert_parallel:
        split = vllm.FusedMoEParallelConfig(ep_size=RANKS, ep_rank=rank, use_ep=True)
    else:
        split = vllm.FusedMoEParallelConfig(tp_size=RANKS, tp_rank=rank)
    layer = vllm.FusedMoE(**{**SIZES, **arguments}, moe_parallel_config=split)
    fill(layer)
    return layer


def fill(layer):
    generator = seeded(11)
    for expert in range(8):
        for shard, name, shape in (
            ("w1", "w13_weight", (40, 48)),
            ("w3", "w13_weight", (40, 48)),
            ("w2", "w2_weight", (48, 40)),
        ):
            whole = torch.randn(shape, generator=generator) / 4
            layer.weight_loader(getattr(layer, name), whole, name, shard, expert)


def whole_layer(**arguments):
    layer = vllm.FusedMoE(**SIZES, **arguments)
    fill(layer)
    return layer


class SharedPart(torch.nn.Module):
    """A rank's part of shared experts: the parts of all ranks add up to a product."""

    def __init__(self, rank, ranks=RANKS):
        super().__init__()
        weight = torch.randn(48, 48, generator=seeded(12))
        share = torch.linspace(0.2, 0.8, 48) if ranks > 1 else torch.ones(48)
        self.register_buffer("part", weight * (share if rank == 0 else 1 - share), False)

    def forward(self, hidden):
        return hidden @ self.part.to(hidden.dtype).T


class Group:
    """A default process group whose sums are those of the ranks' tensors, one after another."""

    def __init__(self, monkeypatch):
        self.calls, self.sums = [], None
        dist = torch.distributed
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: RANKS)
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)

    def all_reduce(self, tensor):
        call = len(self.calls)
        self.calls.append(tensor.clone())
        if self.sums is not None:
            tensor.copy_(self.sums[call])

    def run(self, layers, *given):
        """Every rank's result. Ranks run one by one: what depends on a sum is run again with it, so
        that a rank is run once more for every sum."""
        self.sums = []
        while True:
            ranks, results = [], []
            known = list(self.sums)
            for layer in layers:
                self.calls = []
                self.sums = [*known, *[torch.zeros(1)] * 8]
                results.append(layer(*given))
                ranks.append(self.calls)
            assert len({len(calls) for calls in ranks}) == 1
            if len(known) == len(ranks[0]):
                return results
            self.sums = [*known, sum(calls[len(known)] for calls in ranks)]


def tokens(count=11):
    generator = seeded(1)
    return torch.randn(count, 48, generator=generator), torch.randn(count, 8, generator=generator)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("with_transform", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_sums_over_ranks_are_whole(monkeypatch, expert_parallel, with_transform, apart):
    """Routed and shared experts, also behind an output transform that is not linear."""
    transform = torch.nn.Tanh() if with_transform else None
    more = {
        "routed_output_transform": transform,
        "return_shared_apart": apart,
        "routed_scaling_factor": 2.5,
        "apply_routed_scale_to_output": True,
    }
    layers = [
        rank_of(r, expert_parallel, shared_experts=SharedPart(r), reduce_results=True, **more)
        for r in range(RANKS)
    ]
    hidden, logits = tokens()
    kept = hidden.clone()
    results = Group(monkeypatch).run(layers, hidden, logits)
    expected = whole_layer(shared_experts=SharedPart(0, 1), **more)(hidden, logits)
    for result in results:
        pairs = zip(result, expected, strict=True) if apart else [(result, expected)]
        for found, wanted in pairs:
            assert worst_error(found, wanted.double()) <= 1e-5
    assert torch.equal(hidden, kept)


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_the_last_sum_may_be_left_to_the_caller(expert_parallel):
    """By a field that is assigned once layers are there; no group is asked then."""
    layers = [
        rank_of(r, expert_parallel, shared_experts=SharedPart(r), reduce_results=True)
        for r in range(RANKS)
    ]
    for layer in layers:
        layer.moe_config.skip_final_all_reduce = True
    hidden, logits = tokens()
    expected = whole_layer(shared_experts=SharedPart(0, 1))(hidden, logits)
    assert worst_error(sum(layer(hidden, logits) for layer in layers), expected.double()) <= 1e-5


def test_sums_do_not_touch_what_a_module_returned(monkeypatch):
    layers = [
        rank_of(r, False, shared_experts=torch.nn.Identity(), reduce_results=True,
                return_shared_apart=True)
        for r in range(RANKS)
    ]  # fmt: skip
    hidden, logits = tokens()
    kept = hidden.clone()
    Group(monkeypatch).run(layers, hidden, logits)
    assert torch.equal(hidden, kept)


@pytest.mark.parametrize("reduce_results", [False, True])
def test_zero_experts_add_the_token_once(monkeypatch, reduce_results):
    bias = torch.zeros(11)
    bias[8:] = 0.2
    more = {"zero_expert_type": "identity", "e_score_correction_bias": bias, "renormalize": False}
    hidden, logits = tokens()[0], torch.randn(11, 11, generator=seeded(2))
    expected = whole_layer(**more)(hidden, logits)
    layers = [rank_of(r, False, reduce_results=reduce_results, **more) for r in range(RANKS)]
    if reduce_results:
        for result in Group(monkeypatch).run(layers, hidden, logits):
            assert worst_error(result, expected.double()) <= 1e-5
    else:
        total = sum(layer(hidden, logits) for layer in layers)
        assert worst_error(total, expected.double()) <= 1e-5


def test_the_factory_sums_and_the_class_does_not(monkeypatch):
    split = vllm.FusedMoEParallelConfig(tp_size=RANKS, tp_rank=0)
    layers = []
    for rank in range(RANKS):
        split = vllm.FusedMoEParallelConfig(tp_size=RANKS, tp_rank=rank)
        layers.append(vllm.FusedMoEFactory(**SIZES, moe_parallel_config=split))
        fill(layers[-1])
    hidden, logits = tokens()
    expected = whole_layer()(hidden, logits)
    for result in Group(monkeypatch).run(layers, hidden, logits):
        assert worst_error(result, expected.double()) <= 1e-5
    partial = rank_of(0, False)
    assert not partial.reduce_results and layers[0].reduce_results
    assert worst_error(partial(hidden, logits), expected.double()) > 0.1


@pytest.mark.parametrize("axis", ["dp", "pcp"])
def test_shared_experts_are_not_summed_over_ranks_that_do_not_split_them(axis):
    split = vllm.FusedMoEParallelConfig(tp_size=2, **{f"{axis}_size": 2})
    arguments = {**SIZES, "shared_experts": torch.nn.Identity(), "moe_parallel_config": split}
    with pytest.raises(ConclaveUnsupportedError, match="reduce_results: shared experts"):
        vllm.FusedMoE(**arguments, reduce_results=True)
    vllm.FusedMoE(**arguments)


def test_reduced_sums_refuse_gradients_of_shared_experts(monkeypatch):
    Group(monkeypatch)
    layer = rank_of(0, False, shared_experts=torch.nn.Linear(48, 48), reduce_results=True)
    with pytest.raises(ConclaveValueError, match="shared_experts: it requires gradients"):
        layer(*tokens())


# Rounding.


# Numbers whose squares are exact, their unit, and both weights: in float16 so large that the scaled
# sum alone is beyond the largest number, and the layer's result is not.
EXACT = {
    torch.float16: ([1 + i / 32 for i in range(2, 11)], 2.0**15, 2.0**-8, -2.0),
    torch.bfloat16: ([1 + i / 8 for i in range(8)], 1.0, 1.0, -1.0),
}


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("on_input", [False, True])
def test_a_scaled_sum_and_shared_experts_are_rounded_once(dtype, on_input):
    """x - 1.875 x^2 / unit: each step but the last is exact."""
    numbers, unit, first_weight, second_weight = EXACT[dtype]
    hidden = unit * torch.tensor(numbers * 8)[:64].reshape(2, 32)

    def first(hidden_states, gating_output, topk, renormalize):
        return torch.ones(len(hidden_states), 1), torch.zeros(len(hidden_states), 1).int()

    layer = vllm.FusedMoE(
        2,
        1,
        32,
        32,
        params_dtype=dtype,
        activation="relu2_no_mul",
        custom_routing_function=first,
        shared_experts=torch.nn.Identity(),
        routed_scaling_factor=1.875,
        apply_routed_scale_to_output=True,
        apply_router_weight_on_input=on_input,
    )
    layer.w13_weight[0] = torch.eye(32) * first_weight
    layer.w2_weight[0] = torch.eye(32) * second_weight
    squares = hidden.double() ** 2 / unit
    out = layer(hidden.to(dtype), torch.zeros(2, 2, dtype=dtype))
    exact = hidden.double() - 1.875 * squares
    twice = hidden.to(dtype) - 1.875 * squares.to(dtype)
    assert torch.equal(out, exact.to(dtype)) and not torch.equal(out, twice)
    if dtype == torch.float16:
        assert (1.875 * squares).min() > torch.finfo(dtype).max and torch.isfinite(out).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_scaled_sum_alone(dtype):
    scaled = whole_layer(
        params_dtype=dtype, routed_scaling_factor=2.5, apply_routed_scale_to_output=True
    )
    hidden, logits = (rows.to(dtype) for rows in tokens())
    scores = torch.softmax(logits.double(), -1)
    weights, ids = torch.topk(scores, 2)
    weights = 2.5 * weights / weights.sum(1, keepdim=True)
    expected = experts_reference(hidden, scaled.w13_weight, scaled.w2_weight, weights, ids)
    out = scaled(hidden, logits)
    assert out.dtype == dtype
    limit = FLOAT32_BAR if dtype == torch.float32 else HALF_BAR
    assert worst_error(out, expected) <= limit


# The routing, as a callback sees it.


def replicated():
    layer = whole_layer(enable_eplb=True)
    load = torch.zeros(1, 8, dtype=torch.int32)
    table = torch.arange(8).reshape(1, 8, 1).flip(1)
    layer.set_eplb_state(0, load, table, torch.ones(1, 8, dtype=torch.int64))
    return layer, load


@pytest.mark.parametrize("kind", [int, torch.tensor])
@pytest.mark.parametrize("count", [0, 5, 11, 20])
def test_padding_is_not_counted(kind, count):
    layer, load = replicated()
    hidden, logits = tokens()
    out = layer(hidden, logits, num_tokens=kind(count))
    assert load.sum() == 2 * min(count, 11)
    ids = torch.topk(logits[:count], 2).indices
    assert load[0].tolist() == torch.bincount(7 - ids.flatten(), minlength=8).tolist()
    layer.select_experts(hidden, logits, num_tokens=kind(count))
    assert load.sum() == 4 * min(count, 11)
    assert torch.equal(out, layer(hidden, logits))
    assert load.sum() == 4 * min(count, 11) + 22


def test_captured_ids_are_of_experts_and_not_of_slots():
    layer, _ = replicated()
    hidden, logits = tokens()
    captured = []
    layer.set_capture_fn(captured.append)
    layer(hidden, logits)
    chosen = torch.topk(logits, 2).indices
    assert torch.equal(captured[0].long(), chosen)
    slots = layer.select_experts(hidden, logits)[1]
    assert torch.equal(slots.long(), 7 - chosen) and torch.equal(captured[1], captured[0])
    layer.set_capture_fn(None)
    layer(hidden, logits)
    assert len(captured) == 2


def test_what_a_layer_says_of_itself():
    layer = rank_of(1, True, scoring_func="sigmoid")
    assert (layer.dp_size, layer.pcp_size, layer.sp_size) == (1, 1, 1)
    assert not layer.is_sequence_parallel
    assert layer.routing_method_type is vllm.RoutingMethodType.SigmoidRenorm


def test_a_name_is_free_when_its_layer_is_gone():
    first = vllm.FusedMoE(**SIZES, prefix="gone.0.experts")
    with pytest.raises(ConclaveValueError, match="Duplicate"):
        vllm.FusedMoE(**SIZES, prefix="gone.0.experts")
    del first
    vllm.FusedMoE(**SIZES, prefix="gone.0.experts")
