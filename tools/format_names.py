#!/usr/bin/env python3
"""Counts the files of C++ that name a format of weights or a type of its codes outside src/quant.

Usage: tools/format_names.py [ROOT] [--files]
Prints the number of files for each reason, what is recorded for it, and with --files their names.
What a format needs lies in its folder of src/quant: the numbers below may only fall. A file that
no reason covers, or one more than is recorded, is a violation of tools/check_rules.py.
"""

import pathlib
import re
import sys
from typing import NamedTuple

from source_tree import source_files, without_comments


class Reason(NamedTuple):
    name: str
    files: re.Pattern
    limit: int  # as counted last; lower it when it has fallen


REASONS = [
    Reason("types of elements, and their conversions", re.compile(r"^src/core/"), 2),
    Reason("methods of checkpoints, which name the type that their files hold",
           re.compile(r"^src/checkpoint/methods/"), 13),
    Reason("containers, which name the types that they store",
           re.compile(r"^src/io/|^src/checkpoint/gguf/"), 4),
    Reason("what callers of the C interface may ask for", re.compile(r"^src/capi/"), 1),
    Reason("features of a CPU", re.compile(r"^src/cpu/"), 2),
    Reason("register tiles, and what instructions are called",
           re.compile(r"^src/gemm/cpu/simd|^src/cuda/device/"), 5),
    Reason("kernels for one type of codes, and their rows", re.compile(r"^src/experts/"), 36),
    Reason("forms that the converter writes, a file for each kind",
           re.compile(r"^src/convert/forms/"), 6),
    Reason("options, help and words of the tool", re.compile(r"^apps/conclave/"), 8),
    Reason("types of arrays, as other libraries name them", re.compile(r"^python/src/"), 5),
]

# A word of code: an identifier, or a literal.
WORD = re.compile(r'"(?:\\.|[^"\\\n])*"|[A-Za-z_]\w*')
FORMAT = re.compile(
    r"(?:mx|nv)?fp[468](?!\d)|(?<![a-z])u?int[48](?!_t|\d)|(?<![a-z])i[48](?![a-z\d])"
    r"|e4m3|e5m2|e2m1|e2m3|e3m2|nf4|iq[1-4]|(?<![a-z])k[IF][48](?!\d)(?!e8m0)|(?<![a-z\d])t?q\d_[k\d]",
    re.IGNORECASE)
# Types of C++ and of CUDA's vectors, and what drivers call bytes: these are no formats.
OTHER = re.compile(r"u?int8_t|(?:make_)?u?int4|CU_TENSOR_MAP_DATA_TYPE_UINT8|\"uint8\"")
INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[^\n]*", re.MULTILINE)


def format_lines(text: str) -> list[int]:
    """The lines of a file's code that name a format."""
    code = without_comments(text)
    code = INCLUDE.sub(lambda include: " " * len(include[0]), code)
    return [code.count("\n", 0, word.start()) + 1 for word in WORD.finditer(code)
            if FORMAT.search(word[0]) and not OTHER.fullmatch(word[0])]


Place = tuple[str, int]  # a file, and the first line that names a format


def files_by_reason(root: pathlib.Path) -> tuple[dict[str, list[Place]], list[Place]]:
    """Files that name formats, by the reason for it, and those without one."""
    found: dict[str, list[Place]] = {reason.name: [] for reason in REASONS}
    others = []
    for path in source_files(root, "src", "apps", "python/src"):
        name = path.relative_to(root).as_posix()
        lines = format_lines(path.read_text(encoding="utf-8"))
        if name.startswith("src/quant/") or not lines:
            continue
        reason = next((r for r in REASONS if r.files.search(name)), None)
        (others if reason is None else found[reason.name]).append((name, lines[0]))
    return found, others


def violations(root: pathlib.Path) -> list[Place]:
    """Files without a reason, and all of a reason that has more than are recorded."""
    found, others = files_by_reason(root)
    for reason in REASONS:
        if len(found[reason.name]) > reason.limit:
            others += found[reason.name]
    return others


def main(argv: list[str]) -> int:
    folders = [a for a in argv[1:] if not a.startswith("--")]
    root = pathlib.Path(folders[0] if folders else pathlib.Path(__file__).parent.parent).resolve()
    found, others = files_by_reason(root)
    for reason in REASONS:
        count = len(found[reason.name])
        fallen = "  lower the record" if count < reason.limit else ""
        print(f"{count:4d} of {reason.limit:3d}  {reason.name}{fallen}")
        if "--files" in argv:
            print("".join(f"             {name}\n" for name, _ in found[reason.name]), end="")
    print(f"{len(others):4d} of   0  without a reason")
    print("".join(f"             {name}\n" for name, _ in others), end="")
    print(f"{sum(map(len, found.values())) + len(others):4d} in all")
    return 1 if violations(root) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
