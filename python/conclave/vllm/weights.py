"""Checkpoint tensors into the parameters of a `FusedMoE`, each cut to what this rank holds.

A parameter says by its attributes what it is: `is_transposed` (stored [in, out]), `shard_dim`,
`load_full_w2`, and for scales `quant_method`, a value of `FusedMoeWeightScaleSupported`. Further
ones are ours: `turns` (the checkpoint has it transposed), `is_stacked` (tensors of all experts at
once), `aids` (further tensors, kept as they come), `takes_exponents` (scales that may be stored as
bytes of e8m0), `is_of_columns` (a number for each column), `encoded_with` (the scales of weights
that become codes when they are loaded) and `flat_cols` (of a whole w2 whose codes are one line,
where ranks have a part of them).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from conclave.errors import ConclaveTypeError, ConclaveValueError
from conclave.vllm.mapping import FusedMoeWeightScaleSupported

# The axis of a matrix that tensor parallelism cuts. w13: rows of gate and up in turn.
_SHARDS = {"w1": 0, "w2": 1, "w3": 0, "w13": 0}
_KINDS = FusedMoeWeightScaleSupported


@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns [begin, end) of an expert's `whole` that a tensor-parallel rank has."""

    begin: int
    end: int
    whole: int

    @classmethod
    def of(cls, whole: int, unit: int, rank: int, ranks: int) -> Columns:
        """A rank's part in whole units but for the last one's rest. Parts differ by one unit at
        most, and may be empty."""
        units = -(-whole // unit)
        begin, end = (min(whole, unit * (units * r // ranks)) for r in (rank, rank + 1))
        return cls(begin, end, whole)

    @property
    def held(self) -> int:
        """Columns of the parameters: a rank without any has one, of zeros."""
        return max(self.end - self.begin, 1)

    def in_steps(self, step: int, times: int) -> tuple[int, int, int]:
        """Begin, length and whole on an axis with one element for so many columns, and as often."""
        begin, whole = self.begin // step, -(-self.whole // step)
        length = -(-self.end // step) - begin if self.end > self.begin else 0
        return times * begin, times * length, times * whole


@dataclasses.dataclass(frozen=True)
class Shard:
    """One tensor on its way into a parameter."""

    name: str
    which: str  # w1, w2, w3, w13
    tp_rank: int
    tp_size: int
    gated: bool
    columns: Columns | None = None  # None: equal parts
    step: int = 1  # columns for which the parameter has one element


@dataclasses.dataclass(frozen=True)
class Aid:
    """Tensors of one kind that say what codes of a parameter mean, kept as they come."""

    kept: dict[tuple[int, str, str], torch.Tensor]
    suffix: str

    def keep(self, expert: int, shard: str, tensor: torch.Tensor) -> None:
        """Replaces what was kept before."""
        self.kept[expert, shard, self.suffix] = tensor.detach().clone()


def is_of_values(source: Any) -> bool:
    """Whether a tensor holds weights that are no codes."""
    return getattr(source, "dtype", None) in (torch.float32, torch.float16, torch.bfloat16)


_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def encode_parameter(
    param: torch.nn.Parameter,
    scales: torch.nn.Parameter,
    source: torch.Tensor,
    shard: Shard,
    expert: int,
) -> None:
    """Makes codes of this rank's part of an expert's matrix: a scale for the part, or for each of
    its rows, which is the largest magnitude over that of the codes."""
    with torch.no_grad():
        target, found = param[expert], scales[expert]
        part = torch.zeros(target.shape, dtype=torch.float32, device=target.device)
        _load_matrix(part, source.detach().float(), shard, _axis(param, shard))
        rows = slice(None)
        if shard.which in ("w1", "w3") and shard.gated:
            half = target.shape[0] // 2
            rows = slice(0, half) if shard.which == "w1" else slice(half, None)
        values = part[rows]
        by_row = scales.ndim > 1 and scales.shape[1] == param.shape[1]
        amax = values.abs().amax(1, keepdim=True) if by_row else values.abs().amax()
        step = torch.where(amax > 0, amax / _LARGEST[param.dtype], 1.0)
        codes = (values / step).clamp(-_LARGEST[param.dtype], _LARGEST[param.dtype])
        target[rows] = (codes.round() if param.dtype == torch.int8 else codes).to(param.dtype)
        if by_row:
            found[rows] = step
        elif found.ndim and shard.which != "w13":
            found[0 if shard.which == "w1" else 1] = step
        else:
            found.fill_(step)


def load_stack(
    param: torch.nn.Parameter,
    source: torch.Tensor,
    name: str,
    experts_of: Callable[[int], list[tuple[int, int]]],
) -> None:
    """A tensor of all experts, which may be smaller than the parameter: the rest, of padded rows
    and columns, stays 0. Blocks of codes [..., blocks, bytes] count as columns.

    Args:
        experts_of: of the tensor's experts, (row, index of the parameter) of each of this rank.
    """
    if not getattr(param, "is_stacked", False) and "bias" not in name:
        raise ConclaveValueError(f"shard_id, expert_id: {name} is loaded expert by expert")
    if source.ndim == param.ndim + 1:
        source = source.flatten(-2)
    fits = source.ndim == param.ndim
    if not fits or any(a > b for a, b in zip(source.shape[1:], param.shape[1:], strict=True)):
        raise ConclaveValueError(
            f"{name}: expected shape {list(param.shape)} or less of rows and columns, found "
            f"{list(source.shape)}"
        )
    same = source.element_size() == param.element_size() == 1
    place = tuple(slice(size) for size in source.shape[1:])
    with torch.no_grad():
        param.zero_()
        for row, local in experts_of(len(source)):
            part = source[row]
            param[local][place] = part.view(param.dtype) if same else part.to(param.dtype)


def load_parameter(param: torch.nn.Parameter, source: Any, shard: Shard, expert: int) -> bool:
    """Copies what belongs to this rank. False: the name says no kind of parameter that is known.

    Args:
        source: the tensor of one expert.
        expert: the local index.
    """
    if shard.which not in _SHARDS:
        raise ConclaveValueError(f"shard_id: expected one of w1, w2, w3, found {shard.which!r}")
    source = _tensor_of(source, param, shard)
    shard = dataclasses.replace(shard, step=getattr(param, "column_step", 1))
    with torch.no_grad():
        target = param[expert]
        axis = _axis(param, shard)
        if source.ndim == param.ndim == 3 and param.dtype == torch.uint8:
            source = source.flatten(1)  # codes in blocks, [rows, blocks, bytes]
        if getattr(param, "turns", False) and source.ndim > 1:
            source = source.transpose(-2, -1)
        if "input_scale" in shard.name:
            _load_input_scale(param, target, source, shard, expert)
        elif "weight_shape" in shard.name:
            target.copy_(_scalar_like(source, target, shard.name))
        elif "g_idx" in shard.name or getattr(param, "is_of_columns", False):
            if target.ndim == 2 and shard.which in ("w1", "w3"):  # one of gate, one of up
                target = target[0 if shard.which == "w1" else 1]
            part = _cut(source, 0, target, shard) if shard.which == "w2" else source
            _copy(target, part.expand(target.shape) if shard.which == "w13" else part, shard)
        elif "scale" in shard.name or "zero" in shard.name or "offset" in shard.name:
            _load_scale(param, target, source, shard, axis)
        elif getattr(param, "quant_method", None) is not None:
            _load_scale(param, target, source, shard, axis)
        elif "bias" in shard.name:
            _load_bias(target, source, shard)
        elif shard.which == "w2" and (cols := getattr(param, "flat_cols", 0)):
            _copy(target, _cut_flat(source, cols, shard), shard)
        elif "weight" in shard.name:
            _load_matrix(target, source, shard, axis)
        else:
            return False
    return True


def _tensor_of(source: Any, param: torch.nn.Parameter, shard: Shard) -> torch.Tensor:
    if not isinstance(source, torch.Tensor):
        source = _as_tensor(source)
    if getattr(param, "takes_exponents", False) and _is_of_exponents(source):
        return _powers(source.detach(), shard)
    fp8 = torch.float8_e4m3fn
    if param.dtype == fp8 and source.dtype not in (fp8, torch.uint8, torch.int8):
        raise ConclaveTypeError(f"loaded_weight: expected float8_e4m3fn, found {source.dtype}")
    if param.dtype == fp8 and source.dtype != fp8:
        source = source.view(fp8)
    if param.dtype == torch.uint8 and source.element_size() == 1:
        source = source.view(torch.uint8)  # bits, whatever they are called
    unsigned = param.dtype == torch.int8 and source.dtype == torch.uint8
    if unsigned or param.dtype.is_floating_point != source.dtype.is_floating_point:
        raise ConclaveTypeError(f"loaded_weight: expected {param.dtype}, found {source.dtype}")
    return source.detach()


def _as_tensor(source: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(source)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConclaveTypeError(
            f"loaded_weight: expected a tensor, found {type(source).__name__}"
        ) from error


def _is_of_exponents(source: torch.Tensor) -> bool:
    """Whether a tensor of scales holds bytes of e8m0, under that name or none."""
    return source.dtype == torch.uint8 or "e8m0" in str(source.dtype)


def _powers(source: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Scales 2^(byte - 127), exact in float32."""
    stored = source.view(torch.uint8).int()
    if stored.eq(255).any():
        raise ConclaveValueError(
            f"{shard.name}: {shard.which} expected exponents of 0 to 254, found 255, which is no "
            "number"
        )
    return torch.where(stored == 0, 1 << 22, stored << 23).view(torch.float32)


def _axis(param: torch.nn.Parameter, shard: Shard) -> int:
    axis = _SHARDS[shard.which]
    if getattr(param, "is_transposed", False):
        axis = 1 - axis
    forced: int | None = getattr(param, "shard_dim", None)
    return axis if forced is None else forced


def _scalar_like(source: torch.Tensor, target: torch.Tensor, name: str) -> torch.Tensor:
    if source.numel() != target.numel():
        raise ConclaveValueError(
            f"{name}: expected {target.numel()} numbers, found {source.numel()}"
        )
    return source.reshape(target.shape)


def _load_input_scale(
    param: torch.nn.Parameter, target: torch.Tensor, source: torch.Tensor, shard: Shard, expert: int
) -> None:
    """A static scale of rows. Where w1 and w3 share one number it is the larger of theirs,
    whichever comes last: both read the same rows."""
    if shard.which == "w2" or target.numel() != 1:
        _load_one_scale(target, source, shard)
        return
    # Kept by shard, so that loading again replaces what was loaded before.
    loaded = param.__dict__.setdefault("loaded_input_scales", {}).setdefault(expert, {})
    loaded[shard.which] = _scalar_like(source, target, shard.name).to(target, copy=True)
    target.copy_(torch.stack(list(loaded.values())).amax(dim=0))


def _load_scale(
    param: torch.nn.Parameter, target: torch.Tensor, source: torch.Tensor, shard: Shard, axis: int
) -> None:
    kind = getattr(param, "quant_method", None)
    if kind == _KINDS.TENSOR.value:
        _load_one_scale(target, source, shard)
    elif kind == _KINDS.CHANNEL.value:
        # Channels of w2 are columns of the output: every rank has all of them.
        if shard.which == "w2":
            _copy(target, _channel(source, target), shard)
        else:
            _load_matrix(target, _channel(source, target), shard, axis)
    elif kind in (_KINDS.GROUP.value, _KINDS.BLOCK.value):
        if source.ndim == 2 * target.ndim == 4 and source.shape[1] == source.shape[3] == 1:
            source = source.reshape(source.shape[0], source.shape[2])  # as ModelOpt has blocks
        if getattr(param, "may_be_combined", False) and _is_combined(target, source, shard, axis):
            _load_combined(target, source, shard, axis)
            return
        if target.ndim == 2 and target.shape[1] == 1:
            source = _channel(source, target)
        full = shard.which == "w2" and getattr(param, "load_full_w2", False)
        if full:
            _copy(target, source, shard)
        else:
            _load_matrix(target, source, shard, axis)
    else:
        allowed = ", ".join(member.value for member in _KINDS)
        raise ConclaveValueError(
            f"quant method must be one of {allowed}: {shard.name} has {kind!r}"
        )


def _is_combined(target: torch.Tensor, source: torch.Tensor, shard: Shard, axis: int) -> bool:
    """Whether a tensor has the scales of gate and up above each other, for all ranks."""
    both = shard.gated and shard.which != "w2"
    return both and source.shape[axis] == target.shape[axis] * shard.tp_size


def _load_combined(target: torch.Tensor, source: torch.Tensor, shard: Shard, axis: int) -> None:
    """Each rank has a part of gate and the same part of up."""
    half = target.shape[axis] // 2
    for i, part in enumerate(source.chunk(2, axis)):
        _copy(
            target.narrow(axis, i * half, half),
            part.narrow(axis, half * shard.tp_rank, half),
            shard,
        )


def _channel(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Scales [rows] as [rows, 1]."""
    return source.unsqueeze(-1) if source.ndim == target.ndim - 1 else source


def _load_one_scale(target: torch.Tensor, source: torch.Tensor, shard: Shard) -> None:
    """w1 and w3 have a scale of their own each, where target has two."""
    if target.ndim and target.shape[-1] == 2 and shard.which != "w2":
        if source.numel() == 2:
            target.copy_(source.reshape(2))  # both of a fused tensor
            return
        if shard.which == "w13":
            target.copy_(source.reshape(()).expand(2))
            return
        target = target[0 if shard.which == "w1" else 1]
    target.copy_(_scalar_like(source, target, shard.name))


def _load_bias(target: torch.Tensor, source: torch.Tensor, shard: Shard) -> None:
    """That of w13 is cut as its rows are; that of w2 is added by one rank and whole."""
    if shard.which == "w2":
        _copy(target, source, shard)
    else:
        _load_matrix(target, source, shard, source.ndim - 1)


def _load_matrix(target: torch.Tensor, source: torch.Tensor, shard: Shard, axis: int) -> None:
    if shard.which in ("w1", "w3") and shard.gated:
        half = target.shape[axis] // 2
        target = target.narrow(axis, 0 if shard.which == "w1" else half, half)
    elif shard.which == "w3":
        raise ConclaveValueError(
            f"shard_id: the activation has no gate, so that {shard.name} has w1 and w2 only"
        )
    if source.ndim == 0:
        target.copy_(source.expand(target.shape))
        return
    part = _cut(source, axis, target, shard)
    _copy(target.narrow(axis, 0, part.shape[axis]), part, shard)


def _cut(source: torch.Tensor, axis: int, target: torch.Tensor, shard: Shard) -> torch.Tensor:
    """This rank's part of a whole tensor. What is larger than all ranks' parts is no such tensor:
    cutting it would load a part of something else."""
    size = target.shape[axis]
    start, whole = size * shard.tp_rank, size * shard.tp_size
    times = 2 if shard.which == "w13" else 1
    # A parameter that is not the layer's own has steps that nothing tells: its parts are equal.
    if shard.columns is not None and (shard.step > 1 or size == times * shard.columns.held):
        start, size, whole = shard.columns.in_steps(shard.step, times)
    if axis >= source.ndim or source.shape[axis] != whole:
        raise ConclaveValueError(
            f"{shard.name}: {shard.which} of tensor-parallel rank {shard.tp_rank} reads {start} to "
            f"{start + size} of {whole} on axis {axis}, found shape {list(source.shape)}"
        )
    return source.narrow(axis, start, size)


def unpack_flat(source: torch.Tensor, rows: int) -> torch.Tensor:
    """Codes [rows, cols] of bytes that hold two, the upper half first."""
    flat = source.flatten()
    return torch.stack([flat >> 4, flat & 15], 1).reshape(rows, -1)


def pack_flat(codes: torch.Tensor) -> torch.Tensor:
    """The bytes of codes whose number in a row is even."""
    return codes[..., ::2] << 4 | codes[..., 1::2]


def _cut_flat(source: torch.Tensor, cols: int, shard: Shard) -> torch.Tensor:
    """This rank's columns of a matrix whose codes run over the ends of rows, as such a matrix."""
    if 2 * source.numel() % cols:
        raise ConclaveValueError(
            f"{shard.name}: {shard.which} expected codes of rows of {cols} columns, found shape "
            f"{list(source.shape)}"
        )
    codes = unpack_flat(source, 2 * source.numel() // cols)
    part = codes.chunk(shard.tp_size, 1)[shard.tp_rank]
    return pack_flat(part.flatten()).unsqueeze(1)


def _copy(target: torch.Tensor, source: torch.Tensor, shard: Shard) -> None:
    if tuple(target.shape) != tuple(source.shape):
        raise ConclaveValueError(
            f"{shard.name}: {shard.which} expected shape {list(target.shape)}, "
            f"found {list(source.shape)}"
        )
    target.copy_(source)
