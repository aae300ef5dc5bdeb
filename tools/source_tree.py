"""What the checks in this folder share: finding source files and blanking comments."""

import functools
import pathlib
import re

SOURCE_SUFFIXES = {".h", ".cc", ".cuh", ".cu"}

_TOKEN = re.compile(
    r"""
    (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<string>R"(?P<tag>[^()\s\\]{0,16})\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+')
    """,
    re.VERBOSE | re.DOTALL,
)


def source_files(root: pathlib.Path, *folders: str) -> list[pathlib.Path]:
    """C++ and CUDA files below the given folders, in a stable order."""
    found = []
    for folder in folders:
        found += [p for p in (root / folder).rglob("*") if p.suffix in SOURCE_SUFFIXES]
    return sorted(found)


# Each rule asks for the same texts again.
@functools.cache
def without_comments(text: str) -> str:
    """The text with comments blanked; line numbers and string literals stay as they are."""

    def blank(match: re.Match) -> str:
        if match.group("comment") is None:
            return match.group(0)
        return re.sub(r"[^\n]", " ", match.group(0))

    return _TOKEN.sub(blank, text)


@functools.cache
def without_literals(text: str) -> str:
    """The text with comments and the contents of string literals blanked."""

    def blank(match: re.Match) -> str:
        if match.group("comment") is None:
            return '""' + "\n" * match.group(0).count("\n")
        return re.sub(r"[^\n]", " ", match.group(0))

    return _TOKEN.sub(blank, text)
