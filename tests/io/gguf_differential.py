#!/usr/bin/env python3
"""Compares our reader of GGUF with that of gguf-py on files of its writer, whole and mutated.

Usage: gguf_differential.py VERDICT_PROGRAM [--trials N] [--seconds S] [--seed N]

No file may be read by both with different keys, values, names, types, shapes or places, and what
only one of them accepts must be refused by the other for a reason on the lists below. Exit status
0 if so, 1 if not, 77 if the Python package gguf is not installed.
"""

import argparse
import collections
import importlib.metadata
import json
import logging
import math
import pathlib
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings

try:
    import gguf
    import numpy as np
    from gguf import GGMLQuantizationType as TensorType
    from gguf import GGUFValueType as ValueType
    from gguf.constants import GGML_QUANT_SIZES
except ImportError:
    print("the Python package gguf is not installed")
    sys.exit(77)

BATCH = 2_000
MAGIC = b"GGUF"
OWN_FIELDS = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"}  # names of gguf-py's, not keys
NO_FILE_TYPES = {"Q8_1"}  # readers disagree about its size; no file holds it

# Codes by which we may refuse what gguf-py accepts: docs/security.md has the list.
STRICTER = {
    "kGgufVersion",       # big-endian files
    "kGgufString",        # strings cut off by the file's end, and names above 64 bytes
    "kGgufKey",           # empty, or control characters
    "kGgufBool",
    "kGgufArray",         # arrays of arrays
    "kGgufAlignment",     # below 8 and above 65,536
    "kGgufName",          # empty, or control characters
    "kGgufShape",         # above 4 dimensions, or one of 0
    "kGgufTensorType",    # those of NO_FILE_TYPES
    "kGgufOffset",        # places out of order, with gaps or shared
    "kGgufTrailingData",
}

# What gguf-py says where it may refuse what we accept.
LAXER = (
    "Bad type for general.alignment",         # unsigned integers of other widths
    "is not a valid GGMLQuantizationType",    # types newer than the package
    "Duplicate GGUF.",                        # names that it gives to fields of the header
)

INTERESTING_32 = [*range(14), 16, 24, 30, 31, 32, 39, 40, 41, 42, 64, 256, 4096, 65_536, 131_072,
                  2**31, 2**32 - 1]
INTERESTING_64 = [0, 1, 2, 3, 4, 8, 31, 32, 33, 64, 96, 128, 255, 256, 257, 512, 2**31, 2**32,
                  2**32 + 1, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]


TOO_SLOW = "gguf-py takes too long"
# Of the files, so many may be accepted without an answer: above it the comparison says too little.
TOO_SLOW_SHARE = 0.001


class TooSlow(Exception):
    pass


def too_slow(_signal, _frame):
    raise TooSlow


def tensors_of_all_types(writer: gguf.GGUFWriter, rng: np.random.Generator) -> None:
    for kind in TensorType:
        block, size = GGML_QUANT_SIZES[kind]
        if kind.name in NO_FILE_TYPES:
            continue
        data = rng.integers(0, 256, (3, 2 * size), dtype=np.uint8)
        writer.add_tensor(f"blk.0.{kind.name.lower()}.weight", data, raw_dtype=kind)


def values_of_all_types(writer: gguf.GGUFWriter) -> None:
    values = {ValueType.UINT8: 200, ValueType.INT8: -100, ValueType.UINT16: 60_000,
              ValueType.INT16: -30_000, ValueType.UINT32: 2**32 - 1, ValueType.INT32: -1,
              ValueType.FLOAT32: 0.1, ValueType.BOOL: True, ValueType.STRING: "grün\n",
              ValueType.UINT64: 2**64 - 1, ValueType.INT64: -2**63, ValueType.FLOAT64: math.inf}
    for kind, value in values.items():
        writer.add_key_value(f"value.{kind.name}", value, kind)
    writer.add_array("array.integers", [1, -2, 3])
    writer.add_array("array.floats", [0.5, -0.0, math.nan])
    writer.add_array("array.bools", [True, False])
    writer.add_array("array.strings", ["", "a", "ä"])
    writer.add_key_value("array.u8", [1, 2, 255], ValueType.ARRAY, sub_type=ValueType.UINT8)


