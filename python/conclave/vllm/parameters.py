"""The parameters of a `FusedMoE` and how they are filled."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from conclave.errors import ConclaveValueError
from conclave.vllm._method_schemes import Declared, PackedScheme
from conclave.vllm._stacks import Part, experts_of_stack, fused_parts, is_stack, own_experts
from conclave.vllm.activation import MoEActivation
from conclave.vllm.expert_maps import ExpertMapManager
from conclave.vllm.mapping import Row, expert_params_mapping
from conclave.vllm.scheme import Scheme
from conclave.vllm.weights import (
    Aid,
    Columns,
    Shard,
    encode_parameter,
    is_of_values,
    load_parameter,
    load_stack,
)

_SHOWN_NAMES = 2  # of those that an error shows
_OTHERS = ("_shared_experts.", "_gate.", "_shared_expert_gate.", "_input_", "_output_")


class ExpertParameters(torch.nn.Module):
    """w13_weight, w2_weight, their biases and scales. The class that derives says the sizes."""

    layer_name: str
    activation: MoEActivation
    params_dtype: torch.dtype
    hidden_size: int
    intermediate_size_per_partition: int
    _all_columns: int  # of all tensor-parallel ranks
    _own_columns: Columns | None = None
    local_num_experts: int
    global_num_experts: int
    logical_num_experts: int
    has_bias: bool
    expert_mapping: list[Row] | None
    _scheme: Scheme | PackedScheme
    _experts: ExpertMapManager
    # Whether checkpoints store tensors of all experts, and of gate and up in one, as [in, out].
    is_fused_checkpoint_transposed: bool = False

    @property
    def tp_rank(self) -> int:
        """The tensor-parallel rank, which reads its slice of a tensor."""
        raise NotImplementedError

    @property
    def tp_size(self) -> int:
        """Ranks that a tensor is cut for."""
        raise NotImplementedError

    def _cut_columns(self) -> None:
        """Whole units of columns for this rank; methods with codes of their own are cut evenly."""
        whole, ranks = self._all_columns, self.tp_size
        unit = self._scheme.column_unit if isinstance(self._scheme, Scheme) else None
        if unit is not None:
            self._own_columns = Columns.of(whole, unit, self.tp_rank, ranks)
            self.intermediate_size_per_partition = self._own_columns.held
        elif whole % ranks != 0:
            raise ConclaveValueError(
                f"intermediate_size: expected a multiple of tp_size {ranks} for packed codes, "
                f"found {whole}"
            )

    def _create_weights(self) -> None:
        self._cut_columns()
        experts, inner = self.local_num_experts, self.intermediate_size_per_partition
        rows = 2 * inner if self.activation.is_gated else inner
        self._scheme.check(inner, self.tp_size, self.activation)
        sizes = (experts, rows, inner, self.hidden_size)
        for declared in self._scheme.parameters(*sizes, self.params_dtype, self.tp_size):
            self._add(declared)
        if self.has_bias:
            for name, width in (("w13_bias", rows), ("w2_bias", self.hidden_size)):
                self._add(Declared(name, (experts, width), self.params_dtype, {}))

    def _add(self, declared: Declared) -> None:
        shape = declared.shape
        if declared.attributes.get("of_all_ranks"):
            shape = (self.global_num_experts, *shape[1:])
        param = torch.nn.Parameter(torch.zeros(shape, dtype=declared.dtype), requires_grad=False)
        if declared.fill:
            param.data.fill_(declared.fill)
        param.weight_loader = self.weight_loader  # type: ignore[attr-defined]
        for name, value in declared.attributes.items():
            setattr(param, name, value)
        self.register_parameter(declared.name, param)

    def weight_loader(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str | None,
        expert_id: int | None,
        return_success: bool = False,
    ) -> bool | None:
        """Copies a tensor of the checkpoint into a parameter, cut to this rank.

        Args:
            param: the parameter, or what `load_weights` found beside one.
            weight_name: the parameter's full name, which says what it is.
            loaded_weight: of one expert, or of all experts in one, which has one axis more: those
                of this rank are taken out of it, and expert_id does not count.
            shard_id: "w1" (gate), "w2" (down) or "w3" (up). None with expert_id: the tensor has all
                experts, or this rank's, and is cut to its columns already (mxfp4 of gpt-oss); it
                may be smaller than the parameter.
            expert_id: among all of the layer, copies included.

        Returns:
            With return_success whether it belongs to this rank and was taken; else None.
        """
        if shard_id is None or expert_id is None:
            load_stack(
                param,
                loaded_weight,
                weight_name,
                lambda count: experts_of_stack(self, count, weight_name),
            )
            return True if return_success else None
        gated = self.activation.is_gated
        shard = Shard(weight_name, shard_id, self.tp_rank, self.tp_size, gated, self._own_columns)
        if (blocks := getattr(param, "blocks", None)) is not None:
            taken = blocks.load(self, param, loaded_weight, shard, expert_id)
        elif not isinstance(param, Aid) and is_stack(self, param, loaded_weight):
            taken = self._load_all(param, loaded_weight, shard)
        else:
            taken = self._load_one(param, loaded_weight, shard, expert_id)
        return taken if return_success else None

    def _load_all(self, param: torch.nn.Parameter, source: torch.Tensor, shard: Shard) -> bool:
        """A tensor [E, ...], of which this rank's experts are taken."""
        row_of = {local: row for row, local in experts_of_stack(self, len(source), shard.name)}
        taken = False
        for expert, local in own_experts(self):
            taken = self._load_one(param, source[row_of[local]], shard, expert)
        return taken

    def _load_one(self, param: Any, source: torch.Tensor, shard: Shard, expert: int) -> bool:
        local = self._map_global_expert_id_to_local_expert_id(expert)
        if getattr(param, "of_all_ranks", False):
            local = expert
        if local < 0:
            return False
        if isinstance(param, Aid):
            param.keep(local, shard.which, source)
        elif (scale := getattr(param, "encoded_with", None)) and is_of_values(source):
            encode_parameter(param, getattr(self, scale), source, shard, local)
        else:
            return load_parameter(param, source, shard, local)
        return True

    weight_loader.supports_moe_loading = True  # type: ignore[attr-defined]

    def _map_global_expert_id_to_local_expert_id(self, expert_id: int) -> int:
        return self._experts.map_global_to_local(expert_id)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Loads (name, tensor) pairs by `expert_mapping`; names are relative to this layer.

        Returns the parameters that took a tensor, one entry for each. Done when it returns.

        Raises:
            ConclaveValueError: if tensors were given and expert_mapping knows the name of none.
        """
        if self.expert_mapping is None:
            raise ConclaveValueError("expert_mapping: load_weights needs it, found None")
        known, taken = False, []
        unknown: list[str] = []
        for name, tensor in weights:
            if parts := fused_parts(self, name, tensor):
                taken.extend(self._load_parts(parts))
                known = True
                continue
            rows = self._rows_of(name)
            known = known or bool(rows)
            if not rows and len(unknown) < _SHOWN_NAMES:
                unknown.append(name)
            for mapped, shard_id, expert_id in rows:
                param = self._parameter_of(mapped, name)
                if self.weight_loader(param, tensor, mapped, shard_id, expert_id, True):
                    taken.append(mapped)
        if unknown and not known:
            expected = [self._expected_name(row) for row in self.expert_mapping[:_SHOWN_NAMES]]
            raise ConclaveValueError(
                f"weights: none of the names is one of {self.layer_name or 'this layer'}; expected "
                f"names such as "
                f"{', '.join(expected)}, found {', '.join(unknown)}"
            )
        return taken

    def _load_parts(self, parts: list[Part]) -> list[str]:
        """Loads tensors of all experts or of gate and up in one; returns what took one, once."""
        taken: dict[str, None] = {}
        for part in parts:
            param, name = getattr(self, part.parameter), part.parameter
            if self.weight_loader(param, part.tensor, name, part.shard, part.expert, True):
                taken[name] = None
        return list(taken)

    def _parameter_of(self, mapped: str, name: str) -> Any:
        found: Any = self
        first, *rest = mapped.split(".")
        param = getattr(self, first, None)
        if rest and hasattr(param, "aids"):
            return Aid(param.aids, ".".join(rest))  # type: ignore[union-attr]
        for part in mapped.split("."):
            found = getattr(found, part, None)
        if found is None:
            raise ConclaveValueError(
                f"weights: {name} goes to {mapped}, which {self.layer_name!r} does not have"
            )
        return found

    def _rows_of(self, name: str) -> list[tuple[str, str, int]]:
        """Parameter, shard and expert of every row of the mapping that takes a name."""
        full = f"{self.layer_name}.{name}"
        found = []
        for param_name, weight_name, expert_id, shard_id in self.expert_mapping or ():
            at = f".{full}".find(f".{weight_name}")
            if at >= 0:
                mapped = full[:at] + param_name + full[at + len(weight_name) :]
                mapped = mapped.removeprefix(f"{self.layer_name}.").removeprefix("experts.")
                found.append((mapped, shard_id, expert_id))
        return found

    def _expected_name(self, row: Row) -> str:
        """A name of a weight that a row would take, relative to this layer."""
        whole = f"{row[1]}weight"
        parts = self.layer_name.split(".")
        for start in range(len(parts)):
            tail = ".".join(parts[start:]) + "."
            if whole.startswith(tail):
                return whole.removeprefix(tail)
        return whole

    def get_expert_weights(self) -> list[torch.Tensor]:
        """Views [E, -1] of every parameter of the experts, for whoever moves experts about: of the
        same memory, in its order, also where a scale is stored transposed. What a rank holds of all
        ranks' experts is not moved."""
        local = self.local_num_experts
        return [
            _in_order(param).view(local, math.prod(param.shape[1:]))
            for name, param in self.named_parameters()
            if not name.startswith(_OTHERS)
            and param.ndim > 0
            and not (getattr(param, "of_all_ranks", False) and param.shape[0] != local)
        ]

    @classmethod
    def make_expert_params_mapping(
        cls,
        model: torch.nn.Module | None,
        ckpt_gate_proj_name: str,
        ckpt_down_proj_name: str,
        ckpt_up_proj_name: str,
        num_experts: int,
        num_redundant_experts: int = 0,
    ) -> list[Row]:
        """Rows (parameter, part of a weight's name, expert, shard) for `load_weights`."""
        names = (ckpt_gate_proj_name, ckpt_down_proj_name, ckpt_up_proj_name)
        return expert_params_mapping(model, names, num_experts, num_redundant_experts, "experts.")


def _in_order(param: torch.Tensor) -> torch.Tensor:
    """A tensor whose last two axes are swapped in memory, seen in the order of memory."""
    if param.ndim == 3 and not param.is_contiguous() and param.stride(1) == 1:
        return param.detach().transpose(1, 2)
    return param
