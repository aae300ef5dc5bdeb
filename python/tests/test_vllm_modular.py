"""The modular pieces: every combination that exists, against eager float64."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import conclave  # noqa: E402
from conclave import vllm  # noqa: E402
from conclave.errors import (  # noqa: E402
    ConclaveRuntimeError,
    ConclaveTypeError,
    ConclaveValueError,
)
from support.devices import seeded  # noqa: E402
from support.problems import FLOAT32_BAR, HALF_BAR, worst_error  # noqa: E402
from support.vllm_reference import (  # noqa: E402
    experts_reference,
    fp8_rows,
    quantise_weights,
    random_case,
    worst_quantised_error,
)

pytestmark = pytest.mark.usefixtures("device")

PLAIN = vllm.FUSED_MOE_UNQUANTIZED_CONFIG
EXPERTS = {
    "whole": (vllm.MoEPrepareAndFinalizeNoEP, vllm.ConclaveExperts),
    "unreduced": (vllm.MoEPrepareAndFinalizeNoEP, vllm.UnreducedConclaveExperts),
    "batched": (None, vllm.BatchedConclaveExperts),
}


def kernel(kind, config=PLAIN, experts=8, most=64, **arguments):
    prepare, run = EXPERTS[kind]
    made = vllm.BatchedPrepareAndFinalize(most, experts) if prepare is None else prepare()
    return vllm.FusedMoEModularKernel(made, run(config), **arguments)


def check(actual, expected, dtype):
    assert actual.dtype == dtype
    assert worst_error(actual, expected) <= (FLOAT32_BAR if dtype == torch.float32 else HALF_BAR)


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("tokens", [0, 1, 32, 64])
@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_combinations(kind, tokens, top_k, dtype):
    case = random_case(3, tokens, 96, 128, 8, top_k, dtype)
    # Rows are rounded to their type once more where something else sums them.
    check(kernel(kind)(*case), experts_reference(*case), dtype)


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("weights", ["block", "channel", "tensor"])
def test_combinations_with_fp8(kind, weights):
    hidden, w1, w2, topk_weights, ids = random_case(3, 32, 128, 128, 8, 4, torch.float32)
    codes1, scale1, exact1 = quantise_weights(w1, weights)
    codes2, scale2, exact2 = quantise_weights(w2, weights)
    config = conclave.fp8_w8a8_moe_quant_config(
        scale1,
        scale2,
        per_act_token_quant=weights != "block",
        per_out_ch_quant=weights == "channel",
        block_shape=[128, 128] if weights == "block" else None,
    )
    out = kernel(kind, config)(hidden, codes1, codes2, topk_weights, ids)
    case = (hidden, exact1, exact2, topk_weights, ids)
    assert worst_quantised_error(out, *case, quantise=lambda r: fp8_rows(r, 128)) <= HALF_BAR


@pytest.mark.parametrize("kind", EXPERTS)
def test_router_weight_on_input(kind):
    case = random_case(3, 9, 40, 48, 8, 1, torch.float32)
    out = kernel(kind)(*case, apply_router_weight_on_input=True)
    check(out, experts_reference(*case, weight_on_input=True), torch.float32)
    case = random_case(3, 9, 40, 48, 8, 2, torch.float32)
    with pytest.raises(ConclaveValueError, match="apply_router_weight_on_input"):
        kernel(kind)(*case, apply_router_weight_on_input=True)


@pytest.mark.parametrize("kind", ["whole", "unreduced"])
@pytest.mark.parametrize("chunk_size", [1, 7, 32, 33])
def test_chunks_give_the_same_bits(kind, chunk_size):
    case = random_case(3, 33, 40, 48, 8, 3, torch.float32)
    assert torch.equal(kernel(kind, chunk_size=chunk_size)(*case), kernel(kind)(*case))


@pytest.mark.parametrize("kind", ["whole", "unreduced"])
def test_expert_map(kind):
    hidden, w1, w2, weights, ids = random_case(3, 33, 40, 48, 8, 3, torch.float32)
    expert_map = vllm.determine_expert_map(2, 1, 8)[1]
    arguments = (hidden, w1[4:], w2[4:], weights, ids)
    out = kernel(kind)(*arguments, global_num_experts=8, expert_map=expert_map)
    check(out, experts_reference(*arguments, expert_map=expert_map), torch.float32)


def test_batched_ranks_sum_to_the_whole():
    hidden, w1, w2, weights, ids = random_case(3, 33, 40, 48, 8, 3, torch.float32)
    total = torch.zeros(33, 48, dtype=torch.float64)
    for rank in range(2):
        part = slice(4 * rank, 4 * rank + 4)
        prepare = vllm.BatchedPrepareAndFinalize(64, 4, 2, rank)
        made = vllm.FusedMoEModularKernel(prepare, vllm.BatchedConclaveExperts(PLAIN))
        out = made(hidden, w1[part], w2[part], weights, ids, global_num_experts=8)
        total += out.double()
        assert prepare.num_dispatchers() == 2 and prepare.max_num_tokens_per_rank() == 64
    check(total.float(), experts_reference(hidden, w1, w2, weights, ids), torch.float32)


def test_inplace_and_shared_experts():
    case = random_case(3, 9, 40, 48, 8, 3, torch.float32)
    expected = kernel("whole")(*case)
    shared = torch.nn.Linear(48, 48)
    with torch.no_grad():
        rows, routed = kernel("whole", shared_experts=shared)(*case, inplace=True)
        assert torch.equal(rows, shared(case[0])) and torch.equal(routed, expected)
    out = kernel("whole")(*case, inplace=True)
    assert out is case[0] and torch.equal(out, expected)


class Asynchronous(vllm.MoEPrepareAndFinalizeNoEP):
    """Halves with hooks, which must run in order."""

    def __init__(self, with_hook):
        self.with_hook, self.calls = with_hook, []

    def supports_async(self):
        return True

    def _halves(self, name, second):
        def receive():
            self.calls.append(name)
            return second()

        hook = (lambda: self.calls.append(f"{name} hook")) if self.with_hook else None
        return (hook, receive) if self.with_hook else receive

    def prepare_async(self, *arguments):
        return self._halves("prepare", lambda: self.prepare(*arguments))

    def finalize_async(self, *arguments):
        return self._halves("finalize", lambda: self.finalize(*arguments))


@pytest.mark.parametrize("with_hook", [False, True])
def test_asynchronous_halves_equal_the_whole(with_hook):
    case = random_case(3, 9, 40, 48, 8, 3, torch.float32)
    prepare = Asynchronous(with_hook)
    seen = []

    class Shared(torch.nn.Module):
        def forward(self, hidden):
            seen.extend(prepare.calls)
            return hidden

    made = vllm.FusedMoEModularKernel(prepare, vllm.ConclaveExperts(PLAIN), Shared())
    _, out = made(*case)
    assert torch.equal(out, kernel("whole")(*case))
    expected = ["prepare", "finalize"]
    if with_hook:
        expected = ["prepare hook", "prepare", "finalize hook", "finalize"]
    assert prepare.calls == expected
    assert seen == expected[: len(expected) // 2]  # shared experts run before the second wait


def test_a_kernel_is_a_module():
    case = random_case(3, 9, 40, 48, 8, 3, torch.bfloat16)
    made = kernel("whole", shared_experts=torch.nn.Linear(48, 48)).to(torch.bfloat16).eval()
    with torch.no_grad():
        shared, routed = made(*case)
    assert shared.dtype == torch.bfloat16 and torch.equal(routed, kernel("whole")(*case))


def test_pieces_must_fit():
    with pytest.raises(ConclaveValueError, match="prepare_finalize"):
        vllm.FusedMoEModularKernel(
            vllm.MoEPrepareAndFinalizeNoEP(), vllm.BatchedConclaveExperts(PLAIN)
        )
    case = random_case(3, 65, 40, 48, 8, 3, torch.float32)
    with pytest.raises(ConclaveValueError, match="hidden_states"):
        kernel("batched")(*case)
    with pytest.raises(ConclaveValueError, match="expert_map"):
        kernel("batched", most=65)(*case, expert_map=torch.arange(8))
    with pytest.raises(ConclaveValueError, match="chunk_size"):
        kernel("whole", chunk_size=0)


def test_scales_beside_rows_of_values_are_refused():
    class Quantised(vllm.MoEPrepareAndFinalizeNoEP):
        def prepare(self, a1, *rest):
            return a1, torch.ones(1), None, None, None

    case = random_case(3, 9, 40, 48, 8, 3, torch.float32)
    made = vllm.FusedMoEModularKernel(Quantised(), vllm.ConclaveExperts(PLAIN))
    with pytest.raises(ConclaveTypeError, match="a1q_scale"):
        made(*case)


def test_no_rows_reach_this_rank():
    class Elsewhere(vllm.MoEPrepareAndFinalizeNoEP):
        def prepare(self, a1, topk_weights, topk_ids, *rest):
            return a1[:0], None, None, topk_ids[:0], topk_weights[:0]

        def finalize(self, output, fused, *rest):
            assert fused.shape == (0, 48)
            output.zero_()

    case = random_case(3, 9, 40, 48, 8, 3, torch.float32)
    out = vllm.FusedMoEModularKernel(Elsewhere(), vllm.ConclaveExperts(PLAIN))(*case)
    assert (out == 0).all()


def test_workspace_shapes():
    a = torch.empty(5, 48, dtype=torch.bfloat16)
    sizes = (5, 80, 48, 3, 8, 8, None)
    assert vllm.ConclaveExperts(PLAIN).workspace_shapes(a, a, *sizes) == (
        (),
        (),
        (5, 48),
        torch.bfloat16,
    )
    assert vllm.UnreducedConclaveExperts(PLAIN).workspace_shapes(a, a, *sizes)[2] == (5, 3, 48)
    assert vllm.BatchedConclaveExperts(PLAIN).workspace_shapes(a, a, *sizes)[2] == (8, 5, 48)


def test_experts_show_their_configuration():
    scale = torch.ones(8)
    config = conclave.fp8_w8a8_moe_quant_config(scale, scale, per_act_token_quant=True)
    experts = vllm.ConclaveExperts(config)
    assert experts.w1_scale is scale and experts.per_act_token_quant
    assert not experts.per_out_ch_quant and experts.block_shape is None
    assert experts.a1_scale is None and experts.w1_zp is None and experts.g1_alphas is None
    assert experts.quant_dtype == torch.float8_e4m3fn


def test_problem_sizes():
    w1, w2 = torch.empty(8, 80, 48), torch.empty(8, 48, 40)
    ids = torch.empty(5, 3, dtype=torch.int32)
    assert vllm.moe_problem_size(torch.empty(5, 48), w1, w2, ids) == (8, 5, 80, 48, 3)
    assert vllm.moe_problem_size(torch.empty(8, 7, 48), w1, w2, ids) == (8, 7, 80, 48, 3)
    for arguments, name in (
        ((torch.empty(4, 48), w1, w2, ids), "topk_ids"),
        ((torch.empty(7, 7, 48), w1, w2, ids), "a1"),
        ((torch.empty(5, 48), w1[0], w2, ids), "w1"),
        ((torch.empty(5, 48), w1, w2, ids[0]), "topk_ids"),
    ):
        with pytest.raises(ConclaveValueError, match=name):
            vllm.moe_problem_size(*arguments)


def test_counts_of_tokens():
    ids = torch.tensor([[0, 3], [3, 5], [-1, 9]], dtype=torch.int32)
    count = vllm.count_expert_num_tokens
    assert count(ids, 6, None).tolist() == [1, 0, 0, 2, 0, 1]
    expert_map = torch.tensor([-1, -1, -1, 1, -1, 0], dtype=torch.int32)
    assert count(ids, 2, expert_map).tolist() == [1, 2]
    meta = vllm.ExpertTokensMetadata.make_from_list([1, 2], "cpu")
    assert meta.expert_num_tokens.dtype == torch.int32
    assert meta.expert_num_tokens_cpu.tolist() == [1, 2]


def test_shared_buffers_grow_only():
    buffer = vllm.SharedResizableBuffer()
    device = torch.device("cpu")
    assert buffer.get((), device, torch.float32) is None
    assert buffer.get(None, device, torch.float32) is None
    large = buffer.get((3, 4), device, torch.float32)
    small = buffer.get((2, 2), device, torch.float32)
    assert small.shape == (2, 2) and small.data_ptr() == large.data_ptr()
    assert buffer.get((4, 4), device, torch.float32).numel() == 16
    assert buffer.get((2, 2), device, torch.bfloat16).dtype == torch.bfloat16


def test_weighing_and_summing():
    rows = torch.randn(5, 3, 8)
    weights, ids = torch.rand(5, 3), torch.zeros(5, 3, dtype=torch.int32)
    contiguous = vllm.TopKWeightAndReduceContiguous()
    expected = (rows.double() * weights.double()[:, :, None]).sum(1)
    made = contiguous.apply(None, rows, weights, ids, False)
    assert torch.allclose(made.double(), expected, atol=1e-6)
    flat = contiguous.apply(torch.empty(5, 8), rows.view(15, 8), weights, ids, False)
    assert torch.equal(flat, made)
    on_input = contiguous.apply(None, rows, weights, ids, True)
    assert torch.allclose(on_input, rows.sum(1), atol=1e-6)
    nothing = vllm.TopKWeightAndReduceNoOP()
    assert nothing.apply(None, made, weights, ids, False) is made
    out = torch.empty_like(made)
    assert nothing.apply(out, made, weights, ids, False) is out and torch.equal(out, made)
    with pytest.raises(ConclaveValueError, match="output"):
        nothing.apply(torch.empty(4, 8), made, weights, ids, False)
    with pytest.raises(ConclaveRuntimeError):
        vllm.TopKWeightAndReduceDelegate().apply(None, rows, weights, ids, False)
    assert vllm.TopKWeightAndReduceNoOP() == nothing != contiguous
    assert vllm.TopKWeightAndReduceNaiveBatched(1) != vllm.TopKWeightAndReduceNaiveBatched(0)


# Replicas: vLLM's test of the map in the router.


def state(counts, replicas):
    logical = len(counts)
    table = torch.full((logical, replicas), -1)
    slot = 0
    for expert, count in enumerate(counts):
        for replica in range(count):
            table[expert, replica] = slot
            slot += 1
    return vllm.EplbLayerState(
        torch.zeros(slot, dtype=torch.int32), table, torch.tensor(counts)
    ), slot


@pytest.mark.parametrize(
    "counts",
    [[1] * 8, [2] * 8, [1, 4, 1, 1, 2, 1, 3, 1], [0, 1, 1]],
    ids=["identity", "full", "uneven", "none"],
)
def test_replica_map(counts):
    held, _ = state(counts, 4)
    ids = torch.randint(0, len(counts), (40, 2), generator=seeded(1))
    found = vllm.map_to_physical(ids, held)
    table = held.logical_to_physical_map
    expected = torch.empty_like(ids)
    for token in range(40):
        for slot in range(2):
            logical = int(ids[token, slot])
            spread = (token * 0x9E3779B9) % 2**32
            expected[token, slot] = table[logical, spread % max(counts[logical], 1)]
    assert torch.equal(found, expected)
    used = torch.bincount(expected[expected >= 0].flatten(), minlength=sum(counts))
    assert torch.equal(held.expert_load_view.long(), used)


def test_replica_map_of_padding_and_invalid_ids():
    held, _ = state([1, 1, 1], 1)
    ids = torch.tensor([[0], [2], [-1], [3], [1]], dtype=torch.int32)
    found = vllm.map_to_physical(ids, held, num_tokens=2)
    assert found.tolist() == [[0], [2], [-1], [-1], [1]] and found.dtype == torch.int32
    assert held.expert_load_view.tolist() == [1, 0, 1]
    held.should_record_tensor = torch.tensor(False)
    vllm.map_to_physical(ids, held)
    assert held.expert_load_view.tolist() == [1, 0, 1]


@pytest.mark.parametrize(("top_k", "replicas"), [(2, 2), (4, 2), (8, 4), (8, 8)])
def test_a_hot_expert_spreads_over_its_replicas(top_k, replicas):
    held, _ = state([replicas] + [1] * 15, replicas)
    ids = torch.arange(top_k).repeat(8192, 1)
    vllm.map_to_physical(ids, held)
    load = held.expert_load_view[:replicas].double()
    assert load.sum() == 8192 and load.max() / load.mean() < 1.15


@pytest.mark.parametrize("on_input", [False, True])
def test_an_expert_chosen_twice_counts_twice(on_input):
    """Also where rows by expert have no room for two of a token."""
    hidden, w1, w2, weights, ids = random_case(8, 6, 33, 24, 4, 1 if on_input else 3, torch.float32)
    ids[:, : 1 if on_input else 2] = 2
    rows = hidden * weights if on_input else hidden
    expected = experts_reference(
        rows, w1, w2, torch.ones_like(weights) if on_input else weights, ids
    )
    made = kernel("batched", experts=4, most=6)
    actual = made(hidden, w1, w2, weights, ids, apply_router_weight_on_input=on_input)
    check(actual, expected, torch.float32)


class AddingFinalize(vllm.MoEPrepareAndFinalizeNoEP):
    """Adds to an output that is 0 before, as vLLM's kernel leaves it."""

    def finalize(self, output, fused_expert_output, topk_weights, topk_ids, on_input, impl):
        output += impl.apply(None, fused_expert_output, topk_weights, topk_ids, on_input)


