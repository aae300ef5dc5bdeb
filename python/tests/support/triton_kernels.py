"""In torch and float64, what transformers takes from Triton's kernels for gpt-oss in mxfp4.

Names, arguments and shapes are those of gpt_oss_triton_kernels; the order of bytes is another.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch

from support.coded import table

FP4 = SimpleNamespace(bitwidth=4)


class StridedLayout:
    """Bytes as they are, columns first."""

    def __init__(self, shape: Any) -> None:
        self.initial_shape = shape

    def swizzle_data(self, data: torch.Tensor) -> torch.Tensor:
        return data

    def unswizzle_data(self, data: torch.Tensor) -> torch.Tensor:
        return data


class TurnedLayout(StridedLayout):
    """Another order: bytes of a row from its end, and four rows of zeros behind the last."""

    def __init__(self, shape: Any, mx_axis: int) -> None:
        super().__init__(shape)
        assert mx_axis == 1

    def swizzle_data(self, data: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(data.flip(-2), (0, 4)).contiguous()

    def unswizzle_data(self, data: torch.Tensor) -> torch.Tensor:
        return data[..., :-4].flip(-2)


@dataclasses.dataclass
class Storage:
    data: torch.Tensor
    layout: StridedLayout


@dataclasses.dataclass
class Tensor:
    storage: Storage
    dtype: Any
    shape: Any


def wrap_torch_tensor(data: torch.Tensor, dtype: Any = None) -> Tensor:
    shape = list(data.shape)
    if dtype is FP4:
        shape[data.stride().index(1)] *= 2
    return Tensor(Storage(data, StridedLayout(data.shape)), dtype or data.dtype, shape)


def convert_layout(tensor: Tensor, kind: Any, **options: Any) -> Tensor:
    data = tensor.storage.layout.unswizzle_data(tensor.storage.data)
    layout = kind(data.shape, **options)
    return Tensor(Storage(layout.swizzle_data(data), layout), tensor.dtype, tensor.shape)


@dataclasses.dataclass
class PrecisionConfig:
    weight_scale: Tensor
    flex_ctx: Any


@dataclasses.dataclass(frozen=True)
class FnSpecs:
    name: str
    fn: Any
    fn_arg_names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class FusedActivation:
    specs: FnSpecs
    fn_args: tuple[Any, ...]
    reduction_n: int


@dataclasses.dataclass
class Indx:
    """GatherIndx and ScatterIndx: choices in the order of experts, and where each of them went."""

    src_indx: torch.Tensor
    dst_indx: torch.Tensor


@dataclasses.dataclass
class RoutingData:
    gate_scal: torch.Tensor
    expt_hist: torch.Tensor
    n_expts_tot: int
    n_expts_act: int
    expt_data: Any = None


def routing(logits: torch.Tensor, top_k: int) -> tuple[RoutingData, Indx, Indx]:
    """Softmax over the chosen logits; choices sorted by expert."""
    values, ids = torch.topk(logits, top_k, dim=-1)
    weights = torch.softmax(values, dim=-1).reshape(-1)
    order = torch.argsort(ids.reshape(-1), stable=True)
    place = torch.argsort(order, stable=True)
    count = logits.shape[-1]
    histogram = torch.bincount(ids.reshape(-1), minlength=count).int()
    found = RoutingData(weights[order], histogram, count, top_k)
    return found, Indx(order.int(), place.int()), Indx(place.int(), order.int())


def swiglu(both: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Rows of gate and up alternate."""
    gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def _values(weight: Tensor, scale: Tensor) -> torch.Tensor:
    """[E, columns, rows]."""
    by_columns = weight.storage.layout.unswizzle_data(weight.storage.data)
    codes = torch.stack([by_columns & 15, by_columns >> 4], dim=-2).flatten(-3, -2)
    steps = torch.exp2(scale.storage.layout.unswizzle_data(scale.storage.data).double() - 127)
    return table(4, 1).to(codes.device)[codes.long()] * steps.repeat_interleave(32, -2)


def matmul_ogs(
    rows: torch.Tensor,
    weight: Tensor,
    bias: torch.Tensor,
    routing_data: RoutingData,
    gather_indx: Indx | None = None,
    scatter_indx: Indx | None = None,
    precision_config: PrecisionConfig | None = None,
    gammas: torch.Tensor | None = None,
    fused_activation: FusedActivation | None = None,
) -> torch.Tensor:
    assert precision_config is not None
    exact = _values(weight, precision_config.weight_scale)
    top_k, given = routing_data.n_expts_act, rows.double()
    if gather_indx is not None:
        given = given[gather_indx.src_indx.long() // top_k]
    ends = routing_data.expt_hist.cumsum(0).tolist()
    found = [
        given[end - size : end] @ exact[expert] + bias[expert].double()
        for expert, (end, size) in enumerate(
            zip(ends, routing_data.expt_hist.tolist(), strict=True)
        )
    ]
    out = torch.cat(found)
    if fused_activation is not None:
        assert fused_activation.reduction_n == 2
        out = fused_activation.specs.fn(out, *fused_activation.fn_args)
    if gammas is not None:
        out = out * gammas[:, None].double()
    if scatter_indx is not None:
        tokens = scatter_indx.dst_indx.long() // top_k
        out = out.new_zeros(len(out) // top_k, out.shape[1]).index_add_(0, tokens, out)
    return out.to(rows.dtype)


def kernels() -> Any:
    """What transformers' `get_kernel` returns."""
    return SimpleNamespace(
        matmul_ogs=SimpleNamespace(
            FlexCtx=SimpleNamespace,
            FnSpecs=FnSpecs,
            FusedActivation=FusedActivation,
            InFlexData=SimpleNamespace,
            PrecisionConfig=PrecisionConfig,
            matmul_ogs=matmul_ogs,
        ),
        routing=SimpleNamespace(
            GatherIndx=Indx, RoutingData=RoutingData, ScatterIndx=Indx, routing=routing
        ),
        swiglu=SimpleNamespace(swiglu_fn=swiglu),
        tensor=SimpleNamespace(
            FP4=FP4, convert_layout=convert_layout, wrap_torch_tensor=wrap_torch_tensor
        ),
        tensor_details=SimpleNamespace(
            layout=SimpleNamespace(
                StridedLayout=StridedLayout,
                make_default_matmul_mxfp4_w_layout=lambda mx_axis: (
                    TurnedLayout,
                    {"mx_axis": mx_axis},
                ),
            )
        ),
    )
