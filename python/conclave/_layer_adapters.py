"""A layer's low-rank adapters."""

from __future__ import annotations

import os
from typing import Any

from conclave import _limits
from conclave._layer_base import Array, LayerBase
from conclave._weights import refuse_beside
from conclave.checkpoint import Checkpoint
from conclave.errors import ConclaveTypeError

_MOST_ADAPTERS = 2**31 - 1


class LayerAdapters(LayerBase):
    """Adapters of a `Layer`."""

    @staticmethod
    def _one_for_all(adapter_id: Any) -> int | None:
        number = _limits.integer("adapter_ids", adapter_id, -1, _MOST_ADAPTERS)
        return None if number == -1 else number

    def load_adapter(
        self,
        directory: str | os.PathLike[str] | None = None,
        layer: int | None = None,
        *,
        checkpoint: Checkpoint | None = None,
        gate_up_order: str | None = None,
        scale: float = 1.0,
        name: str = "",
        **factors: Array,
    ) -> int:
        """Adds low-rank adapters of the experts, and returns the id that calls name them by.

        The layer needs `LayerOptions.max_adapter_rank`. Forwards that are under way do not see
        it. Arrays are in host memory, wherever the layer is. With several ranks all add and remove
        the same adapters in the same order, between the same forwards; each keeps those of its
        experts.

        Args:
            directory: what PEFT saved. layer: N of model.layers.N there.
            checkpoint: the model's, which says how gate and up lie in its stacks, and whether it
                has the adapter's layers.
            gate_up_order: instead of it: "concatenated" (by default) or "interleaved" (gpt-oss).
            scale, name: of an adapter of arrays.
            factors: such arrays: ``gate_a`` [E, r, H] and ``gate_b`` [E, I, r], ``up_a``,
                ``up_b``, ``down_a`` [E, r, I] and ``down_b`` [E, H, r]; of shared experts
                ``shared_gate_a`` [S, r, H] and so on. What is missing is not adapted.

        Raises:
            Error: naming the file, tensor or array, with what was expected and found.
        """
        if directory is None:
            named = {"layer": layer, "checkpoint": checkpoint, "gate_up_order": gate_up_order}
            refuse_beside("arrays", named)
            return self._core.add_adapter_from_arrays(
                factors, _limits.real("scale", scale), _limits.text("name", name)
            )
        refuse_beside("a directory", factors)
        refuse_beside("a directory", {"scale": scale, "name": name}, {"scale": 1.0, "name": ""})
        if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
            raise ConclaveTypeError(
                f"checkpoint: expected a Checkpoint, found {type(checkpoint).__name__}"
            )
        return self._core.add_adapter_from_directory(
            _limits.path("directory", directory),
            _limits.layer("layer", layer),
            None if gate_up_order is None else _limits.text("gate_up_order", gate_up_order),
            checkpoint._core if checkpoint is not None else None,
        )

    def remove_adapter(self, adapter_id: int) -> None:
        """Removes an adapter. Forwards that are under way keep it, and CUDA graphs that hold a
        forward until `forget_graphs`."""
        self._core.remove_adapter(_limits.integer("adapter_id", adapter_id, -1, _MOST_ADAPTERS))

    def forget_graphs(self) -> int:
        """Says that no CUDA graph which holds a forward of this layer is launched any more: gives
        back the memory of adapters that were removed since, and returns its bytes. Waits for the
        device."""
        return self._core.forget_graphs()

    @property
    def adapters(self) -> list[dict[str, Any]]:
        """For each adapter its id, name, max_rank, num_factors, and the bytes this rank holds."""
        return self._core.adapters()
