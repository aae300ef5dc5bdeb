"""What a forward of an engine knows, as `vllm.forward_context` hands it out."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

from conclave.errors import ConclaveRuntimeError


@dataclasses.dataclass(frozen=True)
class DPMetadata:
    """How many tokens the data-parallel ranks have in a forward."""

    num_tokens_across_dp_cpu: Any  # [dp_size] integers of the CPU

    @property
    def max_tokens_across_dp_cpu(self) -> Any:
        return self.num_tokens_across_dp_cpu.max()


@dataclasses.dataclass
class ForwardContext:
    """Of one forward."""

    no_compile_layers: dict[str, Any]
    attn_metadata: Any = None
    dp_metadata: Any = None
    num_tokens: int | None = None
    all_moe_layers: list[str] | None = None
    additional_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_padding: Any = None  # [T] bool; True: the token is padding


_current: contextvars.ContextVar[ForwardContext | None] = contextvars.ContextVar(
    "forward_context", default=None
)


@contextlib.contextmanager
def set_forward_context(
    attn_metadata: Any,
    vllm_config: Any,
    num_tokens: int | None = None,
    is_padding: Any = None,
    num_tokens_across_dp: Any = None,
    **more: Any,
) -> Iterator[ForwardContext]:
    """Makes a context within a with statement, of this thread or task; more is kept by name.

    Args:
        num_tokens_across_dp: [dp_size] integers of the CPU, the same on all dp ranks: layers over
            groups take it as their rank_tokens. None: they ask.
    """
    compiled = vllm_config.compilation_config
    context = ForwardContext(
        no_compile_layers=compiled.static_forward_context,
        attn_metadata=attn_metadata,
        dp_metadata=None if num_tokens_across_dp is None else DPMetadata(num_tokens_across_dp),
        num_tokens=num_tokens,
        all_moe_layers=compiled.static_all_moe_layers,
        additional_kwargs=more,
        is_padding=is_padding,
    )
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


def is_forward_context_available() -> bool:
    return _current.get() is not None


def get_forward_context() -> ForwardContext:
    """Raises ConclaveRuntimeError outside of `set_forward_context`."""
    found = _current.get()
    if found is None:
        raise ConclaveRuntimeError("get_forward_context: no forward runs; set_forward_context")
    return found


def padding_of_forward() -> Any:
    """Which tokens of the forward that runs are padding; None where nothing says so."""
    found = _current.get()
    return None if found is None else found.is_padding


def tokens_across_dp_of_forward() -> Any:
    """The numbers of tokens of dp ranks in the forward that runs; None where nothing says so."""
    found = _current.get()
    if found is None or found.dp_metadata is None:
        return None
    return getattr(found.dp_metadata, "num_tokens_across_dp_cpu", None)
