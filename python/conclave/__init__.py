"""Fused Mixture-of-Experts layers.

Arrays of numpy, torch and whatever else speaks DLPack are taken without copies, on the CPU and on
NVIDIA Hopper GPUs. See docs/python.md.
"""

from __future__ import annotations

from conclave import _conclave
from conclave._runtime import get_num_threads, set_num_threads
from conclave.checkpoint import Checkpoint, CheckpointInfo, LayerInfo, inspect
from conclave.errors import (
    ConclaveCheckpointError,
    ConclaveCommError,
    ConclaveFileError,
    ConclaveFileNotFoundError,
    ConclaveMemoryError,
    ConclaveRuntimeError,
    ConclaveTypeError,
    ConclaveUnsupportedError,
    ConclaveValueError,
    Error,
)
from conclave.layer import Layer, LayerStats
from conclave.spec import (
    ActivationSpec,
    LatentSpec,
    LayerOptions,
    MoeSpec,
    ParallelSpec,
    QuantSpec,
    ResidualMlpSpec,
    RouterInputNorm,
    RouterSpec,
    SharedExpertSpec,
    SimulatedRouting,
)

__version__: str = _conclave.build_info()["version"]

__all__ = [
    "ActivationSpec",
    "Checkpoint",
    "CheckpointInfo",
    "ConclaveCheckpointError",
    "ConclaveCommError",
    "ConclaveFileError",
    "ConclaveFileNotFoundError",
    "ConclaveMemoryError",
    "ConclaveRuntimeError",
    "ConclaveTypeError",
    "ConclaveUnsupportedError",
    "ConclaveValueError",
    "Error",
    "LatentSpec",
    "Layer",
    "LayerInfo",
    "LayerOptions",
    "LayerStats",
    "MoeSpec",
    "ParallelSpec",
    "QuantSpec",
    "ResidualMlpSpec",
    "RouterInputNorm",
    "RouterSpec",
    "SharedExpertSpec",
    "SimulatedRouting",
    "get_num_threads",
    "inspect",
    "set_num_threads",
]