class AddingSum(vllm.TopKWeightAndReduce):
    def apply(self, output, fused_expert_output, topk_weights, topk_ids, on_input):
        for slot in range(topk_ids.shape[1]):
            output += fused_expert_output[:, slot] * topk_weights[:, slot, None]
        return output


class LeavesAddingSum(vllm.UnreducedConclaveExperts):
    def finalize_weight_and_reduce_impl(self):
        return AddingSum()


@pytest.mark.parametrize(
    ("prepare", "run"),
    [
        (AddingFinalize, vllm.UnreducedConclaveExperts),
        (vllm.MoEPrepareAndFinalizeNoEP, LeavesAddingSum),
    ],
)
def test_pieces_of_a_program_may_add_to_the_output(monkeypatch, prepare, run):
    """Memory that is not cleared holds what was there before: here ones."""
    monkeypatch.setattr(torch, "empty_like", torch.ones_like)
    case = random_case(4, 9, 32, 24, 4, 2, torch.float32)
    made = vllm.FusedMoEModularKernel(prepare(), run(PLAIN))
    check(made(*case), experts_reference(*case), torch.float32)


class NamedOtherwise(vllm.UnreducedConclaveExperts):
    """vLLM gives shapes by position, and choices by name."""

    def workspace_shapes(self, a, aq, rows, n, hidden, choices, every, here, counts):
        return (), (), (rows, choices, hidden), a.dtype

    def apply(self, output, hidden_states, w1, w2, topk_ids, topk_weights, *rest, **more):
        super().apply(output, hidden_states, w1, w2, topk_weights, topk_ids, *rest, **more)


