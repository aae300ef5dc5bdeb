"""Slots sorted by expert, each expert's padded to a block: vLLM's operator, or the same by torch."""

import torch


def sizes(slots: int, block: int, experts: int) -> tuple:
    room = slots + experts * (block - 1)
    if slots < experts:
        room = min(slots * block, room)
    return room, (room + block - 1) // block


def align_by_operator(ids: torch.Tensor, block: int, experts: int) -> tuple:
    room, blocks = sizes(ids.numel(), block, experts)
    order = torch.empty(room, dtype=torch.int32, device=ids.device)
    owners = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    padded = torch.empty(1, dtype=torch.int32, device=ids.device)
    torch.ops._moe_C.moe_align_block_size(ids, experts, block, order, owners, padded, None)
    return order, owners, padded


def align_by_torch(ids: torch.Tensor, block: int, experts: int) -> tuple:
    flat = ids.flatten().long()
    slots = flat.numel()
    room, blocks = sizes(slots, block, experts)
    owner, slot = torch.sort(flat, stable=True)
    counts = torch.zeros(experts, dtype=torch.long, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + block - 1) // block * block
    ends = padded.cumsum(0)
    place = (ends - padded)[owner] + torch.arange(slots, device=ids.device) - (counts.cumsum(0) - counts)[owner]
    order = torch.full((blocks * block,), slots, dtype=torch.int32, device=ids.device)
    order.scatter_(0, place, slot.to(torch.int32))
    starts = torch.arange(blocks, device=ids.device) * block
    owners = torch.searchsorted(ends, starts, right=True).clamp_(max=experts - 1).to(torch.int32)
    return order[:room], owners, ends[-1:].to(torch.int32)


def agree(one: tuple, other: tuple, block: int) -> bool:
    """Whether two sortings give every block the same expert and the same slots."""
    count = int(one[2])
    if count != int(other[2]):
        return False
    blocks = [order[:count].view(-1, block).sort(1).values for order in (one[0], other[0])]
    return torch.equal(*blocks) and torch.equal(one[1][: count // block], other[1][: count // block])


def choose_align(library: str | None) -> tuple:
    """(function, what to add to a candidate's name). The operator must agree with torch once."""
    if library:
        try:
            torch.ops.load_library(library)
            ids = torch.randint(0, 32, (77, 2), dtype=torch.int32, device="cuda")
            if agree(align_by_operator(ids, 16, 32), align_by_torch(ids, 16, 32), 16):
                return align_by_operator, ""
        except (OSError, RuntimeError, AttributeError) as error:
            print(f"vLLM's operators: {str(error).splitlines()[0]}", flush=True)
    return align_by_torch, ", sorted by torch"
