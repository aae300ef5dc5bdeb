"""Grouping rows by expert: vLLM's calls against plain loops."""

from __future__ import annotations

import itertools

import numpy
import pytest

import conclave
from conclave import _device_permute
from conclave.errors import ConclaveTypeError, ConclaveValueError

HOLES = [[0, 4], [-1, 2], [1, 5], [4, 4], [2, 0]]  # of 4 experts: -1 and 4 and 5 are none


def ids_of(tokens, experts, top_k, seed=0):
    random = numpy.random.default_rng(seed)
    return numpy.argsort(random.random((tokens, experts)), axis=1)[:, :top_k].astype("int32")


def blocks_of(result, block_size, slots):
    """(expert, its slots) of every block before the end."""
    sorted_ids, expert_ids, end = (numpy.asarray(part) for part in result)
    assert end.shape == (1,) and end[0] % block_size == 0
    assert (sorted_ids[end[0] :] == slots).all()
    assert (expert_ids[end[0] // block_size :] == -1).all()
    found = []
    for block in range(end[0] // block_size):
        rows = sorted_ids[block * block_size : (block + 1) * block_size]
        assert (rows <= slots).all()
        found.append((int(expert_ids[block]), rows[rows < slots].tolist()))
    return found


def expected_slots(ids, experts):
    flat = ids.reshape(-1)
    return {e: numpy.nonzero(flat == e)[0].tolist() for e in range(experts) if (flat == e).any()}


@pytest.mark.parametrize("tokens", [1, 3, 256, 2256])
@pytest.mark.parametrize(("experts", "top_k"), [(32, 1), (32, 2), (160, 16), (257, 32)])
@pytest.mark.parametrize("block_size", [32, 128])
@pytest.mark.parametrize("pad", [False, True])
def test_align_block_size(tokens, experts, top_k, block_size, pad):
    ids = ids_of(tokens, experts, top_k)
    result = conclave.moe_align_block_size(ids, block_size, experts, pad_sorted_ids=pad)
    assert not pad or len(result[0]) % block_size == 0 or ids.size < experts
    assert all(part.dtype == numpy.int32 for part in result)
    slots = {}
    for expert, rows in blocks_of(result, block_size, ids.size):
        slots.setdefault(expert, []).extend(rows)
    assert slots == expected_slots(ids, experts)
    assert list(slots) == sorted(slots)


@pytest.mark.parametrize("ignore", [False, True])
def test_align_with_a_map(ignore):
    ids = ids_of(60, 8, 2)
    expert_map = [-1, 0, 1, -1, -1, 2, -1, 3]
    result = conclave.moe_align_block_size(
        ids, 16, 8, expert_map=numpy.array(expert_map), ignore_invalid_experts=ignore
    )
    by_local, elsewhere = {}, 0
    for expert, rows in blocks_of(result, 16, ids.size):
        if expert < 0:
            elsewhere += len(rows)
        else:
            by_local.setdefault(expert, []).extend(rows)
    all_slots = expected_slots(ids, 8)
    assert by_local == {expert_map[e]: rows for e, rows in all_slots.items() if expert_map[e] >= 0}
    others = sum(len(rows) for e, rows in all_slots.items() if expert_map[e] < 0)
    assert elsewhere == (0 if ignore else others)


def test_align_leaves_out_ids_that_are_none():
    ids = numpy.array(HOLES)
    result = conclave.moe_align_block_size(ids, 4, 4)
    assert blocks_of(result, 4, 10) == [(0, [0, 9]), (1, [4]), (2, [3, 8])]
    empty = conclave.moe_align_block_size(numpy.zeros((0, 2), "int32"), 4, 4)
    assert int(empty[2][0]) == 0


@pytest.mark.parametrize("tokens", [0, 1, 33, 500])
@pytest.mark.parametrize(("experts", "top_k"), [(16, 2), (64, 6), (256, 8)])
@pytest.mark.parametrize("ranks", [1, 4, 16])
def test_permute_and_back(tokens, experts, top_k, ranks):
    random = numpy.random.default_rng(tokens)
    hidden = random.standard_normal((tokens, 24)).astype("float32")
    scale = random.random((tokens, 3)).astype("float32")
    ids = ids_of(tokens, experts, top_k)
    total = numpy.zeros((tokens, 24))
    weights = random.random((tokens, top_k)).astype("float32")
    for rank in range(ranks):
        local, expert_map, _ = conclave.determine_expert_map(ranks, rank, experts)
        mapped = range(experts) if expert_map is None else [int(e) for e in expert_map]
        rows, scales, first, inverse, index = conclave.moe_permute(
            hidden, scale, ids, experts, local, expert_map
        )
        count = int(first[-1])
        assert rows.shape == (tokens * top_k, 24) and not rows[count:].any()
        assert first.dtype == numpy.int64 and inverse.dtype == index.dtype == numpy.int32
        flat = [mapped[e] for e in ids.reshape(-1)]
        order = [s for e in range(local) for s, f in enumerate(flat) if f == e]
        assert index[:count].tolist() == order and (index[count:] == tokens * top_k).all()
        assert [flat.count(e) for e in range(local)] == numpy.diff(first).tolist()
        numpy.testing.assert_array_equal(rows[:count], hidden[index[:count] // top_k])
        numpy.testing.assert_array_equal(scales[:count], scale[index[:count] // top_k])
        assert sorted(inverse.tolist()) == list(range(tokens * top_k))
        for slot, row in enumerate(inverse.tolist()):
            assert index[row] == slot if row < count else flat[slot] < 0
        out = numpy.empty_like(hidden)
        conclave.moe_unpermute(out, rows * 2, weights, inverse, first)
        total += out
    expected = 2 * hidden * weights.sum(axis=1, keepdims=True)
    numpy.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("expert_map", [None, [-1, 0, -1, 1]])
@pytest.mark.parametrize("ids", [HOLES, [[0], [-1], [1], [4], [2]]], ids=["top2", "top1"])
def test_permute_leaves_out_ids_that_are_none(ids, expert_map):
    ids = numpy.array(ids, "int32")
    tokens, top_k = ids.shape
    local = 4 if expert_map is None else 2
    mapped = numpy.arange(4) if expert_map is None else numpy.array(expert_map)
    hidden = numpy.arange(1, 8 * tokens + 1, dtype="float32").reshape(tokens, 8)
    rows, _, first, inverse, index = conclave.moe_permute(
        hidden, None, ids, 4, local, None if expert_map is None else mapped
    )
    flat = [mapped[e] if 0 <= e < 4 else -1 for e in ids.reshape(-1)]
    held = [slot for expert in range(local) for slot, e in enumerate(flat) if e == expert]
    assert first.tolist() == numpy.cumsum([0] + [flat.count(e) for e in range(local)]).tolist()
    assert index[: len(held)].tolist() == held and not rows[len(held) :].any()
    numpy.testing.assert_array_equal(rows[: len(held)], hidden[[s // top_k for s in held]])
    weights = numpy.full((tokens, top_k), 0.5, "float32")
    out = numpy.full_like(hidden, numpy.nan)
    conclave.moe_unpermute(out, rows, weights, inverse, first)
    counts = [sum(e >= 0 for e in flat[t * top_k : (t + 1) * top_k]) for t in range(tokens)]
    numpy.testing.assert_allclose(out, 0.5 * hidden * numpy.array(counts)[:, None], rtol=1e-6)


def test_unpermute_of_half_precision(torch):
    hidden = torch.randn(7, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.tensor(ids_of(7, 8, 3))
    weights = torch.rand(7, 3, generator=torch.Generator().manual_seed(1))
    rows, scale, first, inverse, _ = conclave.moe_permute(hidden, None, ids, 8)
    assert scale is None and rows.dtype == torch.bfloat16
    out = torch.empty_like(hidden)
    conclave.moe_unpermute(out, rows, weights, inverse.reshape(7, 3), first)
    exact = hidden.double() * weights.double().sum(1, keepdim=True)
    assert ((out.double() - exact).norm(dim=1) / exact.norm(dim=1)).max() < 6e-3


@pytest.mark.parametrize("expert_map", [None, [-1, 0, -1, 1], [2, 1, 0, 3], [-1, -1, -1, -1]])
@pytest.mark.parametrize("tokens", [5, 1, 40])
def test_operations_of_the_device_agree(torch, expert_map, tokens):
    """What runs on a GPU, on the CPU: the same results as the C++ functions."""
    ids = torch.tensor(HOLES if tokens == 5 else ids_of(tokens, 4, 2, seed=tokens))
    mapped = None if expert_map is None else torch.tensor(expert_map)
    for ignore, block in itertools.product([False, True], [1, 4, 16]):
        host = conclave.moe_align_block_size(ids, block, 4, mapped, ignore_invalid_experts=ignore)
        device = _device_permute.align_block_size(
            ids, block, 4, mapped, ignore, host[0].numel(), host[1].numel()
        )
        for a, b in zip(host, device, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)
    hidden = torch.randn(tokens, 8)
    scale = torch.rand(tokens, 2)
    host = conclave.moe_permute(hidden, scale, ids, 4, 4, mapped)
    rows = torch.empty(2 * tokens, 8)
    device = _device_permute.permute(hidden, scale, ids, 4, 4, mapped, rows)
    count = int(host[2][-1])
    for a, b in zip((host[0], *host[2:]), (device[0], *device[2:]), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    assert torch.equal(host[1][:count], device[1][:count])
    weights = torch.rand(tokens, 2)
    outputs = [torch.empty(tokens, 8), torch.empty(tokens, 8)]
    conclave.moe_unpermute(outputs[0], host[0], weights, host[3], host[2])
    _device_permute.unpermute(outputs[1], host[0], weights, host[3], host[2])
    assert torch.allclose(outputs[0], outputs[1], rtol=1e-6, atol=1e-7)


def test_bad_arguments_are_named():
    ids = ids_of(4, 8, 2)
    hidden = numpy.zeros((4, 8), "float32")
    cases = [
        (ConclaveValueError, "topk_ids", lambda: conclave.moe_align_block_size(ids[0], 4, 8)),
        (
            ConclaveTypeError,
            "topk_ids",
            lambda: conclave.moe_align_block_size(ids.astype("float32"), 4, 8),
        ),
        (ConclaveValueError, "block_size", lambda: conclave.moe_align_block_size(ids, 0, 8)),
        (
            ConclaveValueError,
            "expert_map",
            lambda: conclave.moe_align_block_size(ids, 4, 8, expert_map=[0, 1]),
        ),
        (
            ConclaveValueError,
            "number of rows",
            lambda: conclave.moe_permute(hidden[:3], None, ids, 8),
        ),
        (
            ConclaveValueError,
            "n_local_expert",
            lambda: conclave.moe_permute(hidden, None, ids, 8, 7),
        ),
        (
            ConclaveTypeError,
            "inv_permuted_idx",
            lambda: conclave.moe_unpermute(
                hidden, hidden, numpy.ones((4, 2), "float32"), numpy.zeros(8, "int64")
            ),
        ),
    ]
    for kind, words, call in cases:
        with pytest.raises(kind, match=words):
            call()


def test_what_is_no_integer_is_named():
    ids = numpy.zeros((1, 2), "int32")
    for name, arguments in {
        "block_size": (1.5, 3),
        "num_experts": (4, -3),
        "expert_map": (4, 3, "abc"),
    }.items():
        with pytest.raises((ConclaveTypeError, ConclaveValueError), match=name):
            conclave.moe_align_block_size(ids, *arguments)
