#!/usr/bin/env python3
"""Compiles every public header alone, with the first C++ compiler that is installed, and those of the C
interface as C99 too, by the C compiler beside it; all of them together with each other compiler, since
what a header needs to stand alone does not depend on who compiles it, and what a compiler refuses does not
depend on the headers beside it.

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


def compile_headers(root: pathlib.Path, headers: list[pathlib.Path], compiler: str, flags: list[str]) -> str | None:
    names = [header.relative_to(root / "include").as_posix() for header in headers]
    result = subprocess.run([compiler, f"-I{root / 'include'}", *flags], text=True,
                            input="".join(f'#include "{name}"\n' for name in names),
                            capture_output=True, check=False)
    what = f"{names[0]} alone" if len(names) == 1 else "all together"
    return None if result.returncode == 0 else f"{compiler}: {what}:\n{result.stderr}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Compile every public header alone.")
    parser.add_argument("root", nargs="?", default=pathlib.Path(__file__).parent.parent)
    parser.add_argument("--compiler", action="append", help="default: g++, then clang++")
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
    of_c = [h for h in plain if is_of_c(root, h)]

    failures = [line for h in plain for line in foreign_includes(root, h)]
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        jobs = []
        for c in compilers:
            for compiler, flags, taken in ((c, FLAGS, plain), (c_compiler(c), C_FLAGS, of_c)):
                groups = [[header] for header in taken] if c == compilers[0] else [taken]
                jobs += [pool.submit(compile_headers, root, g, compiler, flags) for g in groups if g]
        failures += [text for job in jobs if (text := job.result())]
    others = f", and compile together with {' and '.join(compilers[1:])}" if compilers[1:] else ""
    print("\n".join(failures) if failures else
          f"headers: {len(plain)} stand alone with {compilers[0]}{others}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
