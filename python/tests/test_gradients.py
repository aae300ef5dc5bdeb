"""Tensors that require gradients are refused by name, whichever argument they are."""

from __future__ import annotations

import re

import pytest

from conclave import _gradients
from conclave.errors import ConclaveValueError

torch = pytest.importorskip("torch", reason="torch is not installed")


def wanted(*shape, dtype=torch.float32):
    return torch.rand(*shape, dtype=torch.float32).to(dtype).requires_grad_()


def test_the_first_tensor_that_requires_gradients_is_named():
    plain = torch.rand(2)
    given = {"a": plain, "b": None, "c": 1.0, "d": [plain, wanted(2)], "e": wanted(2)}
    with pytest.raises(ConclaveValueError, match=re.escape("d[1]: it requires gradients")):
        _gradients.refuse(given)
    _gradients.refuse({"a": plain, "b": None, "c": [plain], "d": "text"})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_refused_where_torch_does_not_record(mode):
    with mode():
        _gradients.refuse({"a": wanted(2)})
        assert _gradients.first_that_requires({"a": wanted(2)}) is None
