#!/usr/bin/env python3
"""Checks every #include "..." against the layer diagram of docs/architecture.md, and that a module
defines the functions that its headers declare: otherwise a module could call one above it.

Usage: tools/check_layers.py [ROOT]
Prints file:line and the broken rule for each violation; exit status 1 if there is one.
"""

import pathlib
import re
import sys

from free_functions import free_functions
from source_tree import source_files, without_comments

# module -> modules it may include besides itself and the public headers.
ALLOWED = {
    "core": set(),
    "cpu": {"core"},
    "cuda": {"core"},
    "comm": {"core", "cuda"},
    "io": {"core"},
    "record": {"core", "cuda", "io"},
    "activation": {"core", "cuda"},
    "quant": {"core"},
    "placement": {"core"},
    "gemm": {"core", "cpu", "cuda", "quant"},
    "routing": {"core", "cpu", "cuda", "gemm"},
    "dispatch": {"core", "cpu", "cuda", "comm", "placement"},
    "experts": {"core", "cpu", "cuda", "quant", "activation", "gemm"},
    "spec": {"core", "quant", "routing"},
    "checkpoint": {"core", "io", "quant", "routing", "spec"},
    "layer": {"core", "cpu", "cuda", "comm", "activation", "quant", "placement", "gemm",
              "routing", "dispatch", "experts", "spec"},
    "convert": {"core", "io"},
    "capi": {"core", "io"},
}
# Users of the library: public headers and their own files only.
OUTSIDE = ("apps", "python", "bench", "examples")
# The Python package contains the tool, by this one header of it.
TOOL_ENTRY = "run_tool.h"
# Reach into the library and its tests' support as tests do: they time the inside of a module, or
# need the tests' problems and oracles.
INSIDE = (("bench", "kernels"), ("bench", "h200"))
# Written by the build, for the files that report or depend on build options.
BUILD_CONFIG = "core/build_config.h"
BUILD_CONFIG_USERS = {"version.cc", "catalog.cc"}

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def rule_broken(root: pathlib.Path, path: pathlib.Path, include: str) -> str | None:
    """Why `path` may not include `include`, or None if it may."""
    where = path.relative_to(root).parts
    if where[0] == "include":
        return None if include.startswith("conclave/") else "public headers include only conclave/*"
    if (root / "include" / include).is_file():
        return None
    if where[:2] in INSIDE:
        return None
    if where[0] == "python" and include == TOOL_ENTRY:
        return None
    if where[0] in OUTSIDE:
        own = (path.parent / include, root / where[0] / include, root / where[0] / where[1] / include)
        if any(p.is_file() for p in own):
            return None
        return f"{where[0]}/ uses public headers (conclave/*) and its own files only"

    module = where[1]
    if module not in ALLOWED:
        return f"module '{module}' is not in the layer diagram"
    if include == BUILD_CONFIG:
        return None if path.name in BUILD_CONFIG_USERS else f"only {sorted(BUILD_CONFIG_USERS)} may"
    target = include.split("/")[0]
    if "/" not in include or target not in ALLOWED:
        return 'write "module/file.h", or "conclave/file.h" for an existing public header'
    if target == module or target in ALLOWED[module]:
        return None
    return f"{module} may include {', '.join(sorted(ALLOWED[module])) or 'the standard library'} only"


def undefined_functions(root: pathlib.Path) -> list[str]:
    """Functions declared in a header of a module and defined in none of its files."""
    declared, defined = [], set()
    for path in source_files(root, "src"):
        module = path.relative_to(root).parts[1]
        for function in free_functions(path.read_text(encoding="utf-8")):
            if function.is_defined:
                defined.add((module, function.name, function.parameters))
            elif path.suffix in (".h", ".cuh"):
                declared.append((module, path, function))
    return [f"{path.relative_to(root)}:{function.line}: declares {function.name}, which no file of "
            f"src/{module} defines" for module, path, function in declared
            if (module, function.name, function.parameters) not in defined]


def violations(root: pathlib.Path) -> list[str]:
    found = []
    for path in source_files(root, "include", "src", *OUTSIDE):
        text = without_comments(path.read_text(encoding="utf-8"))
        for match in INCLUDE.finditer(text):
            rule = rule_broken(root, path, match.group(1))
            if rule:
                line = text.count("\n", 0, match.start(1)) + 1
                found.append(f'{path.relative_to(root)}:{line}: includes "{match.group(1)}": {rule}')
    return found


def main(argv: list[str]) -> int:
    root = pathlib.Path(argv[1] if len(argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    found = violations(root) + undefined_functions(root)
    print("\n".join(found) if found else "layers: every include follows the diagram, and modules define what they declare")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
