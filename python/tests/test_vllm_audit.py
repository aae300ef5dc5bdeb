"""docs/vllm-audit.md: every row has a state, and every test that a row names is there."""

from __future__ import annotations

import pathlib
import re

import pytest

HERE = pathlib.Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "vllm-audit.md"
STATES = ("done", "different", "refused", "missing")
QUOTED = re.compile(r"`([a-z0-9_]+(?:: [a-z0-9_]+)?)`")


def rows():
    if not PAGE.exists():  # an installed package has no pages
        return []
    cells = (
        [cell.strip() for cell in line.strip("|\n").split(" | ")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ")
    )
    return [row for row in cells if row[0] != "item"]


def names_in(file):
    text = (HERE / f"test_{file}.py").read_text()
    return set(re.findall(r"^def test_([a-z0-9_]+)", text, re.MULTILINE))


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


@pytest.mark.parametrize("row", rows(), ids=lambda row: re.sub(r"[^a-z0-9_]+", "-", row[0].lower()))
def test_a_row_is_true(row):
    assert len(row) == 3, row
    item, state, text = row
    assert item and text and state in STATES
    named = named_tests(text)
    assert named or state != "done", "a row that is done names its test"
    for file, test in named:
        assert test in names_in(file), f"{file}: {test}"


def test_the_page_has_the_three_files():
    if PAGE.exists():
        assert len(rows()) > 110