def test_parameters_of_subclasses_may_have_other_names_and_places():
    case = random_case(4, 9, 32, 24, 4, 2, torch.float32)
    made = vllm.FusedMoEModularKernel(vllm.MoEPrepareAndFinalizeNoEP(), NamedOtherwise(PLAIN))
    check(made(*case), experts_reference(*case), torch.float32)


def test_rows_that_are_not_one_for_each_choice_are_refused():
    sums = vllm.TopKWeightAndReduceContiguous()
    ids = torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(ConclaveValueError, match="fused_expert_output: expected 6 rows"):
        sums.apply(None, torch.zeros(5, 4), torch.ones(3, 2), ids, False)


def test_elements_of_a_row_that_lie_apart_are_refused_by_name():
    hidden, *rest = random_case(4, 9, 32, 24, 4, 2, torch.float32)
    apart = torch.zeros(9, 48)[:, ::2]
    assert apart.shape == hidden.shape
    for run in (kernel("whole"), vllm.fused_experts):
        with pytest.raises(ConclaveValueError, match=r"hidden_states: .*contiguous copy"):
            run(apart, *rest)


class Recording(vllm.FusedMoEPermuteExpertsUnpermute):
    """Keeps what the kernel hands to experts of a program, with scales for each token."""

    activation_formats = (vllm.FusedMoEActivationFormat.Standard,) * 2

    def __init__(self, tokens):
        scales = torch.arange(tokens, dtype=torch.float32).unsqueeze(1) + 1
        super().__init__(vllm.FusedMoEQuantConfig.make(a2_scale=scales))
        self.seen = []

    def supports_chunking(self):
        return True

    def supports_expert_map(self):
        return True

    def workspace_shapes(self, a, aq, M, N, K, topk, global_num_experts, local_num_experts, meta):
        return (M, topk, max(N, K)), (M * topk, N // 2), (M, topk, K), a.dtype

    def finalize_weight_and_reduce_impl(self):
        return vllm.TopKWeightAndReduceContiguous()

    def apply(self, output, hidden_states, w1, w2, **given):
        self.seen.append(given)
        output.copy_(hidden_states.unsqueeze(1).expand_as(output))


class Counting(vllm.MoEPrepareAndFinalizeNoEP):
    def prepare(self, a1, topk_weights, topk_ids, num_experts, *rest):
        counts = vllm.count_expert_num_tokens(topk_ids, num_experts, None)
        return a1, None, vllm.ExpertTokensMetadata(counts, counts.cpu()), None, None


def test_parts_have_their_own_workspaces_counts_and_scales():
    hidden, w1, w2, weights, ids = random_case(5, 7, 32, 24, 4, 2, torch.float32)
    experts = Recording(7)
    made = vllm.FusedMoEModularKernel(Counting(), experts, chunk_size=3)
    out = made(hidden, w1, w2, weights, ids)
    check(out, hidden.double() * weights.double().sum(1, keepdim=True), torch.float32)
    assert len(experts.seen) == 3
    for part, given in zip((slice(0, 3), slice(3, 6), slice(6, 7)), experts.seen, strict=True):
        tokens = part.stop - part.start
        assert torch.equal(given["topk_ids"], ids[part])
        assert torch.equal(given["topk_weights"], weights[part])
        assert given["a2_scale"].flatten().tolist() == list(range(part.start + 1, part.stop + 1))
        meta = given["expert_tokens_meta"]
        wanted = vllm.count_expert_num_tokens(ids[part], 4, None)
        assert torch.equal(meta.expert_num_tokens, wanted)
        assert torch.equal(meta.expert_num_tokens_cpu, wanted.cpu())
        assert given["workspace13"].shape == (tokens, 2, max(w1.shape[1], 24))
        assert given["workspace2"].shape == (2 * tokens, w1.shape[1] // 2)
        assert given["workspace13"].data_ptr() == experts.seen[0]["workspace13"].data_ptr()


class WideIds(vllm.MoEPrepareAndFinalizeNoEP):
    def topk_indices_dtype(self):
        return torch.int64


def test_the_type_of_ids_is_kept_to():
    hidden, w1, w2, weights, ids = case = random_case(5, 7, 32, 24, 4, 2, torch.float32)
    made = vllm.FusedMoEModularKernel(WideIds(), vllm.ConclaveExperts(PLAIN))
    with pytest.raises(ConclaveValueError, match=r"topk_ids: expected torch\.int64"):
        made(hidden, w1, w2, weights, ids.int())
    check(made(hidden, w1, w2, weights, ids.long()), experts_reference(*case), torch.float32)


class Told(vllm.MoEPrepareAndFinalizeNoEP):
    """Newest vLLM's preparation, which is told of the experts and of when rows are quantised."""

    def __init__(self):
        self.experts, self.deferred = [], []

    def post_init_setup(self, fused_experts):
        self.experts.append(fused_experts)

    def output_is_reduced(self):
        return True

    def prepare(self, a1, weights, ids, count, expert_map, on_input, config, defer_input_quant):
        self.deferred.append(defer_input_quant)
        return super().prepare(a1, weights, ids, count, expert_map, on_input, config)


def test_preparations_are_told_of_their_experts():
    case = random_case(5, 7, 32, 24, 4, 2, torch.float32)
    told, experts = Told(), vllm.ConclaveExperts(PLAIN)
    made = vllm.FusedMoEKernel(told, experts)
    assert told.experts == [experts] and made.output_is_reduced()
    check(made.apply(*case), experts_reference(*case), torch.float32)
    experts.expects_unquantized_inputs = True
    made.apply(*case)
    assert told.deferred == [False, True]
