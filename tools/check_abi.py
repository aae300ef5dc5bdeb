#!/usr/bin/env python3
"""Checks that the C interface only grows: structs, constants and functions of include/conclave/c
against src/capi/abi.txt, and the symbols of a library against the functions.

Usage: tools/check_abi.py [ROOT] [--compiler CC] [--library FILE] [--write]
Prints what is gone or has changed, and what is not recorded; exit status 1 if there is anything.
--write records what is new, and nothing if anything else has changed.
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

from source_tree import without_comments

RECORD = "src/capi/abi.txt"
STRUCT = re.compile(r"typedef struct (\w+) \{(.*?)\} \1;", re.DOTALL)
ENUM = re.compile(r"\benum \{(.*?)\}", re.DOTALL)
CONSTANT = re.compile(r"\s*(CONCLAVE_\w+) = (-?\d+)\s*")
FUNCTION = re.compile(r"CONCLAVE_C_API ([^;{}]*?) ?CONCLAVE_C_NOTHROW;", re.DOTALL)
NAME_OF_FUNCTION = re.compile(r"(\w+)\(")
SYMBOL = re.compile(r"\b[TW] (conclave_\w+)$", re.MULTILINE)


class Field(NamedTuple):
    name: str
    type: str
    offset: int
    size: int


class Interface(NamedTuple):
    structs: dict[str, tuple[list[Field], int]]  # fields, and bytes of the whole
    constants: dict[str, int]
    functions: dict[str, str]  # name and prototype


def one_line(text: str) -> str:
    """With spaces behind commas and runs of asterisks, and nowhere else but between words."""
    spaced = re.sub(r"\s*(\*+|[(),])\s*", lambda m: m[1] + (" " if m[1][0] in "*," else ""),
                    " ".join(text.split()))
    return re.sub(r"\* (?=[,)])|(?<=\(\*) ", lambda m: m[0].strip(), spaced).strip()


def without_parameter_names(prototype: str) -> str:
    head, parameters = prototype.split("(", 1)
    kept = [re.sub(r"(?<=[\s*])\w+$", "", p).strip() if " " in p else p
            for p in parameters.rstrip(")").split(", ")]
    return f"{head}({', '.join(kept)})"


def fields_of(body: str) -> list[tuple[str, str]]:
    """Name and type of each member, in order."""
    found = []
    for member in filter(None, (one_line(part) for part in body.split(";"))):
        pointer = re.search(r"\(\*(\w+)\)", member)
        plain = re.fullmatch(r"(.*?)\s*(\w+)(\[\w+\])?", member)
        name = pointer[1] if pointer else plain[2]
        kind = member.replace(name, "", 1) if pointer else plain[1] + (plain[3] or "")
        found.append((name, " ".join(kind.split())))
    return found


def constants_of(body: str, where: str) -> dict[str, int]:
    found = {}
    for entry in filter(str.strip, body.split(",")):
        match = CONSTANT.fullmatch(entry)
        if not match:
            raise SystemExit(f"{where}: '{entry.strip()}': every constant states its number")
        found[match[1]] = int(match[2])
    return found


def measure(root: pathlib.Path, structs: dict[str, list[tuple[str, str]]], compiler: str) -> dict:
    """What a compiler of C makes of the structs: offset and size of each member, and of the whole."""
    lines = []
    for name, fields in structs.items():
        lines += [f'  printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), '
                  f"sizeof((({name}*)0)->{field}));" for field, _ in fields]
        lines.append(f'  printf("{name} 0 %zu\\n", sizeof({name}));')
    program = ("#include <conclave/c.h>\n#include <stdio.h>\nint main(void) {\n" + "\n".join(lines)
               + "\n  return 0;\n}\n")
    with tempfile.TemporaryDirectory() as folder:
        source, binary = pathlib.Path(folder, "layout.c"), pathlib.Path(folder, "layout")
        source.write_text(program, encoding="utf-8")
        subprocess.run([compiler, "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror",
                        f"-I{root / 'include'}", source, "-o", binary], check=True)
        text = subprocess.run([binary], check=True, capture_output=True, text=True).stdout
    return {name: (int(offset), int(size)) for name, offset, size in map(str.split, text.splitlines())}


def read_headers(root: pathlib.Path, compiler: str) -> Interface:
    structs: dict[str, list[tuple[str, str]]] = {}
    constants: dict[str, int] = {}
    functions: dict[str, str] = {}
    for path in sorted((root / "include/conclave/c").glob("*.h")):
        text = without_comments(path.read_text(encoding="utf-8"))
        for name, body in STRUCT.findall(text):
            structs[name] = fields_of(body)
        for body in ENUM.findall(text):
            constants |= constants_of(body, path.name)
        for match in FUNCTION.finditer(text):
            prototype = without_parameter_names(one_line(match[1]))
            functions[NAME_OF_FUNCTION.search(prototype)[1]] = prototype
    sizes = measure(root, structs, compiler)
    return Interface({name: ([Field(field, kind, *sizes[f"{name}.{field}"]) for field, kind in fields],
                             sizes[name][1]) for name, fields in structs.items()},
                     constants, functions)


def to_text(interface: Interface) -> str:
    lines = ["# What programs of C rely on, written by tools/check_abi.py --write: lines are only added."]
    for name, (fields, size) in interface.structs.items():
        lines.append(f"struct {name} {size}")
        lines += [f"  {f.offset} {f.size} {f.name}: {f.type}" for f in fields]
    lines += [f"constant {name} {value}" for name, value in interface.constants.items()]
    lines += [f"function {prototype}" for prototype in interface.functions.values()]
    return "\n".join(lines) + "\n"


def from_text(text: str) -> Interface:
    record = Interface({}, {}, {})
    fields: list[Field] = []
    for line in text.splitlines():
        words = line.split()
        if line.startswith("struct "):
            fields = []
            record.structs[words[1]] = (fields, int(words[2]))
        elif line.startswith("  "):
            name, kind = line.split(None, 2)[2].split(": ", 1)
            fields.append(Field(name, kind, int(words[0]), int(words[1])))
        elif line.startswith("constant "):
            record.constants[words[1]] = int(words[2])
        elif line.startswith("function "):
            prototype = line.removeprefix("function ")
            record.functions[NAME_OF_FUNCTION.search(prototype)[1]] = prototype
    return record


def broken(record: Interface, now: Interface) -> list[str]:
    """What programs built before rely on and do not find."""
    found = []
    for name, (fields, size) in record.structs.items():
        if name not in now.structs:
            found.append(f"struct {name} is gone")
            continue
        for at, (before, after) in enumerate(zip(fields, now.structs[name][0])):
            if before != after:
                found.append(f"struct {name}: member {at} was {before}, and is {after}: new members "
                             "are added at the end")
                break
        if len(now.structs[name][0]) < len(fields) or now.structs[name][1] < size:
            found.append(f"struct {name} has become smaller")
    for kind, before, after in (("constant", record.constants, now.constants),
                                ("function", record.functions, now.functions)):
        found += [f"{kind} {name} was {value}, and is {after.get(name, 'gone')}"
                  for name, value in before.items() if after.get(name) != value]
    return found


def symbol_faults(library: str, functions: dict[str, str]) -> list[str]:
    options = ["-D"] if ".so" in pathlib.Path(library).name else []
    text = subprocess.run(["nm", "-g", "--defined-only", *options, library], check=True,
                          capture_output=True, text=True).stdout
    symbols = set(SYMBOL.findall(text))
    return ([f"{library}: no symbol {name}" for name in functions if name not in symbols] +
            [f"{library}: exports {name}, which no header declares"
             for name in sorted(symbols - set(functions))])


def check(root: pathlib.Path, compiler: str, library: str | None, write: bool) -> list[str]:
    path = root / RECORD
    now = read_headers(root, compiler)
    record = from_text(path.read_text(encoding="utf-8") if path.is_file() else "")
    found = broken(record, now)
    if write and not found:
        path.write_text(to_text(now), encoding="utf-8")
    elif not found and to_text(now) != to_text(record):
        found.append(f"{RECORD}: additions are not recorded: tools/check_abi.py --write")
    return found + (symbol_faults(library, now.functions) if library else [])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Check that the C interface only grows.")
    parser.add_argument("root", nargs="?", default=pathlib.Path(__file__).parent.parent)
    parser.add_argument("--compiler", help="default: cc, gcc or clang")
    parser.add_argument("--library")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(argv[1:])
    compiler = options.compiler or next(filter(shutil.which, ("cc", "gcc", "clang", "clang-16")), None)
    if compiler is None:
        print("abi: no C compiler found")
        return 1
    root = pathlib.Path(options.root).resolve()
    found = check(root, compiler, options.library, options.write)
    print("\n".join(found) if found else "abi: the C interface has everything that it had")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
