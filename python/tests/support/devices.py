"""Tests that run on the CPU, and again on a GPU: those with the fixture `device`."""

from __future__ import annotations

from typing import Any

import pytest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]

# For tests of a module that is run on every device: of the host's memory, of numpy, of checks that
# only the host can make.
host_only = pytest.mark.parametrize("device", ["cpu"], indirect=True)


def seeded(seed: int) -> Any:
    """A generator of torch for the device in use."""
    import torch

    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def is_on_gpu() -> bool:
    """Whether tensors are made on a GPU."""
    import torch

    return torch.get_default_device().type == "cuda"
