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
        found = []
        for part in _PARTS:
            found.append(_stored(getattr(module, part), part).data)
            found.append(_stored(_scale_of(module, part), f"{part}_precision_config").data)
            found.append(getattr(module, f"{part}_bias"))
        return found

    def arrays(self, module: torch.nn.Module, tensors: list[torch.Tensor]) -> dict[str, Any]:
        del tensors
        found = {}
        for part, name in zip(_PARTS, ("gate_up", "down"), strict=True):
            found[name] = _by_rows(_stored(getattr(module, part), part))
            scale = _stored(_scale_of(module, part), f"{part}_precision_config")
            found[f"{name}_scale"] = _by_rows(scale)
            found[f"{name}_bias"] = getattr(module, f"{part}_bias").detach()
        return found


def _scale_of(module: torch.nn.Module, part: str) -> Any:
    return getattr(getattr(module, f"{part}_precision_config", None), "weight_scale", None)


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


# Classes that no shapes and attributes describe.
_READERS: dict[str, Callable[[torch.nn.Module], ExpertsTraits]] = {
    "Mxfp4GptOssExperts": _read_swizzled,
    "GgufExperts": _refused(
        "holds blocks of a GGUF file; conclave.Layer.from_checkpoint reads the file itself"
    ),
    "FbgemmFp8Llama4TextExperts": _refused(
        "runs every expert on rows that are sorted for it, and quantises these with a bound"
    ),
}


def is_coded(module: torch.nn.Module) -> bool:
    """Whether a module's class is one of these."""
    return type(module).__name__ in _READERS


def read_coded(module: torch.nn.Module) -> ExpertsTraits:
    """Raises NotOurs, with the reason."""
    return _READERS[type(module).__name__](module)
