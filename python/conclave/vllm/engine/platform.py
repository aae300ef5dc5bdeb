"""The device that layers run on, as `vllm.platforms` describes it."""

from __future__ import annotations

import enum
import platform
import random
from typing import Any, NamedTuple

import torch


class DeviceCapability(NamedTuple):
    """Of a CUDA device."""

    major: int
    minor: int

    def to_int(self) -> int:
        return 10 * self.major + self.minor


class CpuArchEnum(enum.Enum):
    X86 = "x86"
    ARM = "arm"
    OTHER = "other"


class Platform:
    """A CUDA device where torch has one, else the CPU."""

    @property
    def device_type(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    device_name = device_type

    def is_cuda(self) -> bool:
        return torch.cuda.is_available()

    is_cuda_alike = is_cuda

    def is_cpu(self) -> bool:
        return not torch.cuda.is_available()

    def is_rocm(self) -> bool:
        return False

    def is_xpu(self) -> bool:
        return False

    def is_tpu(self) -> bool:
        return False

    def is_out_of_tree(self) -> bool:
        return False

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        if not torch.cuda.is_available():
            return None
        return DeviceCapability(*torch.cuda.get_device_capability(device_id))

    def has_device_capability(self, capability: Any, device_id: int = 0) -> bool:
        """Whether the device has this capability, 90 or (9, 0), or a later one."""
        found = self.get_device_capability(device_id)
        return found is not None and found.to_int() >= _as_int(capability)

    def is_device_capability(self, capability: Any, device_id: int = 0) -> bool:
        found = self.get_device_capability(device_id)
        return found is not None and found.to_int() == _as_int(capability)

    def is_device_capability_family(self, capability: int, device_id: int = 0) -> bool:
        found = self.get_device_capability(device_id)
        return found is not None and found.major == capability // 10

    def get_cpu_architecture(self) -> CpuArchEnum:
        kinds = {"x86_64": CpuArchEnum.X86, "aarch64": CpuArchEnum.ARM}
        return kinds.get(platform.machine(), CpuArchEnum.OTHER)

    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def is_fp8_fnuz(self) -> bool:
        return False

    def supports_fp8(self) -> bool:
        return True

    def seed_everything(self, seed: int | None = None) -> None:
        if seed is not None:
            set_random_seed(seed)

    def is_pin_memory_available(self) -> bool:
        return torch.cuda.is_available()

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)


def _as_int(capability: Any) -> int:
    if isinstance(capability, tuple):
        return 10 * int(capability[0]) + int(capability[1])
    return int(capability)


def set_random_seed(seed: int | None) -> None:
    """Of Python, of torch, and of numpy where it is there. None: leaves them."""
    if seed is None:
        return
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed % 2**32)


current_platform = Platform()
