"""Humming's two products of a layer: how it describes them, their weights in its layout, and its compiled kernels."""

import concurrent.futures
import contextlib
import importlib
import json
import os
import sys

import torch

from ..plugin import Missing
from ..problem import ALPHA, CLAMP

# What Humming calls the codes and scales of a format, and the type of its scales.
SCHEMAS = {
    "int4": ("uint4", "bfloat16", torch.bfloat16),
    "mxfp4": ("float4e2m1", "float8e8m0", torch.float8_e8m0fnu),
    "mxfp4_fp8": ("float4e2m1", "float8e8m0", torch.float8_e8m0fnu),
    "mxfp4_fp8_group": ("float4e2m1", "float8e8m0", torch.float8_e8m0fnu),
    "nvfp4": ("float4e2m1", "float8e4m3", torch.float8_e4m3fn),
}
# Rows are quantised beside these; beside others they stay bf16.
ROWS = {
    "mxfp4_fp8": {"a_dtype": "float8e4m3", "input_quant_mode": "dynamic_token"},
    "mxfp4_fp8_group": {"a_dtype": "float8e4m3", "input_quant_mode": "dynamic_group", "input_scale_group_size": 128},
}
# Activations in the kernel that quantises rows, of gate a and up b.
SILU = "a / (1.f + __expf(-a)) * b"
CLAMPED = "fminf(a, {0}f) / (1.f + __expf(-{1}f * fminf(a, {0}f))) * (fminf(fmaxf(b, -{0}f), {0}f) + 1.f)"
# Sizes are rounded up as vLLM has them; Humming's kernels read and write the given ones.
ROWS_STEP, COLS_STEP = 256, 128
E8M0_ONE = 127


class Engine:
    """What is used of the package; PAIRED_HUMMING is the folder that holds it, else it is imported as installed."""

    def __init__(self):
        folder = os.environ.get("PAIRED_HUMMING")
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
        # Else the import starts compilers in the background, beside what is timed.
        os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")
        try:
            schema, transform, tune, kernel, ops = (
                importlib.import_module(f"humming.{name}") for name in ("schema", "transform", "tune", "kernel.humming", "ops")
            )
        except ImportError as error:
            raise Missing(f"humming cannot be imported ({error}); PAIRED_HUMMING may name its folder") from None
        self.weight_schema = schema.HummingWeightSchema
        self.input_schema = schema.HummingInputSchema
        self.process_input = ops.process_input
        self.prepare_layer_config = transform.prepare_layer_config
        self.transform_tensors = transform.transform_humming_tensors
        self.heuristics = tune.get_heuristics_config
        self.prepare_kernels = kernel.HummingKernel.prepare_kernels
        self.launch = ops.launch_kernel


@contextlib.contextmanager
def padding_of_e8m0():
    """torch pads no e8m0 tensors, which Humming asks of it: here their bytes are padded, by that of 1.0."""
    plain = torch.nn.functional.pad

    def by_bytes(input, pad, mode="constant", value=None):
        if input.dtype != torch.float8_e8m0fnu:
            return plain(input, pad, mode, value)
        return plain(input.view(torch.uint8), pad, mode, E8M0_ONE).view(torch.float8_e8m0fnu)

    torch.nn.functional.pad = by_bytes
    try:
        yield
    finally:
        torch.nn.functional.pad = plain


class Description:
    """One product of a layer as Humming describes it: all that choosing and compiling kernels takes."""

    def __init__(self, engine: Engine, case, name: str):
        self.engine = engine
        code_type, scale_type, self.scale_dtype = SCHEMAS[case.format]
        factor = {"weight_scale_2_type": "tensor"} if case.format == "nvfp4" else {}
        schema = engine.weight_schema(
            b_dtype=code_type, bs_dtype=scale_type, weight_scale_group_size=case.weight_format.group[1], **factor
        )
        self.quantises = case.format in ROWS
        given_rows = {"input_schema": engine.input_schema(**ROWS[case.format])} if self.quantises else {}
        rows, cols = (2 * case.inner, case.hidden) if name == "gate_up" else (case.hidden, case.inner)
        self.config = engine.prepare_layer_config(
            shape_n=rows, shape_k=cols, weight_schema=schema, num_experts=case.experts, pad_n_to_multiple=ROWS_STEP,
            pad_k_to_multiple=COLS_STEP, has_bias=case.gpt_oss, torch_dtype=torch.bfloat16, **given_rows,
        )
        self.activation = CLAMPED.format(CLAMP, ALPHA) if case.gpt_oss else SILU

    def tuning(self, rows: int, kind: str) -> dict:
        """Tile and schedule that Humming's heuristics choose for so many rows."""
        return dict(self.engine.heuristics(self.config, shape_m=rows, gemm_type=kind))


class Product(Description):
    """A product with the weights in Humming's layout."""

    def __init__(self, engine: Engine, weights, name: str):
        super().__init__(engine, weights.case, name)
        given = {
            "weight": getattr(weights, name).view(torch.int32),
            "weight_scale": getattr(weights, name + "_scale").view(self.scale_dtype),
            "weight_scale_2": getattr(weights, name + "_global_scale"),
            "bias": getattr(weights, name + "_bias"),
        }
        with padding_of_e8m0():
            self.tensors = engine.transform_tensors(self.config, {key: t for key, t in given.items() if t is not None})

    def quantised(self, rows: torch.Tensor, activates: bool = False) -> dict:
        """Codes of rows, or of the activation of gates and ups, with a scale for each."""
        how = {"activation_type": "binary_split", "activation_impl": self.activation} if activates else {}
        config = self.config
        codes, of_groups, of_tokens = self.engine.process_input(
            rows, quant_mode=config.input_quant_mode.value, quant_dtype=config.a_dtype.dtype_str,
            quant_group_size=config.input_scale_group_size or None, group_scale_dtype=config.as_dtype.dtype_str,
            use_m_major_input_scale=config.use_block_scaled_mma and config.input_scale_group_size > 0, **how,
        )
        return {"rows": codes, "input_scale": of_tokens if of_groups is None else of_groups}

    def launch(self, kernel, rows: torch.Tensor, out: torch.Tensor, locks: torch.Tensor, **layout) -> None:
        self.engine.launch(
            configs=kernel, inputs=rows, outputs=out, locks=locks, valid_shape_m=out.shape[0], **layout, **self.tensors
        )


class Kernels:
    """Kernels compiled on request, beside each other, each once."""

    def __init__(self, engine: Engine):
        self._engine, self._asked = engine, {}
        self._pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())

    def ask(self, product: Description, kind: str, tuning: dict) -> concurrent.futures.Future:
        key = (product.config.to_str(), json.dumps({"gemm_type": kind}), json.dumps(tuning, sort_keys=True))
        if key not in self._asked:
            self._asked[key] = self._pool.submit(self._engine.prepare_kernels, *key)
        return self._asked[key]
