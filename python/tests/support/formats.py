"""A case of `fused_experts` for every format that a builder of configurations names."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy
import torch

import conclave
from conclave import vllm
from support.coded import Coded, Coder
from support.problems import expected_output

EXPERTS, TOP_K, TOKENS = 5, 2, 11
SIZES = [(96, 64), (160, 96)]  # hidden, inner


@dataclasses.dataclass
class Case:
    w1: Coded
    w2: Coded
    config: Any
    hidden: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor

    def run(self, **arguments: Any) -> torch.Tensor:
        given = {"quant_config": self.config, **arguments}
        return conclave.fused_experts(
            self.hidden, self.w1.codes, self.w2.codes, self.topk_weights, self.topk_ids, **given
        )

    def expected(self, ids: Any = None) -> numpy.ndarray:
        return expected_output(
            self.hidden,
            self.w1.exact,
            self.w2.exact,
            self.topk_ids if ids is None else ids,
            self.topk_weights,
        )


def _row(name: str) -> tuple[Any, Any]:
    return CODED_ROWS[name][1:] if name in CODED_ROWS else FORMATS[name]


def build_config(name: str, w1: Coded, w2: Coded) -> Any:
    return _row(name)[1](w1, w2)


def make_case(name: str, hidden: int, inner: int) -> Case:
    coder = Coder(sum(name.encode()) + hidden)
    make, build = _row(name)
    w1 = make(coder, (EXPERTS, 2 * inner, hidden), 2)
    w2 = make(coder, (EXPERTS, hidden, inner), 1)
    numbers = torch.Generator("cpu").manual_seed(3)
    rows = torch.randn(TOKENS, hidden, generator=numbers)
    ids = torch.stack([torch.randperm(EXPERTS, generator=numbers)[:TOP_K] for _ in range(TOKENS)])
    shares = torch.rand(TOKENS, TOP_K, generator=numbers)
    return Case(w1, w2, build(w1, w2), rows, shares, ids.int())


def both(w1: Coded, w2: Coded, name: str) -> tuple[Any, Any]:
    return getattr(w1, name), getattr(w2, name)


def integers(bits: int, group: int, zeros: bool = False) -> Any:
    return lambda coder, shape, halves: coder.integers(shape, bits, group, zeros)


def grouped(builder: Any, block: list[int] | None) -> Any:
    return lambda a, b: builder(*both(a, b, "scale"), *both(a, b, "zero"), block_shape=block)


def scaled_rows(coder: Coder, shape: Any, halves: int) -> Coded:
    """int4 whose rows have a scale beside those of groups."""
    found = coder.integers(shape, 4, 32)
    found.alphas = coder.uniform(shape[0], shape[1], 1)
    found.exact = found.exact * found.alphas.double()
    return found


def nvfp4_config(a: Coded, b: Coded) -> Any:
    """As vLLM has them: alphas hold the rows' factor as well."""
    rows = torch.tensor(0.25), torch.full((EXPERTS,), 3.0)
    alphas = a.alphas / rows[0], b.alphas / rows[1]
    return vllm.nvfp4_moe_quant_config(*alphas, *rows, *both(a, b, "scale"))


def mx(rows: str | None, weights: str) -> Any:
    return lambda a, b: vllm.FusedMoEQuantConfig.make(
        rows, weight_dtype=weights, w1_scale=a.scale, w2_scale=b.scale
    )


def two(builder: Any, *arguments: Any, **named: Any) -> Any:
    return lambda a, b: builder(*both(a, b, "scale"), *arguments, **named)


