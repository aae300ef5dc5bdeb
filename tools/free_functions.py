"""Finds the free functions that a C++ file declares or defines, from its text."""

import re
from typing import NamedTuple

from source_tree import without_literals


class Function(NamedTuple):
    name: str
    parameters: int
    line: int
    is_defined: bool


_PREPROCESSOR = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.MULTILINE | re.DOTALL)
_NAMESPACE = re.compile(r"^(?:inline\s+)?namespace\b|^extern\s*\"\"$")
# What a function begins with, but its type.
_ATTRIBUTES = re.compile(r"\[\[.*?\]\]|\b(?:alignas|__attribute__|__launch_bounds__|noexcept|requires"
                         r"|decltype|explicit)\s*\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", re.DOTALL)
_NO_FUNCTION = re.compile(r"^(?:using|typedef|static_assert|friend|class|struct|enum|union|concept)\b")
_NAME = re.compile(r"(?:^|[\s*&>:])(operator\s*[^\s(\w]+|~?\w+)\s*(?:<[^()]*>)?\s*\($", re.DOTALL)


def _close(text: str, at: int) -> int:
    """The place behind the bracket that closes the one at `at`."""
    opened = text[at]
    closed = {"(": ")", "{": "}"}[opened]
    depth = 0
    for match in re.compile(f"[{re.escape(opened + closed)}]").finditer(text, at):
        depth += 1 if match.group() == opened else -1
        if depth == 0:
            return match.end()
    return len(text)


def _without_template(head: str) -> str:
    """The head behind its `template <...>` and the constraint that may follow."""
    while match := re.match(r"template\s*<", head):
        depth, at = 1, match.end()
        while at < len(head) and depth:
            depth += {"<": 1, ">": -1}.get(head[at], 0)
            at += 1
        head = head[at:].lstrip()
    return head


def _count_parameters(text: str) -> int:
    depth, commas = 0, 0
    for letter in text:
        depth += (letter in "(<{[") - (letter in ")>}]")
        commas += letter == "," and depth == 0
    text = text.strip()
    return 0 if text in ("", "void") else commas + 1


def _function(head: str, line: int, is_defined: bool) -> Function | None:
    head = _without_template(head.strip())
    head = _ATTRIBUTES.sub(" ", head).strip()
    begin = head.find("(")
    if begin < 0 or _NO_FUNCTION.match(head) or "=" in head[:begin].replace("operator=", ""):
        return None
    name = _NAME.search(head[:begin + 1])
    # A member defined outside its class, or a macro, which has no type before its name.
    if not name or head[:name.start(1)].endswith("::") or not head[:name.start(1)].strip():
        return None
    end = _close(head, begin)
    return Function(name.group(1), _count_parameters(head[begin + 1:end - 1]), line, is_defined)


def free_functions(text: str) -> list[Function]:
    """Those at the level of namespaces. A statement there begins behind the last one, and ends with a
    semicolon or a body."""
    text = _PREPROCESSOR.sub(lambda match: re.sub(r"[^\n]", " ", match.group(0)),
                             without_literals(text))
    found = []
    begin = at = 0
    while at < len(text):
        letter = text[at]
        if letter == "(":
            at = _close(text, at)
            continue
        if letter not in ";{}":
            at += 1
            continue
        head = text[begin:at]
        if letter == "{" and not _NAMESPACE.match(head.strip()):
            at = _close(text, at)
        else:
            at += 1
        line = text.count("\n", 0, begin + len(head) - len(head.lstrip())) + 1
        if function := _function(head, line, letter == "{"):
            found.append(function)
        begin = at
    return found
