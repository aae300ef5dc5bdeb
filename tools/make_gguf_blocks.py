#!/usr/bin/env python3
"""Writes testdata/gguf/blocks.safetensors: blocks of every GGUF type and their values by gguf-py,
and testdata/gguf/encoded.safetensors: values, and the blocks that gguf-py makes of them.

For each type, NAME holds blocks of random bytes, among them scales that are 0, subnormal, infinite
or NaN, and NAME.values what gguf.quants.dequantize makes of them. Q1_0 and Q2_0, which gguf-py only
names, are computed here from their definition. In the other file `values` are [blocks, 32], and TYPE
has the blocks that gguf.quants.quantize makes of them. Needs gguf and numpy.
"""

import argparse
import importlib.metadata
import pathlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import save_file

BLOCKS = 24
# Offsets of the float16 fields of a block: an ordinary number in most blocks, the rest edges.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
    "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ2_XXS": [0], "IQ2_XS": [0],
    "IQ3_XXS": [0], "IQ1_S": [0], "IQ4_NL": [0], "IQ3_S": [0], "IQ2_S": [0], "IQ4_XS": [0],
    "IQ1_M": [], "TQ1_0": [52], "TQ2_0": [64], "MXFP4": [], "NVFP4": [], "Q1_0": [0], "Q2_0": [0],
}  # fmt: skip
SIZES = {"Q1_0": (128, 18), "Q2_0": (64, 18)}
EDGES = (0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0x7C00, 0xFC00, 0x7E00)


def random_blocks(name: str, block_bytes: int, rng: np.random.Generator) -> np.ndarray:
    blocks = rng.integers(0, 256, (BLOCKS, block_bytes), dtype=np.uint8)
    for at in HALVES[name]:
        halves = rng.normal(0, 0.05, BLOCKS).astype(np.float16).view(np.uint16)
        halves[: len(EDGES)] = rng.permutation(EDGES)
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(BLOCKS, 2)
    if name == "MXFP4":
        blocks[:6, 0] = (0, 1, 2, 127, 254, 255)
        blocks[6:, 0] = rng.integers(110, 140, BLOCKS - 6)
    if name == "NVFP4":
        blocks[0, :4] = (0, 1, 0x7E, 0x7F)
    return blocks


def values_of(name: str, blocks: np.ndarray) -> np.ndarray:
    if name in SIZES:
        bits = 1 if name == "Q1_0" else 2
        scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = blocks[:, 2:, None] >> shifts & ((1 << bits) - 1)
        codes = codes.reshape(len(blocks), -1).astype(np.int32)
        codes = 2 * codes - 1 if bits == 1 else codes - 1
        return (scale * codes.astype(np.float32)).reshape(-1)
    return gguf.quants.dequantize(blocks.reshape(-1), Type[name])


# Types that gguf-py makes blocks of, of 32 values each.
ENCODED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")


def values_to_encode(rng: np.random.Generator) -> np.ndarray:
    """Blocks of ordinary sizes, then edges: zeros, one value, equal values, ties, large and tiny."""
    sizes = np.exp(rng.uniform(-9, 3, 400))[:, None]
    ordinary = rng.standard_normal((400, 32)) * sizes
    narrow = rng.uniform(0.5, 1, (100, 32)) * rng.choice([-1, 1], (100, 1))
    steps = rng.integers(-16, 17, (100, 32)) / 2.0
    edges = np.zeros((8, 32))
    edges[1, 7] = 0.3
    edges[2, 7] = -0.3
    edges[3] = 0.25
    edges[4] = -0.25
    edges[5, ::2] = 1e-6
    edges[6] = rng.standard_normal(32) * 1e4
    edges[7] = rng.standard_normal(32) * 1e-12
    return np.concatenate([ordinary, narrow, steps, edges]).astype(np.float32)


def write_encoded(out: pathlib.Path, provenance: str) -> None:
    values = values_to_encode(np.random.default_rng(20261124))
    tensors = {"values": values}
    for name in ENCODED:
        tensors[name] = gguf.quants.quantize(values, Type[name]).reshape(len(values), -1)
    save_file(tensors, out, metadata={"provenance": provenance})
    print(f"{out}: {len(ENCODED)} types of {len(values)} blocks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default="testdata/gguf/blocks.safetensors")
    out = parser.parse_args().out
    rng = np.random.default_rng(20261123)
    tensors = {}
    for name in HALVES:
        block_bytes = SIZES[name][1] if name in SIZES else gguf.GGML_QUANT_SIZES[Type[name]][1]
        blocks = random_blocks(name, block_bytes, rng)
        with np.errstate(all="ignore"):
            values = values_of(name, blocks)
        tensors[name] = blocks
        tensors[f"{name}.values"] = values.astype(np.float32).reshape(BLOCKS, -1)
    version = importlib.metadata.version("gguf")
    provenance = f"gguf {version}, numpy {np.__version__}"
    save_file(tensors, out, metadata={"provenance": provenance})
    print(f"{out}: {len(HALVES)} types of {BLOCKS} blocks, gguf {version}")
    write_encoded(out.with_name("encoded.safetensors"), provenance)


if __name__ == "__main__":
    main()
