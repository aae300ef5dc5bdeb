"""Layers of model directories and of arrays."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from conclave import _conclave, _limits, _runtime
from conclave._layer_base import (
    Array,
    LayerBase,
    LayerT,
    Ranks,
    counted,
    ranks_of,
    split_of,
)
from conclave._shapes import as_loaded, complete_spec, device_of_experts
from conclave._weights import checked_form, given_weights
from conclave.checkpoint import Checkpoint, Feed
from conclave.spec import LayerOptions, MoeSpec, ParallelSpec, given_fields, to_dict


class LayerMaking(LayerBase):
    """How a `Layer` is made."""

    @classmethod
    def from_checkpoint(
        cls: type[LayerT],
        checkpoint: Checkpoint | Feed | str | os.PathLike[str],
        layer: int,
        *,
        device: str | None = None,
        isa: str | None = None,
        options: LayerOptions | Mapping[str, Any] | None = None,
        parallel: ParallelSpec | Mapping[str, Any] | None = None,
        count: bool | None = None,
        plain_rows: bool = False,
        communicator: Ranks | None = None,
        tensor_communicator: Ranks | None = None,
    ) -> LayerT:
        """A layer of a model directory.

        Args:
            checkpoint: the directory, one that is open already, or a `Feed` that has the layer.
            layer: N of model.layers.N.
            device: "cpu" or "cuda:0"; by default CONCLAVE_DEVICE, else "cpu".
            isa: an instruction set to force, such as "avx2".
            options, parallel: how it runs, and which part of it.
            count: whether `stats` counts rows by expert; by default on the CPU only, where it
                costs nothing.
            plain_rows: leave rows as they are where the checkpoint quantises them.
            communicator, tensor_communicator: the ranks that hold the other experts, and the other
                slices of these; all of them make the layer at the same time, and call it. With
                one of them `parallel` is by default a split over its ranks. Each is a Communicator,
                or a group of torch.distributed: all layers of a device that are given that group
                share one communicator, which `from_process_group` makes; on a GPU one of NCCL.

        Raises:
            Error: naming the file, tensor or field; KeyboardInterrupt stops a load.
        """
        experts, slices = ranks_of(communicator, tensor_communicator, device)
        context = _runtime.context(device, isa, experts, slices)
        arguments = (
            _limits.layer("layer", layer),
            given_fields("options", options),
            split_of(parallel, experts, slices),
            counted(count, context),
            _limits.flag("plain_rows", plain_rows),
        )
        if isinstance(checkpoint, Feed):
            return cls(_conclave.Layer.from_feed(context, checkpoint._core, *arguments))
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint(_limits.path("checkpoint", checkpoint))
        return cls(_conclave.Layer.from_checkpoint(context, checkpoint._core, *arguments))

    @classmethod
    def from_tensors(
        cls: type[LayerT],
        spec: MoeSpec | Mapping[str, Any],
        *,
        device: str | None = None,
        isa: str | None = None,
        options: LayerOptions | Mapping[str, Any] | None = None,
        parallel: ParallelSpec | Mapping[str, Any] | None = None,
        gate_up_order: str = "concatenated",
        shared_gate_up_order: str = "concatenated",
        transposed: bool = False,
        expert_map: Sequence[int] | None = None,
        count: bool | None = None,
        communicator: Ranks | None = None,
        tensor_communicator: Ranks | None = None,
        **weights: Array | Sequence[Array] | None,
    ) -> LayerT:
        """A layer of arrays. On the CPU they are packed and may go; on a GPU they are used in place
        and kept where they are dense and concatenated.

        Args:
            spec: what the layer computes. Sizes, the weights' type and has_gate may be left out.
            gate_up_order: of the rows of gate_up and its bias: "concatenated" (all gate rows, then
                all up rows) or "interleaved" (gate 0, up 0, gate 1, ...).
            transposed: gate_up and down are [E, H, 2I] and [E, I, H].
            expert_map: [num_experts], the index in the arrays of each expert, -1 for none; for
                layers that hold a part of the experts (`parallel`). Static scales of rows may be
                those of all experts, of which the largest counts.
            communicator, tensor_communicator: as in `from_checkpoint`.
            weights: by name, those that the spec needs: ``gate_up`` [E, 2I, H] ([E, I, H] without a
                gate) or ``gate`` and ``up`` [E, I, H] apart; ``down`` [E, H, I]; ``router`` [E, H];
                ``gate_up_bias`` [E, 2I], ``down_bias`` [E, H]; ``selection_bias`` [E];
                ``shared_gate_up``, ``shared_down``, ``shared_expert_gate``; ``gate_up_scale``,
                ``down_scale``, and with the same beginnings ``_zero`` (as scales),
                ``_global_scale`` [E] or of gate and up [E, 2], ``_column_order`` and
                ``_column_factor`` [E, H] or [E, 2, H], of down [E, I]; and the
                others of ExpertWeights in the C++ interface.
                Instead of a stack, gate_up, gate, up and down may be lists of one matrix an expert.
                int8 weights are int8 arrays, or uint8 ones, each byte 128 more than its value;
                int4 ones are uint8 [E, rows, cols / 2] or int32 [E, rows, cols / 8], the first code
                in the lowest bits, each eight more than its value. The spec's ``weight_dtype`` must
                name both where arrays are no int8. Gradients of forwards do not reach weights:
                while torch records, none may require them.

        Raises:
            Error: naming the argument, with what was expected and found.
        """
        given = given_weights(weights)
        form = checked_form(gate_up_order, shared_gate_up_order, transposed, expert_map)
        local_of = None if expert_map is None else form.local_of
        fields = complete_spec(to_dict(spec, "spec"), given, form.transposed, local_of)
        given, orders = as_loaded(given, form.orders, form.transposed, fields)
        device = device_of_experts(given) if device is None else _limits.text("device", device)
        experts, slices = ranks_of(communicator, tensor_communicator, device)
        context = _runtime.context(device, isa, experts, slices)
        return cls(
            _conclave.Layer.from_arrays(
                context,
                fields,
                given,
                given_fields("options", options),
                split_of(parallel, experts, slices),
                *orders,
                form.transposed,
                form.local_of,
                counted(count, context),
            )
        )
