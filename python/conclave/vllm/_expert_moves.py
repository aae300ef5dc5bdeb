"""Experts' rows that move between slots of a layer, on one rank or between ranks.

A slot is a row of every tensor of the layer. An expert that a rank lacks comes from one that has
it, once, however many of its slots are to hold it. Ranks write only what all of them have received
whole, so that a layer is at its old slots or at the new ones.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from conclave import _conclave
from conclave.errors import ConclaveUnsupportedError, ConclaveValueError, from_code

_PHASE = "moving experts"
_MISMATCH = (702, "kCommMismatch")
_LENGTH = 8  # bytes of a number before what is kept beside rows
Way = tuple[int, int, int]  # expert, rank that has it, rank that lacks it


class Arrived(NamedTuple):
    """What a layer's slots of this rank are to hold, as bytes, before any of it is written."""

    by_slot: dict[int, torch.Tensor]  # those that change
    from_others: int  # experts that came from another rank


class Kept(Protocol):
    """What a layer keeps for each expert beside rows of tensors."""

    def of(self, local: int) -> dict[str, torch.Tensor]: ...

    def put(self, local: int, given: dict[str, torch.Tensor]) -> None: ...


class NothingKept:
    """Of tensors that are all there is."""

    def of(self, local: int) -> dict[str, torch.Tensor]:
        return {}

    def put(self, local: int, given: dict[str, torch.Tensor]) -> None:
        del local, given


def check_slots(name: str, slots: Sequence[int], num_ranks: int) -> None:
    """Raises ConclaveValueError for slots that do not divide by ranks."""
    if not slots or len(slots) % num_ranks:
        raise ConclaveValueError(
            f"{name}: expected slots that divide by {num_ranks} ranks, found {len(slots)}"
        )


def ways(old: Sequence[int], new: Sequence[int], num_ranks: int) -> list[Way]:
    """What travels, in the order of experts and of ranks that lack them; -1 is an empty slot. The
    ranks that have an expert share those that lack it."""
    width = len(old) // num_ranks
    parts = [slice(rank * width, (rank + 1) * width) for rank in range(num_ranks)]
    has = [set(old[part]) for part in parts]
    found: list[Way] = []
    for expert in sorted({e for e in new if e >= 0}):
        holders = [rank for rank in range(num_ranks) if expert in has[rank]]
        if not holders:
            raise ConclaveValueError(
                f"old_global_expert_indices: expected a slot of expert {expert}, found none"
            )
        lacking = [r for r in range(num_ranks) if expert in new[parts[r]] and r not in holders]
        found += [(expert, holders[i % len(holders)], rank) for i, rank in enumerate(lacking)]
    return found