def written(folder: pathlib.Path) -> list[bytes]:
    """Files of GGUFWriter."""
    rng = np.random.default_rng(7)

    def add_shapes(writer):
        for i, shape in enumerate(((5,), (2, 3), (1, 2, 3), (2, 1, 1, 4))):
            writer.add_tensor(f"t{i}", rng.standard_normal(shape, dtype=np.float32))
        writer.add_tensor("half", rng.standard_normal((2, 4)).astype(np.float16))
        writer.add_tensor("wide", rng.standard_normal((3,)))

    def add_aligned(writer):
        writer.add_custom_alignment(64)
        add_shapes(writer)

    files = []
    for fill in (lambda writer: None, values_of_all_types, add_shapes, add_aligned,
                 lambda writer: tensors_of_all_types(writer, rng)):
        path = folder / "written.gguf"
        writer = gguf.GGUFWriter(path, "tiny")
        fill(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        files.append(path.read_bytes())
    return files


class Fields:
    """A file as its fields, so that a mutation moves no other field out of place."""

    def __init__(self, file: bytes):
        self.file, self.at, self.fields = file, 0, []
        self.take(4)
        self.take(4)
        tensors, entries = self.take(8), self.take(8)
        for _ in range(entries):
            self.text()
            self.value(self.take(4))
        for _ in range(tensors):
            self.text()
            for _ in range(self.take(4)):
                self.take(8)
            self.take(4)
            self.take(8)
        self.data = file[self.at:]

    def take(self, count: int) -> int:
        field = self.file[self.at:self.at + count]
        self.fields.append(field)
        self.at += count
        return int.from_bytes(field, "little")

    def text(self) -> None:
        self.take(self.take(8))

    def value(self, kind: int) -> None:
        if kind == ValueType.STRING:
            self.text()
        elif kind == ValueType.ARRAY:
            element, count = self.take(4), self.take(8)
            for _ in range(count):
                self.value(element)
        else:
            self.take({0: 1, 1: 1, 2: 2, 3: 2, 7: 1, 10: 8, 11: 8, 12: 8}.get(kind, 4))


def changed_field(rng: random.Random, field: bytes) -> bytes:
    width = len(field)
    if width in (4, 8) and rng.random() < 0.7:
        number = int.from_bytes(field, "little")
        if rng.random() < 0.4:
            number += rng.choice((-64, -32, -8, -1, 1, 8, 32, 64, 256))
        else:
            number = rng.choice(INTERESTING_32 if width == 4 else INTERESTING_64)
        return (number % 2 ** (8 * width)).to_bytes(width, "little")
    field = bytearray(field)
    for _ in range(rng.choice((1, 1, 2))):
        if field:
            byte = rng.choice((0, 1, 2, 10, 97, 127, 128, 255, rng.randrange(256)))
            field[rng.randrange(len(field))] = byte
    return bytes(field)


def mutated_file(rng: random.Random, seeds: list[Fields]) -> bytes:
    seed = rng.choice(seeds)
    fields = list(seed.fields)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        at = rng.randrange(len(fields))
        kind = rng.randrange(10)
        if kind < 6:
            fields[at] = changed_field(rng, fields[at])
        elif kind == 6:
            # The same field of another entry or tensor.
            other = rng.randrange(len(fields))
            if len(fields[other]) == len(fields[at]):
                fields[at] = fields[other]
        elif kind == 7:
            del fields[at]
        elif kind == 8:
            end = at + rng.randrange(1, 8)
            fields[at:at] = fields[at:end]
        else:
            other = rng.randrange(len(fields))
            fields[at], fields[other] = fields[other], fields[at]
        if not fields:
            fields = [MAGIC]
    header = b"".join(fields)
    # The data lie where they lay, mostly at the next aligned place behind the header.
    data = seed.data.lstrip(b"\0") if rng.random() < 0.05 else seed.data
    if len(header) != seed.at and rng.random() < 0.8:
        alignment = 32
        unpadded = seed.data[-seed.at % alignment:]
        data = bytes(-len(header) % alignment) + unpadded
    file = header + data
    chance = rng.random()
    if chance < 0.05:
        file = file[:rng.randrange(len(file) + 1)]
    elif chance < 0.08:
        file += bytes(rng.choice((1, 31, 32, 33)))
    return file


def bits(number: float) -> int:
    return struct.unpack("<Q", struct.pack("<d", number))[0]


def value_of(field: gguf.ReaderField) -> list:
    kind = field.types[0]
    if kind == ValueType.STRING:
        return ["string", field.parts[-1].tobytes().hex()]
    if kind == ValueType.ARRAY:
        count = int(field.parts[4][0])
        element = ValueType(int(field.parts[3][0]))
        if element == ValueType.STRING:
            return ["strings", count]
        return ["numbers", [bits(float(field.parts[i][0])) for i in field.data]]
    value = field.parts[-1][0]
    if kind == ValueType.BOOL:
        return ["bool", bool(value)]
    if kind in (ValueType.FLOAT32, ValueType.FLOAT64):
        return ["float", bits(float(value))]
    return ["integer", int(value)]


def read_by_gguf(path: pathlib.Path) -> list:
    reader = gguf.GGUFReader(path)
    entries = [[name, *value_of(field)] for name, field in reader.fields.items()
               if name not in OWN_FIELDS]
    tensors = [[tensor.name, tensor.tensor_type.name,
                [int(dim) for dim in reversed(tensor.shape)], tensor.data_offset,
                tensor.n_bytes] for tensor in reader.tensors]
    return [entries, tensors]


def reference(path: pathlib.Path, file: bytes):
    """[entries, tensors] as the verdict program has them, or the text of what refuses the file."""
    path.write_bytes(file)
    try:
        # Processor time, so that a busy machine makes no file slow.
        signal.setitimer(signal.ITIMER_PROF, 0.5)
        try:
            return read_by_gguf(path)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except TooSlow:
        return TOO_SLOW
    except (ArithmeticError, LookupError, MemoryError, RecursionError, TypeError,
            ValueError) as error:
        return str(error) or type(error).__name__


def ours(program: str, files: list[bytes]) -> list:
    stream = b"".join(struct.pack("<I", len(file)) + file for file in files)
    done = subprocess.run([program], input=stream, stdout=subprocess.PIPE, check=True)
    lines = done.stdout.decode().splitlines()
    if len(lines) != len(files):
        raise SystemExit(f"{len(files)} files, but {len(lines)} verdicts")
    return [json.loads(line) for line in lines]


def judge(verdict, expected) -> tuple[str, str | None]:
    """How the two agree, and what is wrong with that."""
    if isinstance(verdict, str):
        if isinstance(expected, str):
            return "both refuse", None
        is_listed = verdict in STRICTER
        return "only gguf-py accepts", None if is_listed else "refused without a listed reason"
    if expected == TOO_SLOW:
        return TOO_SLOW, None
    if isinstance(expected, str):
        is_listed = any(reason in expected for reason in LAXER)
        return "only ours accepts", None if is_listed else "gguf-py refuses it"
    return "both accept alike", None if verdict == expected else "read differently"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("--trials", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=0, help="stop after so long; 0: never")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")  # numpy reports that products wrap
    signal.signal(signal.SIGPROF, too_slow)
    rng = random.Random(options.seed)
    started = time.monotonic()
    counts = collections.Counter()
    reasons = collections.Counter()
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "case.gguf"
        seeds = written(pathlib.Path(folder))
        fields = [Fields(seed) for seed in seeds]
        files = seeds
        while files:
            for file, verdict in zip(files, ours(options.program, files)):
                expected = reference(path, file)
                outcome, problem = judge(verdict, expected)
                counts["files"] += 1
                counts[outcome] += 1
                if outcome == "only gguf-py accepts":
                    reasons[verdict] += 1
                if file in seeds and outcome != "both accept alike":
                    problem = "a file of the writer is refused"
                if problem:
                    problems.append((problem, verdict, expected, file))
            if options.seconds and time.monotonic() - started > options.seconds:
                break
            files = [mutated_file(rng, fields)
                     for _ in range(min(BATCH, options.trials - counts["files"]))]

    outcomes = ", ".join(f"{outcome} {count}" for outcome, count in sorted(counts.items())
                         if outcome != "files")
    print(f"S10: {counts['files']} files in {time.monotonic() - started:.0f} s, gguf "
          f"{importlib.metadata.version('gguf')}: {outcomes} {dict(reasons)}, "
          f"disagreements {len(problems)}")
    if counts[TOO_SLOW] > TOO_SLOW_SHARE * counts["files"]:
        print(f"  {TOO_SLOW}: {counts[TOO_SLOW]} files, at most {TOO_SLOW_SHARE:.1%} may be")
        return 1
    for what, verdict, expected, file in problems[:10]:
        print(f"  {what}: {verdict}\n    {expected}\n    {file!r}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
