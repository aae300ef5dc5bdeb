#!/usr/bin/env python3
"""Checks that a file includes what it names of the headers that builds precompile, by itself or through
headers of this project.

Usage: tools/check_includes.py [ROOT]
A compiler with precompiled headers misses none, and both compilers of the presets have them: a build
without would fail. What headers of other projects include counts for nothing, so that this is stricter.
Prints file:line and the header for each; exit status 1 if there is one.
"""

import functools
import pathlib
import re
import sys
from typing import NamedTuple

from source_tree import source_files, without_literals

FOLDERS = ("include", "src", "apps", "tests", "bench", "examples", "python/src")


class Names(NamedTuple):
    pattern: str
    others: str = ""  # headers that promise the names too


STRINGS = "filesystem iostream sstream stdexcept"
CONTAINERS = "array map optional set span string string_view unordered_map unordered_set vector"

# What each precompiled header is included for.
NAMES: dict[str, Names] = {
    "algorithm": Names(
        r"std::(?:ranges::)?(?:adjacent_find|all_of|any_of|binary_search|clamp|copy_if|copy_n|count|"
        r"count_if|fill|fill_n|find|find_if|find_if_not|generate|is_sorted|lower_bound|max_element|"
        r"min_element|minmax_element|none_of|nth_element|partition|replace|reverse|rotate|sort|"
        r"stable_sort|transform|unique|upper_bound)\b"),
    "array": Names(r"std::(?:array|to_array)\b"),
    "atomic": Names(r"std::(?:atomic|memory_order)\w*", "memory"),
    "charconv": Names(r"std::(?:from_chars|to_chars)\b"),
    "chrono": Names(r"std::chrono\b", "condition_variable mutex thread"),
    "cmath": Names(
        r"std::(?:ceil|copysign|erf|exp|exp2|floor|fma|frexp|isfinite|isinf|isnan|ldexp|log|log2|lround|"
        r"nearbyint|nextafter|pow|signbit|sqrt|tanh)f?\b"),
    "cstdint": Names(r"\bu?int(?:8|16|32|64)_t\b", "stdint.h"),
    "cstring": Names(r"std::(?:memchr|memcmp|memcpy|memmove|memset|strcmp|strerror|strlen)\b"),
    "filesystem": Names(r"std::filesystem\b"),
    "fmt/format.h": Names(r"\bfmt::", "fmt/core.h"),
    "functional": Names(
        r"std::(?:function|greater|hash|invoke|less|plus|ref|reference_wrapper)\b",
        f"algorithm memory queue {CONTAINERS}"),
    "gtest/gtest.h": Names(r"\b(?:ASSERT_EQ|EXPECT_EQ|EXPECT_TRUE|SCOPED_TRACE|TEST|TEST_F|TEST_P)\("),
    "map": Names(r"std::(?:multi)?map\b"),
    "memory": Names(r"std::(?:make_shared|make_unique|shared_ptr|unique_ptr|weak_ptr)\b"),
    "nanobind/nanobind.h": Names(r"\b(?:nanobind|nb)::", "nanobind/ndarray.h"),
    "nlohmann/json.hpp": Names(r"\bnlohmann::", "nlohmann/json_fwd.hpp"),
    "numeric": Names(r"std::(?:accumulate|gcd|inner_product|iota|lcm|partial_sum|reduce)\b"),
    "optional": Names(r"std::(?:nullopt|optional)\b"),
    "random": Names(r"std::(?:minstd_rand|mt19937|mt19937_64|\w+_distribution)\b"),
    "set": Names(r"std::(?:multi)?set\b"),
    "span": Names(r"std::(?:as_bytes|as_writable_bytes|span)\b"),
    "string": Names(r"std::(?:stod|stoi|stol|string|to_string)\b", STRINGS),
    "string_view": Names(r"std::string_view\b", f"charconv string {STRINGS}"),
    "thread": Names(r"std::(?:this_thread|thread)\b"),
    "unordered_map": Names(r"std::unordered_(?:multi)?map\b"),
    "utility": Names(r"std::(?:as_const|exchange|in_place|pair|swap)\b",
                     f"algorithm functional memory tuple {CONTAINERS}"),
    "vector": Names(r"std::vector\b"),
}

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^">]+)[>"]', re.MULTILINE)


class Tree:
    """The includes of a source tree."""

    def __init__(self, root: pathlib.Path):
        self.root = root

    @functools.cache
    def text_of(self, path: pathlib.Path) -> str:
        return path.read_text(encoding="utf-8")

    def resolve(self, path: pathlib.Path, name: str) -> pathlib.Path | None:
        here = path.relative_to(self.root).parts
        folders = ("tests", "include", "src") if here[0] == "tests" else ("include", "src", "tests")
        for folder in (path.parent, *(self.root / folder for folder in folders),
                       self.root / here[0], self.root / here[0] / here[1], self.root / "apps/conclave"):
            if (folder / name).is_file():
                return (folder / name).resolve()
        return None

    @functools.cache
    def own_includes(self, path: pathlib.Path) -> tuple[frozenset[str], tuple[pathlib.Path, ...]]:
        standard, files = set(), []
        for kind, name in INCLUDE.findall(self.text_of(path)):
            if kind == "<":
                standard.add(name)
            if (file := self.resolve(path, name)) is not None:
                files.append(file)
        return frozenset(standard), tuple(files)

    def standard_headers(self, path: pathlib.Path) -> set[str]:
        """What the file includes by itself or through files of the tree."""
        seen, waiting, found = set(), [path], set()
        while waiting:
            file = waiting.pop()
            if file in seen:
                continue
            seen.add(file)
            standard, files = self.own_includes(file)
            found |= standard
            waiting += files
        return found


PRECOMPILED = re.compile(r"(?:conclave_precompile\(|set\(CONCLAVE_STANDARD_HEADERS)([^)]*)\)")


def headers_without_names(root: pathlib.Path) -> list[str]:
    """Headers that a build precompiles and that the table does not know."""
    files = [*root.glob("CMakeLists.txt"), *root.glob("cmake/*.cmake")]
    for folder in ("src", "apps", "tests", "bench", "python"):
        files += root.glob(f"{folder}/**/CMakeLists.txt")
    headers = set()
    for file in files:
        code = re.sub(r"#[^\n]*", "", file.read_text(encoding="utf-8"))
        for arguments in PRECOMPILED.findall(code):
            headers |= set(re.findall(r"<([\w/.]+)>", arguments))
    return sorted(headers - NAMES.keys())


def missing_headers(root: pathlib.Path) -> list[tuple[str, int, str]]:
    """File, line and header of each name whose header is out of reach."""
    tree = Tree(root)
    found = []
    for path in source_files(tree.root, *FOLDERS):
        code = without_literals(tree.text_of(path))
        reached = tree.standard_headers(path)
        for header, names in NAMES.items():
            if header in reached or reached & set(names.others.split()):
                continue
            if (name := re.search(names.pattern, code)) is not None:
                line = code.count("\n", 0, name.start()) + 1
                found.append((path.relative_to(tree.root).as_posix(), line, header))
    return found


def main(argv: list[str]) -> int:
    root = pathlib.Path(argv[1] if len(argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    found = [f"{name}:{line}: include <{header}>" for name, line, header in missing_headers(root)]
    found += [f"tools/check_includes.py: <{header}> is precompiled, and NAMES does not know what for"
              for header in headers_without_names(root)]
    print("\n".join(found) if found else f"includes: names of {len(NAMES)} headers are in reach")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
