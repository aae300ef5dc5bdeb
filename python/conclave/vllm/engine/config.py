"""The parts of an engine's configuration that MoE code reads."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import torch

from conclave.errors import ConclaveValueError
from conclave.vllm.eplb import EPLBConfig

ExpertPlacementStrategy = Literal["linear", "round_robin"]


@dataclasses.dataclass
class ParallelConfig:
    """How an engine is split, beside its groups."""

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_rank: int = 0
    enable_expert_parallel: bool = False
    enable_eplb: bool = False
    eplb_config: EPLBConfig = dataclasses.field(default_factory=EPLBConfig)
    expert_placement_strategy: ExpertPlacementStrategy = "linear"
    all2all_backend: str = "allgather_reducescatter"
    enable_dbo: bool = False
    use_sequence_parallel_moe: bool = False


@dataclasses.dataclass
class CompilationConfig:
    """The layers by name, as code looks them up in a graph."""

    static_forward_context: dict[str, Any] = dataclasses.field(default_factory=dict)
    static_all_moe_layers: list[str] = dataclasses.field(default_factory=list)
    max_cudagraph_capture_size: int = 0
    custom_ops: list[str] = dataclasses.field(default_factory=list)  # kept; nothing here asks


@dataclasses.dataclass
class SchedulerConfig:
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256


@dataclasses.dataclass
class KernelConfig:
    moe_backend: str = "auto"


@dataclasses.dataclass
class DeviceConfig:
    device: Any = None


@dataclasses.dataclass
class ModelConfig:
    """dtype is that of the rows."""

    dtype: torch.dtype = torch.bfloat16
    hf_config: Any = None
    quantization: str | None = None

    @property
    def hf_text_config(self) -> Any:
        inner = getattr(self.hf_config, "text_config", None)
        return self.hf_config if inner is None else inner


@dataclasses.dataclass
class VllmConfig:
    """What an engine knows of itself."""

    parallel_config: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    compilation_config: CompilationConfig = dataclasses.field(default_factory=CompilationConfig)
    scheduler_config: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    kernel_config: KernelConfig = dataclasses.field(default_factory=KernelConfig)
    device_config: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)
    model_config: ModelConfig | None = None
    quant_config: Any = None
    cache_config: Any = None
    lora_config: Any = None
    speculative_config: Any = None


_current: contextvars.ContextVar[VllmConfig | None] = contextvars.ContextVar(
    "vllm_config", default=None
)


@contextlib.contextmanager
def set_current_vllm_config(vllm_config: Any, *_: Any, **__: Any) -> Iterator[None]:
    """Makes it the configuration within a with statement, of this thread or task."""
    if vllm_config is None:
        raise ConclaveValueError("vllm_config: expected a VllmConfig, found None")
    token = _current.set(vllm_config)
    try:
        yield
    finally:
        _current.reset(token)


def get_current_vllm_config() -> VllmConfig:
    """That of the innermost `set_current_vllm_config`; a default one outside."""
    return _current.get() or VllmConfig()


def get_current_vllm_config_or_none() -> VllmConfig | None:
    """As `get_current_vllm_config`, but None outside."""
    return _current.get()
