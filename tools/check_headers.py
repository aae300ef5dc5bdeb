#!/usr/bin/env python3
"""Compiles every public header alone, with each C++ compiler that is installed, and those of the C
interface as C99 too, by the C compilers beside them.

Usage: tools/check_headers.py [ROOT] [--compiler NAME]...
Also fails on an #include of anything but the standard library and conclave/*. The headers of
conclave/interop/ are left out: naming another library's types is their purpose.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys

FLAGS = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-x", "c++", "-"]
C_FLAGS = ["-std=c99", "-fsyntax-only", "-pedantic", "-Wall", "-Wextra", "-Werror", "-x", "c", "-"]
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
STANDARD = re.compile(r"^[a-z_]+$")
STANDARD_OF_C = re.compile(r"^std(?:def|int)\.h$")


def is_of_c(root: pathlib.Path, header: pathlib.Path) -> bool:
    name = header.relative_to(root / "include").as_posix()
    return name == "conclave/c.h" or name.startswith("conclave/c/")


def c_compiler(compiler: str) -> str:
    """The C compiler that comes with one of C++."""
    return compiler.replace("clang++", "clang").replace("g++", "gcc")


def foreign_includes(root: pathlib.Path, header: pathlib.Path) -> list[str]:
    found = []
    text = header.read_text(encoding="utf-8")
    for match in INCLUDE.finditer(text):
        quote, name = match.groups()
        standard = STANDARD_OF_C if is_of_c(root, header) else STANDARD
        if not (name.startswith("conclave/") if quote == '"' else standard.match(name)):
            line = text.count("\n", 0, match.start(2)) + 1
            found.append(f"{header.relative_to(root)}:{line}: includes {name}: public headers stand "
                         "on the standard library alone")
    return found


def compile_alone(root: pathlib.Path, header: pathlib.Path, compiler: str,
                  flags: list[str] = FLAGS) -> str | None:
    name = header.relative_to(root / "include").as_posix()
    result = subprocess.run([compiler, f"-I{root / 'include'}", *flags], text=True,
                            input=f'#include "{name}"\n', capture_output=True, check=False)
    return None if result.returncode == 0 else f"{compiler}: {name} alone:\n{result.stderr}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Compile every public header alone.")
    parser.add_argument("root", nargs="?", default=pathlib.Path(__file__).parent.parent)
    parser.add_argument("--compiler", action="append", help="default: g++ and clang++")
    options = parser.parse_args(argv[1:])
    root = pathlib.Path(options.root).resolve()

    compilers = options.compiler or [
        found for names in (("g++",), ("clang++", "clang++-16"))
        if (found := next((n for n in names if shutil.which(n)), None))]
    if not compilers:
        print("headers: no C++ compiler found")
        return 1
    headers = sorted((root / "include").rglob("*.h"))
    plain = [h for h in headers if "interop" not in h.parts]

    failures = [line for h in plain for line in foreign_includes(root, h)]
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        jobs = [pool.submit(compile_alone, root, h, c) for h in plain for c in compilers]
        jobs += [pool.submit(compile_alone, root, h, c_compiler(c), C_FLAGS)
                 for h in plain for c in compilers if is_of_c(root, h)]
        failures += [text for job in jobs if (text := job.result())]
    print("\n".join(failures) if failures else
          f"headers: {len(plain)} stand alone with {' and '.join(compilers)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
