"""One MoE layer as a Python object."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from conclave import _conclave, _frameworks, _gradients, _limits, _runtime
from conclave._layer_adapters import LayerAdapters
from conclave._layer_base import MOST_BYTES
from conclave._layer_base import Array as Array
from conclave._layer_base import Ranks as Ranks
from conclave._layer_base import copying as copying
from conclave._layer_base import required_ranks as required_ranks
from conclave._layer_base import slots_of as slots_of
from conclave._layer_base import source_of as source_of
from conclave._layer_making import LayerMaking
from conclave._layer_ranks import LayerRanks
from conclave._layer_weights import LayerWeights
from conclave.spec import MoeSpec, ParallelSpec, from_dict

# The arguments of a call in the order of the module's table, which has their shapes and types. A
# caller's scratch memory is no argument of `Layer.forward`.
_ARGUMENTS = tuple(row["name"] for row in _conclave.call_arguments() if not row["is_scratch"])


@dataclasses.dataclass(frozen=True)
class LayerStats:
    """Counters of a layer since it was made, or since `Layer.reset_stats`.

    The first four are of the layer's whole life. On a GPU they and `expert_load` do not wait for
    work that streams still hold.
    """

    forwards: int
    tokens: int
    skipped_ids: int
    tokens_without_finite_logit: int
    expert_load: tuple[int, ...] | None  # rows of each expert [E]; None if they are not counted
    timings_ns: dict[str, int] | None  # route, dispatch, experts, shared, combine, total; CPU only
    refit_epoch: int = 0  # the number of the last refit that was committed
    # Rows of the gate that have NaN now, whose experts are chosen only where nothing else can be;
    # on a GPU those of the gate that was made or reloaded, whatever refits have brought since.
    gate_rows_with_nan: int = 0

    @property
    def balance(self) -> float | None:
        """The largest load over the mean: 1 is even, E is one expert alone. None without load."""
        if not self.expert_load or not any(self.expert_load):
            return None
        return max(self.expert_load) * len(self.expert_load) / sum(self.expert_load)


class Layer(LayerMaking, LayerAdapters, LayerWeights, LayerRanks):
    """A MoE layer, planned and packed once, run for any number of tokens.

    Make one with `from_checkpoint` or `from_tensors`. Forwards may run from several threads at
    once; the GIL is released meanwhile.
    """

    def _num_columns(self) -> int:
        spec = self._core.spec()
        return int(spec["num_experts"] + spec["num_zero_experts"])

    def forward(
        self,
        hidden: Array,
        *,
        router_logits: Array | None = None,
        topk_ids: Array | None = None,
        topk_weights: Array | None = None,
        router_input: Array | None = None,
        residual_input: Array | None = None,
        token_ids: Array | None = None,
        padding_mask: Array | None = None,
        adapter_ids: int | Array | None = None,
        num_tokens: int | Array | None = None,
        top_k: int | None = None,
        banned_experts: Array | Sequence[int] | None = None,
        expert_budget: int | None = None,
        rank_tokens: Sequence[int] | Array | None = None,
        out: Array | None = None,
        shared_out: Array | None = None,
        captured_logits: Array | None = None,
        captured_ids: Array | None = None,
        captured_weights: Array | None = None,
        stream: Any = None,
        workspace: Array | None = None,
    ) -> Array:
        """Runs the layer on T tokens. Give one source of routing: logits, or ids with weights, or
        nothing where the layer has a gate. Ids without weights, with logits or a gate, replay
        recorded choices: the router then only weighs them.

        Args:
            hidden: [T, H] float32, float16 or bfloat16, on the layer's device; rows may be apart.
            router_logits: [T, E] of the same kinds of type.
            topk_ids: [T, k] int32 or int64, -1 for none. topk_weights: [T, k].
            router_input, residual_input: [T, H], read instead of hidden.
            token_ids: [T] integers, of router "hash".
            padding_mask: [T] bool; False: the token is padding, its output is 0.
            adapter_ids: [T] integers that `load_adapter` returned, -1 for none; or one for all. On
                a GPU unknown ids of an array are counted in `LayerStats.skipped_ids`.
            num_tokens: only that many rows count; on a GPU an int64 tensor of one element.
            top_k, banned_experts, expert_budget: limits of this call's choices. Fewer experts for
                each token; ids that nobody shall choose, or bools [E] or [T, E] (E and zero
                experts), which on a GPU may lie there, and [T, E] must; at most so many experts
                for all tokens together. docs/routing.md has the rules.
            rank_tokens: the rows of hidden of every expert-parallel rank in this call, [ep_size]
                integers in a list or an array of the CPU, the same ones on all ranks or None on
                all. On a GPU ranks then need not ask each other; on the CPU they are compared.
            out: [T, H] to write to, maybe hidden itself. By default new memory of the library that
                made hidden, with its type.
            shared_out: [T, H] that gets the shared experts' part, which out then lacks.
            captured_logits [T, E] float32, captured_ids [T, k] int32, captured_weights [T, k]
                float32: to be filled with what was routed.
            stream: of CUDA, where the work is enqueued; by default torch's current one.
            workspace: uint8 [N], at least `workspace_bytes(T)`, on the layer's device and 64-byte
                aligned: scratch memory that no other call uses meanwhile. By default the layer's.

        Returns:
            out.

        Raises:
            Error: naming the argument, with what was expected and found; also where torch records
                gradients and an argument requires them. ConclaveCommError where ranks were given
                other rank_tokens, on a GPU at a later call.
        """
        if out is None:
            out = _frameworks.empty_like(
                hidden, _frameworks.shape_of(hidden, "hidden"), None, "out"
            )
        if isinstance(adapter_ids, int) or getattr(adapter_ids, "shape", None) == ():
            adapter_ids = self._one_for_all(adapter_ids)
        arguments = (
            hidden,
            out,
            router_logits,
            topk_ids,
            topk_weights,
            router_input,
            residual_input,
            token_ids,
            padding_mask,
            adapter_ids,
            num_tokens,
            _limits.plain(top_k),
            _limits.flags_of(banned_experts, self._num_columns),
            _limits.plain(expert_budget),
            rank_tokens,
            shared_out,
            captured_logits,
            captured_ids,
            captured_weights,
        )
        _gradients.refuse_among(_ARGUMENTS, arguments)
        if not self._enqueues:
            _runtime.follow_threads()
            if workspace is None:
                self._core.forward(*arguments)
            else:
                self._core.forward(*arguments, workspace, 0)
            return out
        handle = _frameworks.stream_of(hidden, stream)
        shape = _frameworks.shape_of(hidden, "hidden")
        if workspace is None:
            num_bytes = self._core.workspace_bytes(shape[0] if shape else 0)
            workspace = _frameworks.scratch(hidden, num_bytes, handle)
        self._core.forward(*arguments, workspace, handle)
        return out

    __call__ = forward

    def workspace_bytes(self, tokens: int) -> int:
        """Bytes of scratch memory that a call of so many tokens needs."""
        return int(self._core.workspace_bytes(_limits.integer("tokens", tokens, 0, MOST_BYTES)))

    def plan_for(self, max_tokens: int) -> None:
        """Plans for calls of up to `max_tokens` tokens, on the weights packed already.

        Longer calls run in equal chunks. A layer never plans for fewer tokens than it did; the
        results of a CPU do not depend on it. Scratch memory is that of a call's own tokens on a
        GPU, and of the plan's on a CPU. Safe beside forwards of other threads, and up to 16384
        tokens while a CUDA graph is captured; graphs captured before stay right.

        Raises:
            ConclaveValueError: max_tokens is out of range. ConclaveMemoryError: the scratch memory
                of such calls exceeds that of the machine or GPU; the layer is as before.
        """
        self._core.plan_for(_limits.integer("max_tokens", max_tokens, -MOST_BYTES, MOST_BYTES))

    @property
    def spec(self) -> MoeSpec:
        """What the layer computes."""
        return from_dict(MoeSpec, self._core.spec())

    @property
    def num_logits(self) -> int:
        """Columns of logits: experts, zero experts, and shared ones that the router weighs."""
        return self._core.num_logits

    @property
    def num_slots(self) -> int:
        """Ids and weights of a token: `top_k`, and shared experts that are slots."""
        return self._core.num_slots

    @property
    def parallel(self) -> ParallelSpec:
        """Which part of it this layer holds."""
        return from_dict(ParallelSpec, self._core.parallel())

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:0"."""
        return self._core.device

    @property
    def plan(self) -> dict[str, Any]:
        """Every decision made for the layer, as `explain` prints them."""
        return self._core.plan()

    def explain(self) -> str:
        """The plan as text: kernels, those not taken and why, sizes."""
        return self._core.explain()

    def stats(self) -> LayerStats:
        """Expert load, balance, timings and counters."""
        values = self._core.stats()
        timings = values.pop("timings")
        load = values.pop("expert_load")
        return LayerStats(
            expert_load=tuple(load) if load is not None else None, timings_ns=timings, **values
        )

    def reset_stats(self) -> None:
        """Sets expert load and timings to zero. Not while a forward runs."""
        self._core.reset_stats()

    def __repr__(self) -> str:
        spec = self._core.spec()
        return (
            f"<conclave.Layer {spec['num_experts']} experts, top {spec['top_k']}, "
            f"{spec['hidden_size']} x {spec['intermediate_size']}, {spec['weight_dtype']}, "
            f"{self._core.device}>"
        )
