"""Intermediate sizes that tensor-parallel ranks do not divide: ranks have equally many columns, and
the last ones are zeros."""

from __future__ import annotations

from typing import Any

import torch

from conclave.errors import ConclaveUnsupportedError
from conclave.vllm._method_schemes import PackedScheme
from conclave.vllm.parameters import ExpertParameters
from conclave.vllm.quant_method.base import FusedMoEMethodBase


class PaddedColumns(ExpertParameters):
    """Loads tensors of the model's size into parameters of a size that ranks divide."""

    intermediate_size: int

    @property
    def _added_columns(self) -> int:
        """Columns of all ranks that the model does not have."""
        return self.intermediate_size_per_partition * self.tp_size - self.intermediate_size

    def weight_loader(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str | None,
        expert_id: int | None,
        return_success: bool = False,
    ) -> bool | None:
        """As of `ExpertParameters`, which says what the arguments are."""
        if self._added_columns and shard_id in ("w1", "w2", "w3"):
            loaded_weight = self._padded(param, loaded_weight, weight_name, shard_id)
        return super().weight_loader(
            param, loaded_weight, weight_name, shard_id, expert_id, return_success
        )

    weight_loader.supports_moe_loading = True  # type: ignore[attr-defined]

    def _padded(
        self, param: torch.nn.Parameter, source: torch.Tensor, name: str, shard: str
    ) -> torch.Tensor:
        source = torch.as_tensor(source)
        axis = _axis_of_columns(param, source, name, shard)
        if axis is None or axis >= source.ndim or source.shape[axis] != self.intermediate_size:
            return source  # what has no such columns, and what the loader refuses
        shape = [*source.shape]
        shape[axis] = self._added_columns
        # Scales of rows that are zeros may be anything but 0, which is no scale.
        kind = torch.uint8 if source.element_size() == 1 else source.dtype
        fill = torch.full(shape, 1 if "scale" in name else 0, dtype=kind, device=source.device)
        return torch.cat([source.detach().view(kind), fill], axis).view(source.dtype)


def _axis_of_columns(
    param: torch.nn.Parameter, source: torch.Tensor, name: str, shard: str
) -> int | None:
    """The axis of a tensor along which the intermediate columns lie; None: it has none."""
    kind = getattr(param, "quant_method", None)
    if "bias" in name:
        return None if shard == "w2" else source.ndim - 1
    if kind == "channel":
        return None if shard == "w2" else int(source.ndim == 3)
    if kind is not None or "input_scale" in name:
        return None
    axis = 1 if shard == "w2" else 0
    if getattr(param, "is_transposed", False):
        axis = 1 - axis
    forced = getattr(param, "shard_dim", None)
    axis = axis if forced is None else forced
    return axis + 1 if source.ndim == 3 else axis


def check_padding(layer: PaddedColumns, method: FusedMoEMethodBase) -> None:
    """Raises ConclaveUnsupportedError where columns cannot be added to parameters."""
    if not layer._added_columns:
        return
    scheme: Any = getattr(method, "scheme", None)
    reason = ""
    if isinstance(scheme, PackedScheme):
        reason = "codes of this method are not padded"
    elif getattr(scheme, "fixed", None) is not None and scheme.is_coded:
        reason = "the configuration has scales of another size"
    elif layer.activation.is_interleaved:
        reason = f"rows of gate and up alternate in {layer.activation.value}"
    if reason:
        raise ConclaveUnsupportedError(
            f"intermediate_size: expected a multiple of tp_size {layer.tp_size}, found "
            f"{layer.intermediate_size}; {reason}"
        )