class ExpertMover:
    """Moves experts of layers whose slots lie in rank order.

    Args:
        communicator: of the ranks; None: one rank has all slots.
    """

    def __init__(self, communicator: _conclave.Communicator | None) -> None:
        self._communicator = communicator
        self._rank = 0 if communicator is None else communicator.rank
        self._size = 1 if communicator is None else communicator.size

    def move(
        self,
        old: Sequence[int],
        new: Sequence[int],
        rows: Sequence[torch.Tensor],
        kept: Kept | None = None,
    ) -> int:
        """Every rank calls it with the same slots; returns the experts that came to this one.

        Raises:
            ConclaveCommError: ranks that are lost, late or disagree; no row has been written then.
        """
        arrived = self.receive(old, new, rows, kept)
        self.put(arrived, rows, kept)
        return arrived.from_others

    def receive(
        self,
        old: Sequence[int],
        new: Sequence[int],
        rows: Sequence[torch.Tensor],
        kept: Kept | None = None,
    ) -> Arrived:
        """The first half of `move`, which writes nothing: rows may be read meanwhile.

        Args:
            old, new: the expert of each slot of all ranks, -1 for an empty one.
            rows: tensors [slots of a rank, ...], contiguous, which are written to.
            kept: what goes with an expert beside its rows.

        Raises:
            ConclaveCommError: ranks that are lost, late or disagree; no row has been written then.
        """
        keeper = NothingKept() if kept is None else kept
        width = self._check(old, new, rows)
        self._require_agreement(old, new, rows)
        first = self._rank * width
        own, wanted = list(old[first : first + width]), list(new[first : first + width])
        changed = [i for i in range(width) if wanted[i] not in (own[i], -1)]
        local = {expert: i for i, expert in reversed(list(enumerate(own)))}
        there = ways(old, new, self._size)
        arriving = self._exchange(there, lambda e: _packed(rows, keeper, local[e]))
        # Slots may swap experts: what stays on this rank is copied before anything is written.
        staying = {wanted[i] for i in changed if wanted[i] in local}
        arriving |= {expert: _packed(rows, keeper, local[expert]) for expert in staying}
        came = sum(1 for _, _, destination in there if destination == self._rank)
        return Arrived({i: arriving[wanted[i]] for i in changed}, came)

    @staticmethod
    def put(arrived: Arrived, rows: Sequence[torch.Tensor], kept: Kept | None = None) -> None:
        """The second half: writes what has arrived, without a message."""
        keeper = NothingKept() if kept is None else kept
        with torch.no_grad():
            for slot, piece in arrived.by_slot.items():
                _unpack(piece, rows, keeper, slot)

    def _check(self, old: Sequence[int], new: Sequence[int], rows: Sequence[torch.Tensor]) -> int:
        check_slots("old_global_expert_indices", old, self._size)
        if len(new) != len(old):
            raise ConclaveValueError(
                f"new_global_expert_indices: expected {len(old)} slots, found {len(new)}"
            )
        width = len(old) // self._size
        for tensor in rows:
            if tensor.shape[0] != width or not tensor.is_contiguous():
                raise ConclaveValueError(
                    f"expert_weights: expected contiguous tensors of {width} experts, found "
                    f"{list(tensor.shape)}"
                )
            if tensor.device.type != "cpu" and self._size > 1:
                raise ConclaveUnsupportedError(
                    "expert_weights: between ranks experts travel from and to memory of the CPU, "
                    f"found {tensor.device}"
                )
        return width

    def _require_agreement(
        self, old: Sequence[int], new: Sequence[int], rows: Sequence[torch.Tensor]
    ) -> None:
        if self._communicator is None:
            return
        kinds = [(list(tensor.shape[1:]), str(tensor.dtype)) for tensor in rows]
        text = json.dumps([list(old), list(new), kinds])
        mine = torch.tensor([zlib.crc32(text.encode())])
        told = torch.empty(self._size, dtype=torch.int64)
        self._communicator.all_gather(mine, told, None, _PHASE)
        self._require(told == mine, f"has other slots or sizes of tensors than rank {self._rank}")

    def _require(self, is_good: torch.Tensor, text: str) -> None:
        """Raises naming the first rank that is not good [ranks]."""
        for rank, good in enumerate(is_good.tolist()):
            if not good:
                what = f"rank {rank}, phase {_PHASE}: rank {rank} {text}"
                raise from_code(*_MISMATCH, what, "", "expert_weights", "", "", "", "")

    def _exchange(self, there: list[Way], packed: Any) -> dict[int, torch.Tensor]:
        """What arrives here, by expert."""
        if self._communicator is None or not there:
            return {}
        parts: list[list[torch.Tensor]] = [[] for _ in range(self._size)]
        for expert, source, destination in there:
            if source == self._rank:
                parts[destination].append(packed(expert))
        arriving = [
            [e for e, s, d in there if s == source and d == self._rank]
            for source in range(self._size)
        ]
        sizes = self._gathered_sizes([part for one in parts for part in one], there)
        counts = [sum(len(part) for part in one) for one in parts]
        expected = [[sizes[e, s] for e in arriving[s]] for s in range(self._size)]
        send = torch.cat([torch.empty(0, dtype=torch.uint8), *(p for one in parts for p in one)])
        received = torch.empty(sum(map(sum, expected)), dtype=torch.uint8)
        self._communicator.all_to_all(send, counts, received, list(map(sum, expected)), _PHASE)
        pieces = received.split([size for one in expected for size in one])
        experts = [expert for one in arriving for expert in one]
        self._require_whole(pieces)
        return dict(zip(experts, pieces, strict=True))

    def _gathered_sizes(
        self, mine: list[torch.Tensor], there: list[Way]
    ) -> dict[tuple[int, int], int]:
        """Bytes of each expert by it and its source: what is kept beside rows may be of any
        length."""
        by_source = [[way for way in there if way[1] == rank] for rank in range(self._size)]
        counts = [len(one) for one in by_source]
        told = torch.empty(sum(counts), dtype=torch.int64)
        own = sorted((way for way in by_source[self._rank]), key=lambda way: way[2])
        sizes = torch.tensor([len(part) for part in mine], dtype=torch.int64)
        assert len(own) == len(mine)
        self._communicator.all_gather(sizes, told, counts, _PHASE)  # type: ignore[union-attr]
        ordered = [way for one in by_source for way in sorted(one, key=lambda way: way[2])]
        return {(e, s): int(n) for (e, s, _), n in zip(ordered, told.tolist(), strict=True)}

    def _require_whole(self, pieces: Sequence[torch.Tensor]) -> None:
        """Raises on every rank where one has received other bytes than were sent."""
        bad = torch.tensor([sum(1 for piece in pieces if not _is_whole(piece))])
        told = torch.empty(self._size, dtype=torch.int64)
        self._communicator.all_gather(bad, told, None, _PHASE)  # type: ignore[union-attr]
        self._require(told == 0, "has received other bytes than were sent")


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def _number(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64).view(torch.uint8)


