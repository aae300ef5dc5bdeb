"""Which rank holds which expert."""

from __future__ import annotations

import numpy
import pytest

import conclave
from conclave.errors import ConclaveTypeError, ConclaveValueError


@pytest.mark.parametrize(
    ("ranks", "experts"),
    [(2, 4), (2, 8), (2, 9), (2, 16), (2, 17), (4, 8), (4, 18), (4, 33), (4, 2)],
)
@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
def test_every_expert_is_on_one_rank(ranks, experts, strategy):
    held = []
    for rank in range(ranks):
        local, expert_map, mask = conclave.determine_expert_map(ranks, rank, experts, strategy)
        expert_map = numpy.asarray(expert_map)
        mine = numpy.nonzero(expert_map >= 0)[0]
        assert local == len(mine) == experts // ranks + (rank < experts % ranks)
        assert expert_map[mine].tolist() == list(range(local)) and mask is None
        if strategy == "round_robin":
            assert all(expert % ranks == rank for expert in mine)
        else:
            assert mine.tolist() == list(range(mine[0], mine[0] + local)) if local else True
        held += mine.tolist()
    assert sorted(held) == list(range(experts))


def test_masks_and_shared_experts():
    local, expert_map, mask = conclave.determine_expert_map(2, 1, 5, "round_robin", 2, True)
    assert local == 2
    assert numpy.asarray(expert_map).tolist() == [-1, 0, -1, 1, -1, 2, 3]
    assert numpy.asarray(mask).tolist() == [0, 1, 0, 1, 0, 1, 1, 0]
    assert conclave.determine_expert_map(1, 0, 5, "anything", 2, True) == (5, None, None)


def test_maps_without_a_mask_leave_shared_experts_out():
    _, expert_map, mask = conclave.determine_expert_map(2, 1, 5, "round_robin", 2)
    assert numpy.asarray(expert_map).tolist() == [-1, 0, -1, 1, -1]
    assert mask is None


def test_wrong_arguments():
    with pytest.raises(AssertionError, match="ep_size"):
        conclave.determine_expert_map(0, 0, 4)
    with pytest.raises(ConclaveValueError, match="linear, round_robin"):
        conclave.determine_expert_map(2, 0, 4, "spiral")
    with pytest.raises(ConclaveValueError, match="ep_rank"):
        conclave.determine_expert_map(2, 2, 4)


def test_strategies_that_cannot_be_had():
    decide = conclave.determine_expert_placement_strategy
    assert decide("round_robin", 8) == "round_robin"
    assert decide("round_robin") == "linear"
    assert decide("round_robin", 8, 2) == "linear"
    assert decide("round_robin", 8, 0, True) == "linear"
    assert decide("linear", 8) == "linear"


def test_round_robin_tables():
    to_position, to_expert, of_local = (
        numpy.asarray(table) for table in conclave.round_robin_routing_tables(5, 2, 1)
    )
    assert to_position.tolist() == [0, 3, 1, 4, 2]
    assert to_expert.tolist() == [0, 2, 4, 1, 3]
    assert of_local.tolist() == [1, 3]


def test_maps_as_text():
    assert conclave.get_compressed_expert_map([-1, 0, -1, 1]) == "0->1, 1->3"
    with_groups = conclave._conclave.flatten_groups(
        tp_size=2, tp_rank=1, dp_size=2, dp_rank=1, expert_parallel=True
    )
    assert (with_groups["ep_size"], with_groups["ep_rank"], with_groups["tp_size"]) == (4, 3, 1)
    assert with_groups["needs_all_to_all"]


def test_one_rank_has_no_map_to_print():
    with pytest.raises(ConclaveTypeError, match=r"expert_map: .*None"):
        conclave.get_compressed_expert_map(None)
