#!/usr/bin/env python3
"""Compares our safetensors reader with the reference reader on mutated files.

Usage: safetensors_differential.py VERDICT_PROGRAM [--trials N] [--seconds S] [--seed N]

No file may be read by both with a different name, dtype, shape or range, and every file that only
the reference accepts must be refused for a reason on the list of docs/security.md. Exit status
0 if so, 1 if not, 77 if the Python package safetensors is not installed.
"""

import argparse
import collections
import json
import random
import struct
import subprocess
import sys
import time

try:
    import safetensors
except ImportError:
    print("the Python package safetensors is not installed")
    sys.exit(77)

BATCH = 20_000
DATA_BYTES = 64  # all different, so that a range can be read off its bytes

# Codes by which we may refuse what the reference accepts.
STRICTER = {
    "kSafetensorsDuplicateKey",   # the reference keeps the last of two equal names
    "kSafetensorsEntry",          # unknown fields of an entry
    "kSafetensorsMetadata",       # "__metadata__": null
    "kSafetensorsName",           # control characters, more than 4096 bytes
    "kSafetensorsShape",          # more than 64 dimensions
    "kSafetensorsSizeOverflow",   # an overflow hidden by a zero dimension
}

SEEDS = [
    '{}',
    '{"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}}',
    '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    '"b":{"dtype":"BF16","shape":[2,2],"data_offsets":[8,16]},'
    '"c":{"dtype":"U8","shape":[0],"data_offsets":[16,16]}}',
    '{"__metadata__":{"format":"pt","k":"v"},'
    '"b":{"dtype":"I64","shape":[1],"data_offsets":[4,12]},'
    '"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
    '{"s":{"dtype":"F64","shape":[],"data_offsets":[0,8]},'
    '"e":{"dtype":"F16","shape":[3,0,7],"data_offsets":[8,8]}}',
    '{"h":{"dtype":"F4","shape":[4],"data_offsets":[0,2]},'
    '"i":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[2,5]},'
    '"j":{"dtype":"F8_E8M0","shape":[3],"data_offsets":[5,8]}}',
    '{"\\u0061\\ud83d\\ude00":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]},'
    '"ä":{"dtype":"C64","shape":[1],"data_offsets":[1,9]}}   ',
]

WORDS = [
    '"F32"', '"F16"', '"BF16"', '"U8"', '"I8"', '"F64"', '"F4"', '"F6_E3M2"', '"F8_E4M3"',
    '"F8_E4M3FNUZ"', '"BOOL"', '"X"', '"a"', '"b"', '"\\u0061"', '"a\\u0000"', '"\\ud800"',
    '"__metadata__"', '"dtype"', '"shape"', '"data_offsets"', '"x"', '""', "{}", "[]", "[0]",
    "[0,0]", "[1,1]", "[2,4]", "0", "1", "2", "4", "8", "12", "16", "-0", "-1", "1.0", "1e0",
    "01", "4294967296", "9223372036854775807", "9223372036854775808", "18446744073709551615",
    "18446744073709551616", "null", "true", "NaN", ",", ":", "{", "}", "[", "]", " ", "\n", "\t",
    "\x00", "\ufeff", ',"x":1', ',"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',
]


def tokens(header: str) -> list[str]:
    """Strings, numbers and single characters."""
    found, at = [], 0
    while at < len(header):
        end = at + 1
        if header[at] == '"':
            while header[end] != '"' or header[end - 1] == "\\":
                end += 1
            end += 1
        elif header[at].isdigit():
            while end < len(header) and header[end].isdigit():
                end += 1
        found.append(header[at:end])
        at = end
    return found


SEED_TOKENS = [tokens(seed) for seed in SEEDS]


