"""Kinds of devices: a row each says all that this package asks of one. Other files ask the row, and
compare no names of devices to choose a way of working."""

from __future__ import annotations

from typing import Any, NamedTuple


class DeviceTraits(NamedTuple):
    """What layers on devices of a kind do unless a caller says otherwise."""

    enqueues: bool  # calls return before their work is done, which a stream orders
    counts: bool  # tokens of each expert are counted, which costs nothing
    reload_mode: str  # new weights of code that does not ask for a mode
    transport: str  # over which its ranks exchange rows in a group of torch.distributed
    makes_all_rows: bool  # every kind of quantised rows, not those of its kernels alone
    module_tokens: int  # planned for at first in a module's layer
    max_workspace_bytes: int  # as far as a plan grows by itself


# A CPU's scratch memory is kept for the next call and grows with the plan; a GPU's is borrowed for
# a call, for its own tokens. On a GPU a layer may use weights in place, which then cannot be
# written to.
TRAITS = {
    "cpu": DeviceTraits(
        enqueues=False,
        counts=True,
        reload_mode="in_place",
        transport="tcp",
        makes_all_rows=True,
        module_tokens=2048,
        max_workspace_bytes=1 << 30,
    ),
    "cuda": DeviceTraits(
        enqueues=True,
        counts=False,
        reload_mode="staged",
        transport="nccl",
        makes_all_rows=False,
        module_tokens=4096,
        max_workspace_bytes=4 << 30,
    ),
}


def traits_of(device: str) -> DeviceTraits:
    """The row of "cpu", "cuda" or "cuda:1"; a GPU's for names that a context will refuse."""
    return TRAITS.get(device.partition(":")[0], TRAITS["cuda"])


def name_of(device: Any) -> str:
    """A torch.device as contexts spell it: "cpu", "cuda:0"."""
    return "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"
