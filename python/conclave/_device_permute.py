"""The functions of `conclave.permute` for torch tensors on a GPU, by torch's own operations.

Sizes of results follow from sizes of arguments, so nothing waits and all of it can be captured.
"""

from __future__ import annotations

from typing import Any

from conclave import _frameworks
from conclave.errors import ConclaveTypeError

Tensor = Any


def _require_torch(tensor: Any, argument: str) -> Any:
    if not _frameworks.is_torch(tensor):
        raise ConclaveTypeError(
            f"{argument}: on a GPU expected a torch tensor, found {type(tensor).__name__}"
        )
    return _frameworks.torch()


def _sort_slots(
    torch: Any, topk_ids: Tensor, num_experts: int, expert_map: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The group of every slot [T k] (`num_groups` for none), the slots in order of groups, and the
    size of each group; with a map groups are local experts."""
    flat = topk_ids.reshape(-1).long()
    valid = (flat >= 0) & (flat < num_experts)
    group = torch.where(valid, flat, num_experts)
    num_groups = num_experts
    if expert_map is not None:
        local = torch.as_tensor(expert_map, device=flat.device).long()
        none = torch.full((1,), -1, dtype=torch.int64, device=flat.device)
        group = torch.cat([local, none])[group]
        group = torch.where(group >= 0, group, num_experts)
    order = torch.sort(group, stable=True).indices
    counts = torch.zeros(num_groups + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, group, torch.ones_like(group))
    return group, order, counts[:num_groups]


def align_block_size(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Any,
    ignore_invalid: bool,
    padded: int,
    blocks: int,
) -> tuple[Tensor, Tensor, Tensor]:
    torch = _require_torch(topk_ids, "topk_ids")
    group, order, counts = _sort_slots(
        torch, topk_ids, num_experts, expert_map if ignore_invalid else None
    )
    device = topk_ids.device
    slots = group.numel()
    sizes = (counts + block_size - 1) // block_size * block_size
    ends = torch.cumsum(sizes, 0)
    firsts = torch.cat([ends - sizes, ends[-1:]])
    before = torch.cat([torch.cumsum(counts, 0) - counts, counts.sum().reshape(1)])
    sorted_ids = torch.full((padded + 1,), slots, dtype=torch.int32, device=device)
    of_rank = group[order]
    place = firsts[of_rank] + torch.arange(slots, device=device) - before[of_rank]
    place = torch.where(of_rank < num_experts, place, padded)
    sorted_ids.scatter_(0, place, order.int())
    starts = torch.arange(blocks, device=device) * block_size
    expert = torch.searchsorted(ends, starts, right=True)
    ids = expert.clamp(max=num_experts - 1)
    if expert_map is not None and not ignore_invalid:
        ids = torch.as_tensor(expert_map, device=device).long()[ids]
    expert_ids = torch.where(starts < ends[-1], ids, -1).int()
    return sorted_ids[:padded], expert_ids, ends[-1:].int()


def permute(
    hidden_states: Tensor,
    a1q_scale: Tensor | None,
    topk_ids: Tensor,
    num_experts: int,
    num_local: int,
    expert_map: Any,
    rows: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    torch = _require_torch(topk_ids, "topk_ids")
    group, order, counts = _sort_slots(torch, topk_ids, num_experts, expert_map)
    top_k = topk_ids.shape[1]
    slots = group.numel()
    device = topk_ids.device
    local = torch.zeros(num_local, dtype=torch.int64, device=device)
    held = min(num_local, num_experts)
    local[:held] = counts[:held]
    first = torch.zeros(num_local + 1, dtype=torch.int64, device=device)
    torch.cumsum(local, 0, out=first[1:])
    inverse = torch.empty(slots, dtype=torch.int32, device=device)
    place = torch.arange(slots, dtype=torch.int32, device=device)
    inverse.scatter_(0, order, place)
    has_row = place < first[-1]
    index = torch.where(has_row, order.int(), slots)
    source = order // max(top_k, 1)
    rows.copy_(hidden_states.index_select(0, source))
    rows.masked_fill_(~has_row[:, None], 0)
    if a1q_scale is not None and a1q_scale.dim() > 1:
        a1q_scale = a1q_scale.index_select(0, source)
    return rows, a1q_scale, first, inverse, index


def unpermute(
    out: Tensor,
    rows: Tensor,
    topk_weights: Tensor,
    inverse: Tensor,
    first: Tensor | None,
) -> None:
    torch = _require_torch(out, "out")
    tokens, top_k = topk_weights.shape
    index = inverse.reshape(tokens, top_k).long()
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    # Slot by slot: the sum's order is part of the result.
    for slot in range(top_k):
        picked = rows.index_select(0, index[:, slot].clamp(max=rows.shape[0] - 1)).float()
        product = picked * topk_weights[:, slot, None].float()
        if first is not None:
            product = torch.where(index[:, slot, None] < first[-1], product, 0.0)
        total += product
    out.copy_(total)
