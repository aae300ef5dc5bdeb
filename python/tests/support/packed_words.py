"""Codes in words as packing methods store them, decoded by numpy from the formats' definitions."""

from __future__ import annotations

from typing import Any

import numpy


def codes_of_lines(words: Any, bits: int) -> Any:
    """[lines, words] of codes that follow each other from the lowest bit on, over words' ends."""
    stream = numpy.unpackbits(
        numpy.ascontiguousarray(words).view(numpy.uint8), axis=1, bitorder="little"
    )
    codes = stream[:, : stream.shape[1] // bits * bits].reshape(len(stream), -1, bits)
    return codes @ (1 << numpy.arange(bits))


def decode_gptq(tensors: dict[str, Any], name: str, bits: int) -> Any:
    """float32 has the values: a code of at most 8 bits times a scale of 11."""
    codes = codes_of_lines(tensors[f"{name}.qweight"].T, bits).T
    zeros = (codes_of_lines(tensors[f"{name}.qzeros"], bits) + 1) % 2**bits
    groups = tensors[f"{name}.g_idx"]
    scales = tensors[f"{name}.scales"].astype(numpy.float32)
    return ((codes - zeros[groups]).astype(numpy.float32) * scales[groups]).T


def decode_awq(tensors: dict[str, Any], name: str, group: int, version: str) -> Any:
    """float32 [rows, columns] of AWQ's two layouts."""
    words, zeros, scales = (tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
    if version == "gemm":
        codes, zeros, scales = rows_of_words(words), rows_of_words(zeros), scales.T
    else:
        codes, zeros = codes_of_lines(words, 4), codes_of_lines(zeros, 4)
    groups = codes.shape[1] // group
    of_columns = [numpy.repeat(plane[:, :groups], group, axis=1) for plane in (zeros, scales)]
    return (codes - of_columns[0]).astype(numpy.float32) * of_columns[1].astype(numpy.float32)


def rows_of_words(words: Any) -> Any:
    """Eight rows in a word, in the order of AWQ's kernels."""
    codes = codes_of_lines(words, 4).reshape(len(words), -1, 8)
    return codes[:, :, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(len(words), -1).T