def _packed(rows: Sequence[torch.Tensor], kept: Kept, local: int) -> torch.Tensor:
    """An expert as bytes: their checksum, its rows, and what is kept beside them."""
    beside = kept.of(local)
    extra = torch.empty(0, dtype=torch.uint8)
    if beside:
        file = io.BytesIO()
        torch.save(beside, file)
        extra = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    device = rows[0].device if rows else extra.device
    parts = [_bytes_of(tensor[local]) for tensor in rows]
    body = torch.cat([*parts, _number(len(extra)).to(device), extra.to(device)])
    check = zlib.crc32(body.cpu().numpy().tobytes())
    return torch.cat([_number(check).to(device), body])


def _is_whole(piece: torch.Tensor) -> bool:
    check = int(piece[:_LENGTH].clone().view(torch.int64))
    return zlib.crc32(piece[_LENGTH:].numpy().tobytes()) == check


def _unpack(piece: torch.Tensor, rows: Sequence[torch.Tensor], kept: Kept, local: int) -> None:
    begin = _LENGTH
    for tensor in rows:
        target = tensor[local]
        end = begin + target.numel() * target.element_size()
        if end > begin:  # cloned, since types need an address that they divide
            target.copy_(piece[begin:end].clone().view(target.dtype).view(target.shape))
        begin = end
    length = int(piece[begin : begin + _LENGTH].clone().view(torch.int64))
    given: dict[str, torch.Tensor] = {}
    if length:
        file = io.BytesIO(piece[begin + _LENGTH :].cpu().numpy().tobytes())
        given = torch.load(file, weights_only=True)
    kept.put(local, given)


class KeptBesideParameters:
    """What a `FusedMoE` keeps beside its parameters: what bitsandbytes' codes mean, and how long
    rows of GGUF's blocks are."""

    def __init__(self, layer: torch.nn.Module) -> None:
        parameters = dict(layer.named_parameters(recurse=False))
        self._aids: dict[str, dict[tuple[int, str, str], torch.Tensor]] = {
            n: p.aids for n, p in parameters.items() if hasattr(p, "aids")
        }
        self._widths: dict[str, dict[tuple[str, int], int]] = {
            n: p.blocks.widths  # type: ignore[attr-defined]
            for n, p in parameters.items()
            if hasattr(getattr(p, "blocks", None), "widths")
        }

    def of(self, local: int) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, kept in self._aids.items():
            for (expert, shard, suffix), tensor in kept.items():
                if expert == local:
                    found[f"aid|{name}|{shard}|{suffix}"] = tensor
        for name, widths in self._widths.items():
            for (shard, expert), width in widths.items():
                if expert == local:
                    found[f"width|{name}|{shard}"] = torch.tensor(width)
        return found

    def put(self, local: int, given: Mapping[str, torch.Tensor]) -> None:
        for kept in self._aids.values():
            for place in [place for place in kept if place[0] == local]:
                del kept[place]
        for key, tensor in given.items():
            kind, name, shard, *suffix = key.split("|", 3)
            if kind == "aid":
                self._aids[name][local, shard, suffix[0]] = tensor
            else:
                self._widths[name][shard, local] = int(tensor)
