"""`Layer.forward(rank_tokens=...)`: the numbers of tokens of all ranks, so that nobody need ask."""

from __future__ import annotations

import numpy
import pytest
from test_ranks import SPEC, made_rows, made_weights, on_ranks

import conclave
from conclave.errors import ConclaveCommError, ConclaveTypeError, ConclaveValueError
from support.process_ranks import Failed, run_ranks

TOKENS = [4, 0, 7]


def layer_over(experts):
    return conclave.Layer.from_tensors(SPEC, communicator=experts, **made_weights())


def forms_of(tokens):
    """The same numbers in every form that a call takes."""
    array = numpy.array(tokens)
    forms = [list(tokens), tuple(tokens), [numpy.int32(n) for n in tokens]]
    forms += [array.astype("int32"), array.astype("int64")]
    try:
        import torch
    except ImportError:
        return forms
    return [*forms, torch.tensor(tokens), torch.tensor(tokens, dtype=torch.int32)]


def test_every_form_of_the_list_keeps_the_bits():
    def work(rank, experts):
        layer = layer_over(experts)
        rows = made_rows(TOKENS[rank], seed=rank)
        asked = layer(rows)
        return [numpy.array_equal(layer(rows, rank_tokens=t), asked) for t in forms_of(TOKENS)]

    for equal in on_ranks([(rank,) for rank in conclave.local_group(3)], work):
        assert equal and all(equal)


@pytest.mark.parametrize(
    ("tokens", "kind", "words"),
    [
        ([3, 4], ConclaveValueError, "[1]"),
        ([], ConclaveValueError, "[0]"),
        ([-1], ConclaveValueError, "out of range"),
        ([2**70], ConclaveValueError, "out of range"),
        ([4], ConclaveValueError, "3, the rows of hidden"),
        ([3.0], ConclaveTypeError, "integers"),
        ([True], ConclaveTypeError, "integers"),
        (["3"], ConclaveTypeError, "integers"),
        (numpy.array([3.0]), ConclaveTypeError, "integers"),
        (numpy.array([[3]]), ConclaveValueError, "[ranks]"),
        (3, ConclaveTypeError, "rank_tokens"),
    ],
)
def test_a_list_that_cannot_be_is_refused_by_name(tokens, kind, words):
    layer = conclave.Layer.from_tensors(SPEC, **made_weights())
    rows = made_rows(3)
    with pytest.raises(kind) as refused:
        layer(rows, rank_tokens=tokens)
    assert refused.value.tensor == "rank_tokens" and words in str(refused.value)
    assert layer(rows, rank_tokens=[3]).shape == rows.shape


def test_lists_that_differ_are_told_to_every_rank():
    """Also where some ranks have none; the ranks then go on."""

    def work(rank, experts):
        layer = layer_over(experts)
        rows = made_rows(TOKENS[rank], seed=rank)
        texts = []
        for other in ([4, 0, 8], None):
            with pytest.raises(ConclaveCommError) as told:
                layer(rows, rank_tokens=other if rank == 0 else TOKENS)
            assert told.value.name == "kCommMismatch"
            texts.append(str(told.value))
        layer(rows, rank_tokens=TOKENS)
        return texts

    for different, some in on_ranks([(rank,) for rank in conclave.local_group(3)], work):
        assert "different rank_tokens" in different and "others none" in some


def over_group(rank, folder):
    """A layer over a group of torch.distributed: the same result, then lists that differ."""
    import torch.distributed as dist

    layer = layer_over(dist.group.WORLD)
    rows = made_rows(TOKENS[rank], seed=rank)
    assert numpy.array_equal(layer(rows, rank_tokens=TOKENS[:2]), layer(rows))
    layer(rows, rank_tokens=[4, 0] if rank == 0 else [3, 0])


def test_over_a_group_of_torch(tmp_path):
    pytest.importorskip("torch.distributed", reason="this build of torch has no torch.distributed")
    for found in run_ranks(over_group, 2, tmp_path):
        assert isinstance(found, Failed) and found.name == "kCommMismatch", found


@pytest.mark.cuda
def test_on_a_gpu_the_list_lies_in_host_memory():
    import torch

    weights = {name: torch.tensor(w, device="cuda") for name, w in made_weights().items()}
    layer = conclave.Layer.from_tensors(SPEC, **weights)
    rows = torch.tensor(made_rows(3), device="cuda")
    assert torch.equal(layer(rows, rank_tokens=[3]), layer(rows))
    assert torch.equal(layer(rows, rank_tokens=torch.tensor([3])), layer(rows))
    with pytest.raises(ConclaveValueError, match="rank_tokens"):
        layer(rows, rank_tokens=torch.tensor([3], device="cuda"))
