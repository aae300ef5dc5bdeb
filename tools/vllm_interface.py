#!/usr/bin/env python3
"""Writes down which parameters vLLM's public callables have: names, order, kinds and defaults.

Usage: tools/vllm_interface.py NAME=FILE... [--skip FUNCTION]... > table.json

FILE is a source file of vLLM, or text that was copied from one and lost its indentation or its line
ends; NAME is what the table calls it. Only signatures are written, no code. In text without
indentation a function inside a function looks like any other: --skip leaves it out.
python/tests/test_vllm_interface.py compares the table with the package.
"""

from __future__ import annotations

import argparse
import ast
import json
import pathlib
import re
import sys
from collections.abc import Iterator

DOCSTRING = re.compile(r'"""[\s\S]*?"""')
ANNOTATION = r'(?:"[^"]*"|[\w.]+(?:\[(?:[^\[\]]|\[[^\[\]]*\])*\])?)'
FIELD = re.compile(rf"(\w+)\s*:\s*({ANNOTATION}(?:\s*\|\s*{ANNOTATION})*)(?:\s*=\s*([\w.]+))?")
HEAD = re.compile(
    r"(?:^|(?<=\s))(?:class\s+(?P<class>[A-Z]\w*)\s*(?:\([^)]*\))?\s*:"
    r"|def\s+(?P<function>\w+)\s*\(|@(?P<decorator>[\w.]+))"
)
# In text without line ends a comment reaches to the next parameter or the end of all.
FLAT_COMMENT = re.compile(r"#.*?(?=\s\w+\s*(?::\s|=\S)|\s\*|\s*\)\s*(?:->|:))")


def parameters(arguments: ast.arguments, *, bound: bool) -> list[str]:
    """Names with defaults, as they are written: "a", "b=None", "*", "c=1", "**more"."""
    plain = [*arguments.posonlyargs, *arguments.args]
    gap = len(plain) - len(arguments.defaults)
    found = [
        parameter.arg if i < gap else f"{parameter.arg}={ast.unparse(arguments.defaults[i - gap])}"
        for i, parameter in enumerate(plain)
    ]
    if arguments.posonlyargs:
        found.insert(len(arguments.posonlyargs), "/")
    if bound:
        found = found[1:]
    if arguments.vararg or arguments.kwonlyargs:
        found.append(f"*{arguments.vararg.arg if arguments.vararg else ''}")
    for parameter, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(parameter.arg + ("" if default is None else f"={ast.unparse(default)}"))
    if arguments.kwarg:
        found.append(f"**{arguments.kwarg.arg}")
    return found


class Table:
    """Public functions, and classes with their methods and properties."""

    def __init__(self) -> None:
        self.functions: dict[str, list[str]] = {}
        self.classes: dict[str, dict] = {}

    def add_class(self, name: str, fields: list[str] | None) -> None:
        held = self.classes.setdefault(name, {"methods": {}, "properties": []})
        if fields:
            held["methods"]["__init__"] = fields

    def add(self, owner: str | None, name: str, decorators: list[str], text: ast.arguments) -> None:
        if name.startswith("_") and name != "__init__":
            return
        if owner is None:
            self.functions[name] = parameters(text, bound=False)
            return
        held = self.classes[owner]
        if "property" in decorators:
            if name not in held["properties"]:
                held["properties"].append(name)
            return
        held["methods"][name] = parameters(text, bound="staticmethod" not in decorators)

    def as_dict(self) -> dict:
        kept = {name: held for name, held in self.classes.items() if not name.startswith("_")}
        return {"functions": self.functions, "classes": kept}


def read_source(tree: ast.Module) -> Table:
    """Of a file of Python."""
    table = Table()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            table.add(None, node.name, [], node.args)
        elif isinstance(node, ast.ClassDef):
            read_class(table, node)
    return table


def read_class(table: Table, node: ast.ClassDef) -> None:
    decorators = names_of(node.decorator_list)
    fields = [
        f"{item.target.id}" + (f"={ast.unparse(item.value)}" if item.value else "")
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]
    table.add_class(node.name, fields if "dataclass" in decorators else None)
    for item in node.body:
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
            table.add(node.name, item.name, names_of(item.decorator_list), item.args)


def names_of(decorators: list[ast.expr]) -> list[str]:
    return [ast.unparse(item).partition("(")[0] for item in decorators]


def read_text(text: str, skipped: list[str]) -> Table:
    """Of copied text: a method is a function whose first parameter is self or cls."""
    text = DOCSTRING.sub(" ", text)
    if text.count("\n") > 20:
        text = re.sub(r"#[^\n]*", "", text)
    table, owners, decorators = Table(), [], []
    for head in HEAD.finditer(text):
        if head["decorator"]:
            decorators.append(head["decorator"])
            continue
        if head["class"]:
            fields = fields_of(text, head.end()) if "dataclass" in decorators else None
            table.add_class(head["class"], fields)
            owners.append(head["class"])
        elif head["function"] not in skipped:
            arguments = arguments_of(text, head.end())
            is_method = "staticmethod" in decorators or first_name(arguments) in ("self", "cls")
            if is_method and head["function"] == "__init__" and has_init(table, owners):
                owners.pop()  # that of the class around
            owner = owners[-1] if owners and is_method else None
            table.add(owner, head["function"], decorators, arguments)
        decorators = []
    return table


def has_init(table: Table, owners: list[str]) -> bool:
    return len(owners) > 1 and "__init__" in table.classes[owners[-1]]["methods"]


def first_name(arguments: ast.arguments) -> str:
    return arguments.args[0].arg if arguments.args else ""


def fields_of(text: str, start: int) -> list[str]:
    """Of a dataclass: all before its first method."""
    following = HEAD.search(text, start)
    body = text[start : following.start() if following else len(text)]
    return [m[1] + (f"={m[3]}" if m[3] else "") for m in FIELD.finditer(body)]


def arguments_of(text: str, start: int) -> ast.arguments:
    """Of a function whose parenthesis is open at start."""
    for end in closing(text, start):
        inside = FLAT_COMMENT.sub("", text[start:end] + " ) ->").removesuffix(" ) ->")
        try:
            tree = ast.parse(f"def f({inside}): pass".replace("\n", " "))
        except SyntaxError:
            continue
        return tree.body[0].args  # type: ignore[attr-defined]
    raise SystemExit(f"no signature at: {text[start : start + 80]!r}")


def closing(text: str, start: int) -> Iterator[int]:
    """Ends of lists of parameters that may begin at start, the nearest first."""
    for found in re.finditer(r"\)\s*(?:->|:)", text[start : start + 6000]):
        yield start + found.start()


def read(text: str, skipped: list[str]) -> Table:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return read_text(text, skipped)
    # One line that begins with a comment is a comment to Python.
    return read_source(tree) if tree.body else read_text(text, skipped)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--skip", action="append", default=[], metavar="FUNCTION")
    given = parser.parse_args(argv)
    tables = {}
    for source in given.sources:
        name, _, path = source.partition("=")
        text = pathlib.Path(path).read_text(encoding="utf-8")
        tables[name] = read(text, given.skip).as_dict()
    sys.stdout.write(as_text(tables))
    return 0


def as_text(tables: dict) -> str:
    """JSON with the parameters of a callable in one line."""
    text = json.dumps(tables, indent=1)
    return re.sub(r"\[\s+([^\[\]]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text) + "\n"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
