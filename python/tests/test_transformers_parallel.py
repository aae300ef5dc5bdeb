"""Blocks of models that transformers spreads over processes by its plans: every rank runs its part,
and sums over ranks are the library's."""

from __future__ import annotations

import logging
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")
if not torch.distributed.is_available():
    pytest.skip("this build of torch has no torch.distributed", allow_module_level=True)

from support import models, survey  # noqa: E402
from support import sharded_work as work  # noqa: E402
from support.process_ranks import Failed, run_ranks  # noqa: E402

if not models.IS_NEWEST:
    pytest.skip("plans of this version are of other kinds", allow_module_level=True)

# Shared experts with a gate, biases on every matrix, a bias that chooses in groups; whole experts.
PLANS = [
    ("qwen2_moe", {"tp_size": 2}),
    ("gpt_oss", {"tp_size": 2}),
    ("deepseek_v3", {"tp_size": 2, "ep_size": 2}),
]


def alone(name: str) -> Any:
    """What one process computes, also after the ranks' update of the weights."""
    model = work.made(name)
    first, slope = work.results(model), work.gradients(model)
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(1.25)
    return first, work.results(model), slope


def require_equal(actual: Any, expected: Any) -> None:
    assert (actual[0] - expected[0]).norm() <= survey.BAR * expected[0].norm()
    assert actual[1] == expected[1]


def test_blocks_of_a_plan_have_the_results_of_one_process(tmp_path: Any) -> None:
    ranks = run_ranks(work.blocks, 2, tmp_path, PLANS, timeout=300)
    for found in ranks:
        assert not isinstance(found, Failed), found.trace
    logging.disable(logging.WARNING)
    try:
        expected = [alone(name) for name, _ in PLANS]
    finally:
        logging.disable(logging.NOTSET)
    for found in ranks:
        for (first, later, slope), result in zip(expected, found, strict=True):
            own, patched, changed, given_back, slope_of_rank, kinds, text = result
            assert set(kinds) == {"block"}, text
            for actual in (own, patched):
                require_equal(actual, first)
            for actual in (changed, given_back):
                require_equal(actual, later)
            assert slope_of_rank == pytest.approx(slope, rel=1e-4)
    for of_one, of_other in zip(*ranks, strict=True):
        assert torch.equal(of_one[1][0], of_other[1][0])  # the same bits on every rank


def test_what_fsdp_spreads_is_left(tmp_path: Any) -> None:
    expected = work.results(work.made("qwen2_moe"))[0]
    for found in run_ranks(work.with_fsdp, 2, tmp_path, "qwen2_moe", timeout=200):
        assert not isinstance(found, Failed), found.trace
        modules, logits = found
        assert [replaced for replaced, _ in modules] == [""]
        assert all("FSDP" in reason for _, reason in modules)
        assert (logits - expected).norm() <= survey.BAR * expected.norm()


def test_ranks_replace_a_block_together_or_not_at_all(tmp_path: Any) -> None:
    expected = work.results(work.made("mixtral"))
    ranks = run_ranks(work.with_a_rank_that_refuses, 2, tmp_path, "mixtral", timeout=200)
    for found, reason in zip(ranks, ("another rank cannot", "told to"), strict=True):
        assert not isinstance(found, Failed), found.trace
        modules, actual = found
        assert {replaced for replaced, _ in modules} == {"experts"}
        assert all(reason in said for _, said in modules)
        require_equal(actual, expected)


def test_a_rank_that_fails_ends_the_replacing_on_all(tmp_path: Any) -> None:
    expected = work.results(work.made("mixtral"))
    ranks = run_ranks(work.with_a_rank_that_fails, 2, tmp_path, "mixtral", timeout=200)
    for found, said in zip(
        ranks, (("ConclaveCommError", 1), ("ZeroDivisionError", -1)), strict=True
    ):
        assert not isinstance(found, Failed), found.trace
        (*raised, text), left, kinds, patched = found
        assert tuple(raised) == said
        assert said[1] < 0 or "ended the replacing" in text  # not a deadline
        require_equal(left, expected)
        assert kinds == {"block"}
        require_equal(patched, expected)