def mutated_file(rng: random.Random) -> bytes:
    words = list(rng.choice(SEED_TOKENS))
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        at = rng.randrange(len(words))
        kind = rng.randrange(6)
        if kind == 0:
            words[at] = rng.choice(WORDS)
        elif kind == 1:
            words.insert(at, rng.choice(WORDS))
        elif kind == 2:
            del words[at]
        elif kind == 3:
            other = rng.randrange(len(words))
            words[at], words[other] = words[other], words[at]
        elif kind == 4:
            end = at + rng.randrange(1, 12)
            words[at:at] = words[at:end]
        elif words[at].isdigit():
            words[at] = str(max(0, int(words[at]) + rng.choice((-8, -4, -1, 1, 4, 8))))
        if not words:
            words = ["{", "}"]
    header = bytearray("".join(words).encode())
    if header and rng.random() < 0.1:
        header[rng.randrange(len(header))] = rng.randrange(256)
    length = len(header)
    if rng.random() < 0.02:
        length = rng.choice((0, length - 1 if length else 0, length + 1, 1 << 27, 1 << 63))
    # Mostly as much data as the largest offset asks for.
    data = max((int(word) for word in words if len(word) < 3 and word.isdecimal()), default=0)
    if data >= DATA_BYTES or rng.random() < 0.1:
        data = rng.randrange(DATA_BYTES)
    return struct.pack("<Q", length) + bytes(header) + bytes(range(data))


def reference(file: bytes):
    """Sorted [name, dtype, shape, begin, end], or None if the file is refused. A tensor without
    bytes has no begin."""
    try:
        entries = safetensors.deserialize(file)
    except safetensors.SafetensorError:
        return None
    found = []
    for name, entry in entries:
        data = entry["data"]
        begin = data[0] if len(data) else None
        end = begin + len(data) if len(data) else None
        found.append([name, entry["dtype"], list(entry["shape"]), begin, end])
    return sorted(found)


def ours(program: str, files: list[bytes]) -> list:
    stream = b"".join(struct.pack("<I", len(file)) + file for file in files)
    done = subprocess.run([program], input=stream, stdout=subprocess.PIPE, check=True)
    lines = done.stdout.decode().splitlines()
    if len(lines) != len(files):
        raise SystemExit(f"{len(files)} files, but {len(lines)} verdicts")
    return [json.loads(line) for line in lines]


def comparable(tensors: list) -> list:
    return sorted([name, dtype, shape, begin if end > begin else None, end if end > begin else None]
                  for name, dtype, shape, begin, end in tensors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("--trials", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=0, help="stop after so long; 0: never")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    rng = random.Random(options.seed)
    started = time.monotonic()
    counts = collections.Counter()
    stricter = collections.Counter()
    problems = []
    while counts["files"] < options.trials:
        if options.seconds and time.monotonic() - started > options.seconds:
            break
        files = [mutated_file(rng)
                 for _ in range(min(BATCH, options.trials - counts["files"]))]
        for file, verdict in zip(files, ours(options.program, files)):
            counts["files"] += 1
            expected = reference(file)
            if isinstance(verdict, str):
                if expected is None:
                    counts["both refuse"] += 1
                    continue
                stricter[verdict] += 1
                if verdict not in STRICTER:
                    problems.append(("refused without a listed reason", verdict, file))
            elif expected is None:
                counts["only ours accepts"] += 1
                problems.append(("the reference refuses it", verdict, file))
            elif comparable(verdict) != expected:
                problems.append(("read differently", verdict, file))
            else:
                counts["both accept alike"] += 1

    print(f"S10: {counts['files']} files in {time.monotonic() - started:.0f} s, safetensors "
          f"{safetensors.__version__}: both accept alike {counts['both accept alike']}, both refuse "
          f"{counts['both refuse']}, only ours accepts {counts['only ours accepts']}, only the "
          f"reference accepts {sum(stricter.values())} {dict(stricter)}, disagreements "
          f"{len(problems)}")
    for what, verdict, file in problems[:10]:
        print(f"  {what}: {verdict}: {file!r}")
    return 1 if problems or not counts["both accept alike"] else 0


if __name__ == "__main__":
    sys.exit(main())
