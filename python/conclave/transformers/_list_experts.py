"""What the modules of a list of experts compute, found out by evaluating one of them.

Code for transformers 4 holds a module for every expert, whose matrices are called gate_proj,
up_proj and down_proj, or w1, w3 and w2, or otherwise. Which of them is which, and what stands
between, is read from shapes and numbers: a formula is taken if it gives what the expert gives, in
float64.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from conclave._devices import name_of
from conclave._methods import layer_of_method
from conclave.layer import Layer
from conclave.spec import ActivationSpec, LayerOptions, MoeSpec
from conclave.transformers import _activation
from conclave.transformers._packed_linears import (
    is_opaque,
    method_tensors,
    opaque_linears_of,
    packed_linears_of,
    values_of,
    with_values,
)
from conclave.transformers._traits import NotOurs

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
# The largest entry of the product before the activation, for a row of the probe each: with small
# ones the GELUs differ, with large ones the bounds show.
_SIZES = (0.5, 2.0, 8.0, 40.0)
_TOLERANCE = 1e-5  # of a row


@dataclasses.dataclass(frozen=True)
class ListTraits:
    """One expert's computation. Matrices are named by their paths in the expert."""

    first: tuple[str, ...]  # gate and up; or one, of both or without a gate
    down: str
    activation: ActivationSpec
    order: str
    has_bias: bool
    hidden_size: int
    inner_size: int
    is_packed: bool  # codes that the library reads
    is_opaque: bool = False  # codes of other quantisers, whose values it packs

    @property
    def in_own_form(self) -> bool:
        """Whether the experts' modules hold codes, in more than parameters."""
        return self.is_packed or self.is_opaque

    def layer(self, experts: torch.nn.Module, top_k: int, options: LayerOptions) -> Layer:
        """A layer of the experts. Raises NotOurs for what is packed in several ways."""
        spec = MoeSpec(
            top_k=top_k, activation=self.activation, has_bias=self.has_bias, has_gate=False
        )
        if not self.is_packed:
            return Layer.from_tensors(
                spec, options=options, gate_up_order=self.order, **self.arrays(experts)
            )
        if self.order == "interleaved":
            raise NotOurs("packed matrices whose rows of gate and up alternate")
        each = list(experts.children())
        gated = not self.activation.name.endswith("_no_mul")
        method, tensors = method_tensors(each, self.first, self.down, gated)
        found = dict(tensors)
        whole = dataclasses.replace(
            spec,
            num_experts=len(each),
            hidden_size=self.hidden_size,
            intermediate_size=self.inner_size,
            weight_dtype="bfloat16",
        )
        device = next(iter(found.values())).device
        return layer_of_method(whole, method, found, device=name_of(device), options=options)

    def arrays(self, experts: torch.nn.Module) -> dict[str, Any]:
        """The arguments of `Layer.from_tensors`."""
        each = list(experts.children())
        names = ("gate", "up") if len(self.first) == 2 else ("gate_up",)
        found: dict[str, Any] = {
            name: [_linear(e, path).weight.detach() for e in each]
            for name, path in zip((*names, "down"), (*self.first, self.down), strict=True)
        }
        if self.has_bias:
            first = [torch.cat([_bias_of(_linear(e, p)) for p in self.first]) for e in each]
            found["gate_up_bias"] = torch.stack(first)
            found["down_bias"] = torch.stack([_bias_of(_linear(e, self.down)) for e in each])
        return found


def _linear(expert: torch.nn.Module, path: str) -> torch.nn.Linear:
    """A matrix with its values, which some quantisers' modules do not show."""
    found = expert.get_submodule(path)
    return values_of(found) if is_opaque(found) else found  # type: ignore[return-value]


def _bias_of(linear: torch.nn.Linear) -> torch.Tensor:
    if linear.bias is not None:
        return linear.bias.detach()
    return linear.weight.new_zeros(linear.weight.shape[0])


def _require_alike(experts: torch.nn.Module) -> torch.nn.Module:
    """The first expert, if the others are built as it is."""
    each = list(experts._modules.items())
    for name, expert in each:
        if expert is None:
            raise NotOurs(f"expert {name} is not here: the list holds a part of the experts")
        if repr(expert) != repr(each[0][1]):
            raise NotOurs(f"expert {name} is built otherwise than expert {each[0][0]}")
    return each[0][1]  # type: ignore[return-value]


