"""Preparation of rows over ranks: each goes to the ranks that hold its experts, and results come
home while other work is done."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from conclave import _conclave, _gradients
from conclave._process_groups import communicator_of
from conclave.errors import ConclaveUnsupportedError, ConclaveValueError, Error
from conclave.vllm._checks import check_tokens
from conclave.vllm._exchange_rows import (
    add_sums,
    agree_on_counts,
    packed_rows,
    rank_of_slots,
    rule_of,
    unpacked_rows,
)
from conclave.vllm.modular import (
    FusedMoEActivationFormat,
    FusedMoEPrepareAndFinalize,
    PrepareResultType,
    ReceiverType,
    TopKWeightAndReduce,
)
from conclave.vllm.prepare import weighed_rows
from conclave.vllm.quant import FusedMoEQuantConfig
from conclave.vllm.reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)

_DISPATCH, _COMBINE = "dispatch", "combine"
# A call that is not finalized, as when its experts have raised, is forgotten behind so many others.
_MOST_CALLS = 4


@dataclasses.dataclass(frozen=True)
class _Call:
    """What a call of `prepare` leaves for its `finalize`."""

    home_ids: torch.Tensor  # [T, k], and all that follows of them
    home_weights: torch.Tensor
    slot_rank: torch.Tensor  # [T, k] the rank of each choice's expert, -1 for none
    sent: list[torch.Tensor]  # for each rank, the tokens whose rows it got, ascending
    received: list[int]  # rows from each rank
    dtype: torch.dtype
    ids: torch.Tensor  # [rows, k] as `prepare` has returned them: by it `finalize` finds the call
    is_local: torch.Tensor  # [rows, k] whether the expert is here


class AllToAllPrepareAndFinalize(FusedMoEPrepareAndFinalize):
    """Rows travel once to each rank that holds one of their experts, results travel back. Experts
    that leave weighing and summing to `finalize` (`UnreducedConclaveExperts`) give the bits of one
    rank; of others each rank's sums are added in rank order, in float32.

    Collective: all ranks call `prepare` and `finalize`, or their asynchronous halves, equally often
    and in the same order. Two calls may be under way at once. An error in the arguments of one rank
    reaches all of them.

    Args:
        group: a `Communicator`, or a group of torch.distributed.
        rank_of: [E] the rank that holds each expert; None: consecutive ranges, the first ones
            longer where E does not divide, as `determine_expert_map` has them.
    """

    def __init__(self, group: Any, rank_of: Sequence[int] | None = None) -> None:
        found = communicator_of(group, "group")
        if found is None:
            raise ConclaveValueError("group: expected a Communicator or a group, found None")
        self._group: _conclave.Communicator = found
        self._rank_of = None if rank_of is None else torch.tensor(list(rank_of), dtype=torch.int64)
        if self._rank_of is not None and not bool(
            ((self._rank_of >= 0) & (self._rank_of < found.size)).all()
        ):
            raise ConclaveValueError(f"rank_of: expected ranks from 0 to {found.size - 1}")
        self._calls: list[_Call] = []

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
    ) -> PrepareResultType:
        _, receive = self.prepare_async(
            a1,
            topk_weights,
            topk_ids,
            num_experts,
            expert_map,
            apply_router_weight_on_input,
            quant_config,
        )
        return receive()

    def supports_async(self) -> bool:
        return True

    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
    ) -> tuple[Callable[[], None], ReceiverType]:
        """Sends rows off; ranks only tell each other how many. The hook waits for those of others,
        the receiver, which calls it if need be, returns them."""
        try:
            self._check(a1, topk_weights, topk_ids)
            rows = weighed_rows(a1, topk_weights, apply_router_weight_on_input)
            owner = self._owner(num_experts, expert_map)
            slot_rank = rank_of_slots(topk_ids, owner)
        except Error:
            agree_on_counts(self._group, None, [0] * self._group.size, _DISPATCH)
            raise
        sent = [
            torch.nonzero((slot_rank == rank).any(dim=1)).flatten()
            for rank in range(self._group.size)
        ]
        rule = rule_of(rows, topk_ids, num_experts)
        counts = [len(tokens) for tokens in sent]
        received = agree_on_counts(self._group, rule, counts, _DISPATCH)
        packed = packed_rows(rows, topk_weights, topk_ids)
        width = packed.shape[1]
        outgoing = packed[torch.cat(sent)].flatten()
        incoming = torch.empty(sum(received) * width, dtype=torch.uint8)
        exchange = self._group.begin_all_to_all(
            outgoing,
            [count * width for count in counts],
            incoming,
            [count * width for count in received],
            _DISPATCH,
        )

        def receive() -> PrepareResultType:
            exchange.wait()
            found, weights, ids = unpacked_rows(incoming.view(-1, width), rows, topk_ids)
            is_local = rank_of_slots(ids, owner) == self._group.rank
            self._calls.append(
                _Call(topk_ids, topk_weights, slot_rank, sent, received, rows.dtype, ids, is_local)
            )
            del self._calls[:-_MOST_CALLS]
            return found, None, None, ids, weights

        return exchange.wait, receive

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> None:
        _, receive = self.finalize_async(
            output,
            fused_expert_output,
            topk_weights,
            topk_ids,
            apply_router_weight_on_input,
            weight_and_reduce_impl,
        )
        receive()

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Sends results home. topk_ids as `prepare` has returned them. The hook waits for this
        rank's own, the receiver, which calls it if need be, writes output."""
        call = self._take(topk_ids)
        if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            weight_and_reduce_impl = TopKWeightAndReduceContiguous()
        if isinstance(weight_and_reduce_impl, TopKWeightAndReduceNoOP):
            outgoing, owed, expected = self._sums(call, fused_expert_output)
        else:
            outgoing, owed, expected = self._results(call, fused_expert_output)
        hidden = output.shape[1]
        home = torch.empty((sum(expected), hidden), dtype=call.dtype)
        exchange = self._group.begin_all_to_all(
            outgoing.to(call.dtype).contiguous().flatten(),
            [count * hidden for count in owed],
            home.flatten(),
            [count * hidden for count in expected],
            _COMBINE,
        )

        def receive() -> None:
            exchange.wait()
            blocks = home.split(expected)
            if isinstance(weight_and_reduce_impl, TopKWeightAndReduceNoOP):
                return add_sums(output, call.sent, blocks)
            every = home.new_zeros((*call.slot_rank.shape, hidden))
            for rank, block in enumerate(blocks):
                every[call.slot_rank == rank] = block
            weight_and_reduce_impl.apply(
                output, every, call.home_weights, call.home_ids, apply_router_weight_on_input
            )
            return None

        return exchange.wait, receive

    def _sums(self, call: _Call, fused: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
        """One row of results for each row that came."""
        return fused, call.received, [len(tokens) for tokens in call.sent]

    def _results(
        self, call: _Call, fused: torch.Tensor
    ) -> tuple[torch.Tensor, list[int], list[int]]:
        """One row of results for each choice of an expert here, in the order of rows and slots."""
        owed = [int(part.sum()) for part in call.is_local.split(call.received)]
        expected = [int((call.slot_rank == rank).sum()) for rank in range(self._group.size)]
        rows = fused.reshape(*call.ids.shape, -1) if fused.numel() else fused
        return rows[call.is_local] if fused.numel() else rows, owed, expected

    def _take(self, ids: torch.Tensor) -> _Call:
        for at, call in enumerate(self._calls):
            if call.ids is ids:
                del self._calls[: at + 1]
                return call
        raise ConclaveValueError(
            "topk_ids: expected the tensor that prepare has returned for this call"
        )

    def _check(self, a1: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        _gradients.refuse({"a1": a1, "topk_weights": weights})
        check_tokens(a1, weights, ids)
        if a1.device.type != "cpu":
            raise ConclaveUnsupportedError(
                f"a1: over groups rows are exchanged in memory of the CPU, found {a1.device}"
            )

    def _owner(self, num_experts: int, expert_map: torch.Tensor | None) -> torch.Tensor:
        """[E] the rank of each expert."""
        size, rank = self._group.size, self._group.rank
        owner = self._rank_of
        if owner is None:
            counts = [num_experts // size + (at < num_experts % size) for at in range(size)]
            owner = torch.repeat_interleave(torch.arange(size), torch.tensor(counts))
        if len(owner) != num_experts:
            raise ConclaveValueError(f"rank_of: expected {num_experts} experts, found {len(owner)}")
        if expert_map is None and size > 1:
            raise ConclaveValueError(f"expert_map: expected that of rank {rank}, found None")
        if expert_map is not None and not torch.equal(expert_map.cpu() >= 0, owner == rank):
            raise ConclaveValueError(
                f"expert_map: expected the experts of rank {rank} in rank_of, found others"
            )
        return owner

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        return None

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    def num_dispatchers(self) -> int:
        return int(self._group.size)
