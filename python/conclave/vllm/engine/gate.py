"""The linear layer of a router."""

from __future__ import annotations

from typing import Any

import torch

from conclave.errors import ConclaveUnsupportedError, ConclaveValueError


class GateLinear(torch.nn.Module):
    """Logits [T, output_size] of rows [T, input_size]: a weight [output_size, input_size], and a
    bias.

    Args:
        out_dtype: of the logits; None: that of the rows. float32 logits are float32 products.
        params_dtype: of the weight; by default torch's.
        force_fp32_compute: the weight is float32, and products are.
        skip_bias_add: the bias is returned and not added.
        quant_config: without effect: a gate has values.
        return_bias: forward returns (logits, bias), where a bias that is added is None.
    """

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,
        out_dtype: torch.dtype | None = None,
        params_dtype: torch.dtype | None = None,
        force_fp32_compute: bool = False,
        skip_bias_add: bool = False,
        quant_config: Any = None,
        prefix: str = "",
        return_bias: bool = True,
    ) -> None:
        super().__init__()
        del quant_config
        dtype = torch.float32 if force_fp32_compute else params_dtype or torch.get_default_dtype()
        self.input_size, self.output_size = input_size, output_size
        self.prefix, self.out_dtype = prefix, out_dtype
        self.skip_bias_add, self.return_bias = skip_bias_add, return_bias
        self.weight = _parameter((output_size, input_size), dtype)
        self.register_parameter("bias", _parameter((output_size,), dtype) if bias else None)

    def set_out_dtype(self, out_dtype: torch.dtype) -> None:
        """The type of the logits. Raises ConclaveValueError where another one was set."""
        if self.out_dtype not in (None, out_dtype):
            raise ConclaveValueError(f"out_dtype: it is {self.out_dtype} already")
        self.out_dtype = out_dtype

    def forward(self, x: torch.Tensor) -> Any:
        added = None if self.skip_bias_add else self.bias
        wide = torch.float32 in (self.out_dtype, self.weight.dtype, x.dtype)
        dtype = torch.float32 if wide else x.dtype
        logits = torch.nn.functional.linear(
            x.to(dtype), self.weight.to(dtype), None if added is None else added.to(dtype)
        ).to(self.out_dtype or x.dtype)
        if not self.return_bias:
            return logits
        return logits, self.bias if self.skip_bias_add else None


def _parameter(shape: tuple[int, ...], dtype: torch.dtype) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    param.weight_loader = _load  # type: ignore[attr-defined]
    return param


def _load(param: torch.nn.Parameter, loaded_weight: torch.Tensor, *shard: Any) -> None:
    """A whole tensor, on every rank."""
    if shard:
        raise ConclaveUnsupportedError("shard_id: a gate has one matrix, which is loaded whole")
    if param.shape != loaded_weight.shape:
        raise ConclaveValueError(
            f"loaded_weight: expected shape {list(param.shape)}, found {list(loaded_weight.shape)}"
        )
    param.data.copy_(loaded_weight)
