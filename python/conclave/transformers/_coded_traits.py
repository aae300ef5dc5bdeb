"""Experts modules of transformers that hold codes in layouts of their kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from conclave.spec import ActivationSpec, QuantSpec
from conclave.transformers._traits import ExpertsTraits, NotOurs

_MXFP4 = QuantSpec(weights="block", block_rows=1, block_cols=32)
_PARTS = ("gate_up_proj", "down_proj")


def _stored(tensor: Any, what: str) -> Any:
    """The storage of a tensor of Triton's kernels. Raises NotOurs for any other."""
    storage = getattr(tensor, "storage", None)
    if not isinstance(getattr(storage, "data", None), torch.Tensor):
        raise NotOurs(f"{what} is not loaded, or by kernels of another version")
    return storage


def _by_rows(storage: Any) -> torch.Tensor:
    """Its bytes in the order of rows, which kernels have last."""
    return storage.layout.unswizzle_data(storage.data).transpose(-1, -2).contiguous()


@dataclasses.dataclass(frozen=True)
class SwizzledTraits(ExpertsTraits):
    """gpt-oss in mxfp4: bytes of two codes and exponents, in an order of Triton's kernels."""

    can_release: ClassVar[bool] = False
    makes_copies: ClassVar[bool] = True

    def tensors(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """What the layer is made of, wherever it lies."""
        return [*_swizzled(module), *(getattr(module, f"{part}_bias") for part in _PARTS)]

    def arrays(self, module: torch.nn.Module, tensors: list[torch.Tensor]) -> dict[str, Any]:
        del tensors
        found = {}
        for part, name in zip(_PARTS, ("gate_up", "down"), strict=True):
            codes, scales = _storages(module, part)
            found[name] = _by_rows(codes)
            found[f"{name}_scale"] = _by_rows(scales)
            found[f"{name}_bias"] = getattr(module, f"{part}_bias").detach()
        return found


def _storages(module: torch.nn.Module, part: str) -> tuple[Any, Any]:
    """Of a matrix's codes and exponents. Raises NotOurs."""
    config = getattr(module, f"{part}_precision_config", None)
    scale = getattr(config, "weight_scale", None)
    return _stored(getattr(module, part), part), _stored(scale, f"{part}_precision_config")


def _swizzled(module: torch.nn.Module) -> list[torch.Tensor]:
    return [storage.data for part in _PARTS for storage in _storages(module, part)]


def _unswizzled(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for part in _PARTS:
        codes, scales = map(_by_rows, _storages(module, part))
        found[f"{part}_blocks"] = codes.view(*scales.shape, -1)
        found[f"{part}_scales"] = scales
    return found


def _read_swizzled(module: torch.nn.Module) -> ExpertsTraits:
    owner: Any = module
    traits = SwizzledTraits(
        weights={},
        # Its kernel computes this formula, whatever the configuration says.
        activation=ActivationSpec(
            name="swiglu_oai", alpha=float(owner.alpha), beta=1.0, limit=float(owner.limit or 0)
        ),
        order="interleaved",
        transposed=False,
        has_bias=True,
        quant=_MXFP4,
        weight_dtype="float4_e2m1fn_x2",
    )
    traits.tensors(module)
    return traits


def _refused(reason: str) -> Callable[[torch.nn.Module], ExpertsTraits]:
    def refuse(module: torch.nn.Module) -> ExpertsTraits:
        raise NotOurs(f"{type(module).__name__} {reason}")

    return refuse


@dataclasses.dataclass(frozen=True)
class _Form:
    """How a class that no shapes and attributes describe is read. What it holds of its weights
    beside parameters and buffers: as it lies, and by the names and in the shapes of checkpoints."""

    read: Callable[[torch.nn.Module], ExpertsTraits]
    codes: Callable[[torch.nn.Module], list[torch.Tensor]] = lambda module: []
    published: Callable[[torch.nn.Module], dict[str, torch.Tensor]] = lambda module: {}


_FORMS: dict[str, _Form] = {
    "Mxfp4GptOssExperts": _Form(_read_swizzled, _swizzled, _unswizzled),
    "GgufExperts": _Form(
        _refused(
            "holds blocks of a GGUF file; conclave.Layer.from_checkpoint reads the file itself"
        )
    ),
    "FbgemmFp8Llama4TextExperts": _Form(
        _refused(
            "runs every expert on rows that are sorted for it, and quantises these with a bound"
        )
    ),
}


def _form_of(module: torch.nn.Module) -> _Form | None:
    return _FORMS.get(type(module).__name__)


def is_coded(module: torch.nn.Module) -> bool:
    """Whether a module's class is one of these."""
    return _form_of(module) is not None


def read_coded(module: torch.nn.Module) -> ExpertsTraits:
    """Raises NotOurs, with the reason."""
    return _FORMS[type(module).__name__].read(module)


def codes_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Weights beside a module's parameters and buffers, as they lie. Raises NotOurs."""
    form = _form_of(module)
    return [] if form is None else form.codes(module)


def published_codes(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The same by their names below the module in checkpoints, and in shapes of these. Raises
    NotOurs."""
    form = _form_of(module)
    return {} if form is None else form.published(module)
