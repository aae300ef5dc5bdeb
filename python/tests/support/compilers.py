"""The backends of torch.compile that tests run with."""

from __future__ import annotations

import shutil

import pytest

# Inductor writes C++ and compiles it.
_HAS_COMPILER = any(shutil.which(name) for name in ("g++", "clang++"))

BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(not _HAS_COMPILER, reason="inductor needs g++, which is not here"),
    ),
]
