"""fused_experts with any sizes, strides, types and ids: the right numbers, or an error."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import conclave  # noqa: E402
from conclave import vllm  # noqa: E402
from conclave.errors import Error  # noqa: E402
from support.devices import is_on_gpu  # noqa: E402
from support.problems import FLOAT32_BAR, HALF_BAR, worst_error  # noqa: E402
from support.vllm_reference import experts_reference, random_case, spread_of_roundings  # noqa: E402

pytestmark = pytest.mark.usefixtures("device")

TYPES = [torch.float32, torch.float16, torch.bfloat16]
RUNS = settings(max_examples=60, deadline=None, derandomize=True)


def limit(*arrays):
    return FLOAT32_BAR if all(a.dtype == torch.float32 for a in arrays) else HALF_BAR


def spread(tensor, how):
    """The same numbers with other strides."""
    if how == "gaps":
        wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=tensor.dtype)
        wide[..., : tensor.shape[-1]] = tensor
        return wide[..., : tensor.shape[-1]]
    if how == "transposed" and tensor.ndim == 3:
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    return tensor


@RUNS
@given(
    tokens=st.integers(0, 40),
    inner=st.integers(16, 70),
    hidden=st.integers(16, 70),
    experts=st.integers(1, 20),
    top_k=st.integers(1, 6),
    dtypes=st.tuples(st.sampled_from(TYPES), st.sampled_from(TYPES)),
    strides=st.lists(st.sampled_from(["dense", "gaps", "transposed"]), min_size=3, max_size=3),
    ids_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 1000),
)
def test_sizes_strides_and_types(
    tokens, inner, hidden, experts, top_k, dtypes, strides, ids_dtype, seed
):
    top_k = min(top_k, experts)
    case = random_case(seed, tokens, inner, hidden, experts, top_k, torch.float32)
    for array in case[:3]:
        array.mul_(8)  # away from the subnormal numbers of float16
    rows, weights = dtypes
    arrays = [case[0].to(rows), case[1].to(weights), case[2].to(weights)]
    expected = experts_reference(*arrays, *case[3:])
    spread_of_case = spread_of_roundings(*arrays, *case[3:])
    laid = [spread(a, how) for a, how in zip(arrays, strides, strict=True)]
    arguments = (*laid, case[3], case[4].to(ids_dtype))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="w[12]: its rows do not lie densely")
        out = conclave.fused_experts(*arguments)
    assert out.dtype == rows
    assert worst_error(out, expected, spread_of_case) <= limit(*arrays)


@RUNS
@given(
    ids=st.lists(st.tuples(*[st.integers(-3, 9)] * 3), min_size=1, max_size=12),
    mapped=st.booleans(),
)
def test_any_ids(ids, mapped):
    """Experts that are here count, -1 and other ranks' experts do not, all else is refused; on a
    GPU, where the host cannot see it, it counts no more than those."""
    hidden, w1, w2, weights, _ = random_case(1, len(ids), 12, 20, 6, 3, torch.float32)
    ids = torch.tensor(ids)
    expert_map = [-1, 0, 1, 2, 3, 4, 5, -1] if mapped else None
    arguments = (hidden, w1, w2, weights, ids)
    if not is_on_gpu() and ((ids < -1) | (ids >= (8 if mapped else 6))).any():
        with pytest.raises(Error, match="topk_ids"):
            conclave.fused_experts(*arguments, expert_map=expert_map)
        return
    out = conclave.fused_experts(*arguments, expert_map=expert_map)
    expected = experts_reference(*arguments, expert_map=expert_map)
    assert worst_error(out, expected) <= FLOAT32_BAR


@RUNS
@given(
    counts=st.integers(1, 33),
    ranks=st.integers(2, 9),
    strategy=st.sampled_from(["linear", "round_robin"]),
    shared=st.integers(0, 3),
)
def test_any_placement(counts, ranks, strategy, shared):
    seen = []
    for rank in range(ranks):
        local, expert_map, mask = vllm.determine_expert_map(
            ranks, rank, counts, strategy, shared, return_expert_mask=True
        )
        assert len(expert_map) == counts + shared and len(mask) == counts + shared + 1
        assert int(mask[-1]) == 0 and all(int(m) for m in mask[counts:-1])
        assert [int(i) for i in expert_map[counts:]] == [local + i for i in range(shared)]
        held = [e for e in range(counts) if int(expert_map[e]) >= 0]
        assert len(held) == local and [int(mask[e]) for e in held] == [1] * local
        seen += held
    assert sorted(seen) == list(range(counts))


@RUNS
@given(data=st.data())
def test_an_argument_of_another_kind_is_taken_or_refused(data):
    case = list(random_case(1, 5, 12, 20, 6, 2, torch.float32))
    position = data.draw(st.integers(0, 4))
    tensor = case[position]
    change = data.draw(
        st.sampled_from(
            [
                lambda t: t.double(),
                lambda t: t.half() if t.is_floating_point() else t.short(),
                lambda t: t[:0],
                lambda t: t[..., :0],
                lambda t: t[..., 1:],
                lambda t: t[1:],
                lambda t: t.unsqueeze(0),
                lambda t: t.to(torch.complex64),
                lambda t: t.to_sparse(),
                lambda t: t.to("meta"),
                lambda t: None,
                lambda t: t.tolist(),
                lambda t: t.cpu().numpy(),
            ]
        )
    )
    case[position] = change(tensor)
    try:
        out = conclave.fused_experts(*case)
    except Error as error:
        assert str(error)
        return
    assert out.shape == case[0].shape
