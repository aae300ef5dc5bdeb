"""docs/vllm-audit.md and docs/public-interfaces.md: every row has a state, and every test that a
row names is there."""

from __future__ import annotations

import functools
import pathlib
import re

import pytest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
PAGES = {"vllm-audit": 110, "public-interfaces": 130}
STATES = ("done", "different", "refused", "missing")
QUOTED = re.compile(r"`([a-z0-9_]+(?:: [a-z0-9_]+)?)`")
CASE = re.compile(r"`([A-Z]\w*\.[A-Z]\w+)`")


def rows(page):
    path = ROOT / "docs" / f"{page}.md"
    if not path.exists():  # an installed package has no pages
        return []
    cells = (
        [cell.strip() for cell in line.strip("|\n").split(" | ")]
        for line in path.read_text().splitlines()
        if line.startswith("| ")
    )
    return [row for row in cells if row[0] != "item"]


@functools.cache
def names_in(file):
    text = (HERE / f"test_{file}.py").read_text()
    return set(re.findall(r"^def test_([a-z0-9_]+)", text, re.MULTILINE))


@functools.cache
def cases():
    """Suite.Case of every test of C++."""
    found = set()
    for path in (ROOT / "tests").rglob("*.cc"):
        pairs = re.findall(r"^(?:TYPED_)?TEST\w*\((\w+),\s*(\w+)\)", path.read_text(), re.MULTILINE)
        found.update(f"{suite}.{case}" for suite, case in pairs)
    return found


def named_tests(text):
    """(file, test) of `file: test`, and of a `test` behind it, which has several words."""
    found, file = [], None
    for word in QUOTED.findall(text):
        head, colon, tail = word.partition(": ")
        if colon:
            file = head
            found.append((file, tail))
        elif file is not None and word.count("_") >= 3:
            found.append((file, word))
    return found


@pytest.mark.parametrize(
    "row",
    [row for page in PAGES for row in rows(page)],
    ids=lambda row: re.sub(r"[^a-z0-9_]+", "-", row[0].lower()),
)
def test_a_row_is_true(row):
    assert len(row) == 3, row
    item, state, text = row
    assert item and text and state in STATES
    named, of_cpp = named_tests(text), CASE.findall(text)
    assert named or of_cpp or state != "done", "a row that is done names its test"
    assert state != "missing" or "needs" in text or ";" in text, "what is missing says why"
    for file, test in named:
        assert test in names_in(file), f"{file}: {test}"
    for case in of_cpp:
        assert case in cases(), case


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_its_interfaces(page):
    found = rows(page)
    assert not found or len(found) > PAGES[page]
