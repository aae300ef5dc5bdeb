"""What ranks of test_vllm_exchange.py do, in threads or in processes of their own."""

from __future__ import annotations

import torch
import torch.distributed as dist

from conclave import vllm
from support.vllm_reference import random_case

EXPERTS, TOP_K, HIDDEN, INNER = 7, 3, 48, 40
TOKENS = (9, 0, 4, 1)  # each rank's
KINDS = {"unreduced": vllm.UnreducedConclaveExperts, "whole": vllm.ConclaveExperts}


class Shared(torch.nn.Module):
    def forward(self, rows):
        return rows * 2


def weights(dtype=torch.float32):
    _, w1, w2, _, _ = random_case(5, 1, INNER, HIDDEN, EXPERTS, TOP_K, dtype)
    return w1, w2


def tokens(rank, dtype=torch.float32, count=None):
    """Rows, weights and ids; the first token's last choice is none."""
    count = TOKENS[rank] if count is None else count
    rows, _, _, topk_weights, ids = random_case(
        20 + rank, count, INNER, HIDDEN, EXPERTS, TOP_K, dtype
    )
    ids[:1, -1] = -1
    return rows, topk_weights, ids


def alone(kind, rank, dtype=torch.float32, count=None):
    """What one rank that holds every expert makes of a rank's tokens."""
    kernel = vllm.FusedMoEModularKernel(
        vllm.MoEPrepareAndFinalizeNoEP(), KINDS[kind](vllm.FUSED_MOE_UNQUANTIZED_CONFIG)
    )
    rows, topk_weights, ids = tokens(rank, dtype, count)
    return kernel(rows, *weights(dtype), topk_weights, ids)


def owners(size):
    """The rank of each expert, and none in order: the last rank has the first ones."""
    return [size - 1 - expert * size // EXPERTS for expert in range(EXPERTS)]


def part(rank, size, rank_of=None, dtype=torch.float32):
    """A rank's experts and its map."""
    w1, w2 = weights(dtype)
    if rank_of is None:
        _, expert_map, _ = vllm.determine_expert_map(size, rank, EXPERTS)
        if expert_map is None:
            return w1, w2, None
        mine = expert_map >= 0
    else:
        mine = torch.tensor(rank_of) == rank
        expert_map = torch.where(mine, mine.cumsum(0) - 1, -1).to(torch.int32)
    return w1[mine], w2[mine], expert_map


def kernel_over(group, kind, shared=False, rank_of=None):
    return vllm.FusedMoEModularKernel(
        vllm.AllToAllPrepareAndFinalize(group, rank_of),
        KINDS[kind](vllm.FUSED_MOE_UNQUANTIZED_CONFIG),
        shared_experts=Shared() if shared else None,
    )


def run(group, rank, size, kind, rank_of=None, dtype=torch.float32, **more):
    w1, w2, expert_map = part(rank, size, rank_of, dtype)
    kernel = kernel_over(group, kind, rank_of=rank_of, **more)
    rows, topk_weights, ids = tokens(rank, dtype)
    arguments = {"global_num_experts": EXPERTS, "expert_map": expert_map}
    first = kernel(rows, w1, w2, topk_weights, ids, **arguments)
    again = kernel(rows, w1, w2, topk_weights, ids, **arguments)
    return first, again


def over_a_group(rank, folder):
    """Both kinds of experts over the default group."""
    size = dist.get_world_size()
    return {
        kind: [out.numpy() for out in run(dist.group.WORLD, rank, size, kind)] for kind in KINDS
    }