def _linears_of(expert: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    return {n: m for n, m in expert.named_modules() if isinstance(m, torch.nn.Linear)}


def _require_matrices(expert: torch.nn.Module) -> None:
    """Raises NotOurs unless an expert's weights are two or three matrices that can be packed."""
    found = _linears_of(expert)
    known = {id(p) for linear in found.values() for p in linear.parameters()}
    for name, weights in (*expert.named_parameters(), *expert.named_buffers()):
        if id(weights) not in known:
            raise NotOurs(f"{type(expert).__name__} has {name} besides its matrices")
        if weights.dtype not in _TYPES:
            raise NotOurs(f"weights are {str(weights.dtype).removeprefix('torch.')}")
        if weights.is_meta:
            raise NotOurs(f"{name} is on the meta device: its data is not in memory")
    if len(found) not in (2, 3):
        raise NotOurs(f"{type(expert).__name__} has {len(found)} matrices, not 2 or 3")


def _arrangements(
    linears: dict[str, torch.nn.Linear],
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Which matrices may come first, and which last."""
    for names in itertools.permutations(linears):
        *first, down = names
        shapes = [tuple(linears[n].weight.shape) for n in first]
        rows, cols = linears[down].weight.shape
        width = cols * (2 if len(first) == 1 and shapes[0][0] == 2 * cols else 1)
        if all(shape == (width, rows) for shape in shapes):
            yield tuple(first), down


def _formulas(
    first: list[torch.Tensor], inner: int, numbers: list[float]
) -> Iterator[tuple[ActivationSpec, str, Callable[[], torch.Tensor]]]:
    """Activations of the first products, with the order of their rows."""
    if len(first) == 1 and first[0].shape[-1] == inner:
        for name, formula in _activation.NO_MUL.items():
            yield ActivationSpec(name=name), "concatenated", functools.partial(formula, first[0])
        return
    pairs = {"concatenated": tuple(first)}
    if len(first) == 1:
        gate, up = first[0].chunk(2, dim=-1)
        pairs = {
            "concatenated": (gate, up),
            "interleaved": (first[0][..., ::2], first[0][..., 1::2]),
        }
    for order, (gate, up) in pairs.items():
        for activation, formula in _activation.candidates(numbers):
            yield activation, order, functools.partial(formula, gate, up)


def _probe_rows(linear: torch.nn.Linear, hidden_size: int) -> torch.Tensor:
    """[4 * sizes, H] in float64, whose products with the matrix have the sizes."""
    numbers = torch.Generator("cpu").manual_seed(7)
    rows = torch.randn(4, hidden_size, generator=numbers, device="cpu").double()
    rows = rows.to(linear.weight.device)
    rows = rows / linear(rows).abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
    return torch.cat([rows * size for size in _SIZES])


def _is_equal(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    error = (actual - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)
    return bool((error <= _TOLERANCE).all())


def _in_double(expert: torch.nn.Module) -> torch.nn.Module:
    try:
        return copy.deepcopy(expert).double().eval()
    except Exception as error:
        raise NotOurs(f"{type(expert).__name__} cannot be copied: {error}") from error


def _result_of(expert: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    try:
        found = expert(rows)
    except Exception as error:
        raise NotOurs(f"{type(expert).__name__} does not run by itself: {error}") from error
    if not isinstance(found, torch.Tensor) or found.shape != rows.shape:
        raise NotOurs(f"{type(expert).__name__} does not return a row for each row")
    return found.double()


def read_list(experts: torch.nn.Module) -> ListTraits:
    """What each of the experts computes. Raises NotOurs, with the reason."""
    original = _require_alike(experts)
    is_packed = bool(packed_linears_of(original))
    is_opaque_list = bool(opaque_linears_of(original))
    if is_packed or is_opaque_list:
        original = with_values(original)
    _require_matrices(original)
    expert = _in_double(original)
    linears = _linears_of(expert)
    owners = [*expert.modules(), *(getattr(m, "config", None) for m in expert.modules())]
    numbers = _activation.numbers_of(*owners)
    failures: list[str] = []
    runs = False
    with torch.no_grad():
        for first, down in _arrangements(linears):
            hidden_size, inner = linears[down].weight.shape
            rows = _probe_rows(linears[first[0]], hidden_size)
            try:
                expected = _result_of(expert, rows)
            except NotOurs as error:  # of this arrangement, or of all
                failures.append(str(error))
                continue
            runs = True
            products = [linears[name](rows) for name in first]
            for activation, order, formula in _formulas(products, inner, numbers):
                if _is_equal(linears[down](formula()), expected):
                    has_bias = any(m.bias is not None for m in linears.values())
                    return ListTraits(
                        first,
                        down,
                        activation,
                        order,
                        has_bias,
                        hidden_size,
                        inner,
                        is_packed,
                        is_opaque_list,
                    )
    if failures and not runs:
        raise NotOurs(failures[0])
    raise NotOurs(f"{type(original).__name__} computes none of the library's formulas")