# Name: how codes are made, and the configuration. All of these leave rows as they are.
FORMATS: dict[str, tuple[Any, Any]] = {
    "int8_w8a16-channel": (
        lambda coder, shape, halves: coder.signed(shape),
        two(vllm.int8_w8a16_moe_quant_config, None, None),
    ),
    "int8_w8a16-group": (integers(8, 32), grouped(vllm.int8_w8a16_moe_quant_config, [0, 32])),
    "int8_w8a16-zeros": (
        integers(8, 32, True),
        grouped(vllm.int8_w8a16_moe_quant_config, [0, 32]),
    ),
    "int8_w8a16-zeros-channel": (
        integers(8, 0, True),
        grouped(vllm.int8_w8a16_moe_quant_config, None),
    ),
    "int4_w4a16-group": (integers(4, 32), grouped(vllm.int4_w4a16_moe_quant_config, [0, 32])),
    "int4_w4a16-no-shape": (integers(4, 32), grouped(vllm.int4_w4a16_moe_quant_config, None)),
    "int4_w4a16-zeros": (
        integers(4, 32, True),
        grouped(vllm.int4_w4a16_moe_quant_config, [1, 32]),
    ),
    "int4_w4a16-zeros-wide": (
        integers(4, 128, True),
        grouped(vllm.int4_w4a16_moe_quant_config, [1, 128]),
    ),
    "int4_w4a16-channel": (integers(4, 0), grouped(vllm.int4_w4a16_moe_quant_config, None)),
    "gptq_marlin-4": (
        integers(4, 32, True),
        lambda a, b: vllm.gptq_marlin_moe_quant_config(
            *both(a, b, "scale"), 4, 32, *both(a, b, "zero")
        ),
    ),
    "gptq_marlin-8": (integers(8, 32), two(vllm.gptq_marlin_moe_quant_config, 8, 32)),
    "gptq_marlin-8-channel": (integers(8, 0), two(vllm.gptq_marlin_moe_quant_config, 8, -1)),
    "mxfp4_w4a16": (
        lambda coder, shape, halves: coder.mxfp4(shape),
        two(vllm.mxfp4_w4a16_moe_quant_config),
    ),
    "w_mxfp6_e3m2": (lambda coder, shape, halves: coder.mxfp6(shape, 2), mx(None, "mxfp6_e3m2")),
    "w_mxfp6_e2m3": (lambda coder, shape, halves: coder.mxfp6(shape, 3), mx(None, "mxfp6_e2m3")),
    "w_mxfp8": (lambda coder, shape, halves: coder.mxfp8(shape), mx(None, "mxfp8")),
    "nvfp4_w4a16": (
        lambda coder, shape, halves: coder.nvfp4(shape),
        lambda a, b: vllm.nvfp4_w4a16_moe_quant_config(*both(a, b, "alphas"), *both(a, b, "scale")),
    ),
    "nvfp4_w4a16-halves": (
        lambda coder, shape, halves: coder.nvfp4(shape, halves),
        lambda a, b: vllm.nvfp4_w4a16_moe_quant_config(*both(a, b, "alphas"), *both(a, b, "scale")),
    ),
}

# Name: the type of the rows, which become codes in groups of columns, and what FORMATS says.
CODED_ROWS: dict[str, tuple[str, Any, Any]] = {
    "int4_w4afp8": (
        "e4m3",
        scaled_rows,
        lambda a, b: vllm.int4_w4afp8_moe_quant_config(
            *both(a, b, "scale"),
            *both(a, b, "alphas"),
            per_act_token_quant=False,
            per_out_ch_quant=False,
            block_shape=[1, 32],
        ),
    ),
    "int4_w4afp8-by-row": (  # as vLLM's method calls it
        "e4m3 by token",
        scaled_rows,
        lambda a, b: vllm.int4_w4afp8_moe_quant_config(
            *both(a, b, "scale"),
            *both(a, b, "alphas"),
            per_act_token_quant=True,
            per_out_ch_quant=True,
        ),
    ),
    "mxfp4_mxfp8": ("mxfp8", FORMATS["mxfp4_w4a16"][0], two(vllm.mxfp4_mxfp8_moe_quant_config)),
    "w_mxfp4_a_mxfp4": ("mxfp4", FORMATS["mxfp4_w4a16"][0], mx("mxfp4", "mxfp4")),
    "w_mxfp4_a_mxfp6_e3m2": ("mxfp6_e3m2", FORMATS["mxfp4_w4a16"][0], mx("mxfp6_e3m2", "mxfp4")),
    "w_mxfp4_a_mxfp6_e2m3": ("mxfp6_e2m3", FORMATS["mxfp4_w4a16"][0], mx("mxfp6_e2m3", "mxfp4")),
    "w_mxfp6_e3m2_a_mxfp6_e3m2": (
        "mxfp6_e3m2",
        FORMATS["w_mxfp6_e3m2"][0],
        mx("mxfp6_e3m2", "mxfp6_e3m2"),
    ),
    "w_mxfp6_e2m3_a_mxfp4": ("mxfp4", FORMATS["w_mxfp6_e2m3"][0], mx("mxfp4", "mxfp6_e2m3")),
    "mxfp8": (
        "mxfp8",
        FORMATS["w_mxfp8"][0],
        lambda a, b: vllm.ocp_mx_moe_quant_config("mxfp8", a.scale, b.scale),
    ),
    "nvfp4": ("nvfp4", FORMATS["nvfp4_w4a16"][0], nvfp4_config),
}
# nvfp4_config's steps of rows, of w1 and of w2.
NVFP4_STEPS = (4.0, 1 / 3)
