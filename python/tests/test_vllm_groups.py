"""conclave.vllm.FusedMoE over an engine's groups: tokens that change ranks, sums in rank order."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.distributed.is_available():
    pytest.skip("this build of torch has no torch.distributed", allow_module_level=True)

from support import fused_group_work as work  # noqa: E402
from support.problems import FLOAT32_BAR, HALF_BAR, worst_error  # noqa: E402
from support.process_ranks import Failed, run_ranks  # noqa: E402


def whole(name, number, dtype=torch.float32):
    """One rank's result of an owner's tokens."""
    alone = work.Split()
    more = {} if name in ("plain", "partial") else work.variants(alone, 0)[name]
    layer = work.layer_of(None, params_dtype=dtype, **more)
    hidden, logits = work.given(number, dtype)
    return layer(hidden, work.logits_for(name, logits))


@functools.cache
def parts(split):
    """Each rank's layer without groups, which returns its part of float32 sums."""
    config = [split.config(rank) for rank in range(split.ranks)]
    return [
        work.layer_of(split, rank, moe_parallel_config=config[rank]) for rank in range(split.ranks)
    ]


def in_rank_order(split, number, tensor_rank=None):
    """The sums over data-, then context- and then tensor-parallel ranks, each in rank order; or
    what is one tensor rank's part of them."""
    hidden, logits = work.given(number)
    of = [layer(hidden, logits) for layer in parts(split)]

    def total(found):
        return functools.reduce(torch.add, found)

    if split.sequence:
        return total(of)
    of_tensor_rank = []
    for tensor in range(split.tp):
        by_context = [
            total([of[(dp * split.pcp + pcp) * split.tp + tensor] for dp in range(split.dp)])
            for pcp in range(split.pcp)
        ]
        of_tensor_rank.append(total(by_context))
    return total(of_tensor_rank) if tensor_rank is None else of_tensor_rank[tensor_rank]


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_split_gives_the_whole_result(tmp_path, ranks):
    results = run_ranks(work.every_split, ranks, tmp_path, ranks)
    for number, split in enumerate(work.SPLITS[ranks]):
        for rank, found in enumerate(results):
            assert isinstance(found, dict), found.trace
            owner = split.tokens_of(rank)
            for name in work.variants(split, rank):
                pairs = [(found[number, name], whole(name, owner))]
                if name == "apart":
                    pairs = list(zip(*pairs[0], strict=True))
                for out, wanted in pairs:
                    assert out.dtype == torch.float32
                    assert worst_error(out, wanted.double()) <= 2 * FLOAT32_BAR, (split, name, rank)
            assert torch.equal(found[number, "plain"], in_rank_order(split, owner)), (split, rank)
            tensor = split.place(rank)["tp"]
            assert torch.equal(found[number, "partial"], in_rank_order(split, owner, tensor))
            halves = found[number, "bfloat16"]
            wanted = whole("plain", owner, torch.bfloat16).double()
            assert halves.dtype == torch.bfloat16 and worst_error(halves, wanted) <= 2 * HALF_BAR


def test_a_group_of_experts_alone(tmp_path):
    for rank, (alone, moved) in enumerate(run_ranks(work.only_experts, 2, tmp_path)):
        assert torch.equal(alone, in_rank_order(work.Split(tp=2, experts=True), 2))
        assert torch.equal(moved, in_rank_order(work.Split(dp=2, experts=True), rank))


def test_what_does_not_go_together_is_named(tmp_path):
    wanted = {
        "size": ("ConclaveValueError", "tp_size"),
        "kind": ("ConclaveTypeError", "tp_group"),
        "rank": ("ConclaveValueError", "tp_group"),
        "missing dp": ("ConclaveValueError", "dp_group"),
        "backend": ("ConclaveUnsupportedError", "all2all_backend"),
        "without experts": ("ConclaveValueError", "ep_group"),
        "sequence": ("ConclaveValueError", "ep_group"),
        "no sequence": ("ConclaveValueError", "is_sequence_parallel"),
        "new split": ("ConclaveUnsupportedError", "moe_parallel_config"),
    }
    for found in run_ranks(work.refusals, 2, tmp_path):
        assert isinstance(found, dict), found.trace
        for name, text in found.items():
            kind, part = wanted[name]
            assert text.startswith(kind) and part in text, (name, text)


@pytest.mark.parametrize("what", ["tokens", "type"])
def test_ranks_that_disagree_are_told(tmp_path, what):
    for found in run_ranks(work.disagree, 2, tmp_path, what):
        assert isinstance(found, Failed) and found.name == "kCommMismatch", found
        assert found.seconds < 5


def test_tokens_that_are_told_keep_the_bits(tmp_path):
    for found in run_ranks(work.told_tokens, 4, tmp_path):
        assert isinstance(found, dict), found.trace
        assert found and all(found.values()), found


def test_numbers_of_tokens_that_cannot_be_are_named(tmp_path):
    wanted = {
        "short": ("ConclaveValueError", "expected 2 numbers"),
        "negative": ("ConclaveValueError", "rank_tokens[1]"),
        "other": ("ConclaveValueError", "this one"),
        "number": ("ConclaveTypeError", "rank_tokens"),
        "real": ("ConclaveTypeError", "rank_tokens[0]"),
        "no groups": ("ConclaveValueError", "expected None"),
        "one rank": ("ConclaveValueError", "this one"),
    }
    for found in run_ranks(work.refused_tokens, 2, tmp_path):
        assert isinstance(found, dict), found.trace
        for name, text in found.items():
            kind, part = wanted[name]
            assert text.startswith(kind) and part in text, (name, text)


@pytest.mark.parametrize("what", ["lists", "one asks", "types"])
def test_ranks_that_disagree_on_told_tokens_are_told(tmp_path, what):
    for found in run_ranks(work.disagree_on_tokens, 2, tmp_path, what):
        assert isinstance(found, Failed) and found.name == "kCommMismatch", found
        assert found.seconds < 5


def test_a_rank_that_is_lost_is_named(tmp_path):
    first, second = run_ranks(work.lost, 2, tmp_path)
    assert first.name == "kCommPeerLost" and "rank 1" in first.text and "dispatch" in first.text
    assert second.text == "this rank has another problem"


def test_sizes_without_groups_say_what_is_missing():
    with pytest.raises(ValueError, match="dp_group, or moe_parallel_config"):
        work.layer_of(None, dp_size=2)
