"""Reads a trusted safetensors file into numpy; bfloat16 is widened to float32."""

from __future__ import annotations

import json
import pathlib

import numpy

_TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "U32": "<u4",
    "I8": "i1",
    "U8": "u1",
}


def read(path: pathlib.Path) -> dict[str, numpy.ndarray]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        flat = numpy.frombuffer(content[begin:end], dtype=_TYPES[entry["dtype"]])
        if entry["dtype"] == "BF16":
            flat = (flat.astype("uint32") << 16).view("float32")
        tensors[name] = flat.reshape(entry["shape"])
    return tensors
