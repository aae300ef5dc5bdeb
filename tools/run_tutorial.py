#!/usr/bin/env python3
"""Runs what a tutorial of docs/tutorials shows, as its reader would.

    tools/run_tutorial.py docs/tutorials/convert-and-check.md

Fenced blocks of a page are taken in order, in an empty folder that holds a link to testdata:
  a block with title="NAME"  is saved as the file NAME
  ```sh                      runs; it must end well
  ```text                    is in the output of the commands above it: line by line in this order, spaces counted as
                             one, `...` for anything
A block titled "not run by tests" is left out. Any other block is an error, so that nothing is shown that does not run.
Programs are found in PATH (`conclave`, `python`); what is written there is the caller's.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]*)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LEFT_OUT = "not run by tests"


class TutorialError(Exception):
    """A page that does not do what it shows."""


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    body: str
    line: int  # of the page, where the fence opens


def blocks_of(page: str) -> list[Block]:
    found = [Block(match[1], match[2] or "", match[3], page.count("\n", 0, match.start()) + 1) for match in FENCE.finditer(page)]
    # A fence in a form that the expression does not know would not be run, and nobody would see it.
    if 2 * len(found) != len(re.findall(r"^ *(?:```|~~~)", page, re.MULTILINE)):
        raise TutorialError("a fence is indented, not closed, or has other attributes than a title")
    return found


def as_expression(shown: str) -> str:
    words = [r"[ \t]+".join(re.escape(word) for word in part.split()) for part in shown.split("...")]
    return r".*?".join(words)


def check_output(block: Block, output: str) -> None:
    rest = output
    for shown in filter(None, (line.strip() for line in block.body.splitlines())):
        match = re.search(rf"^\s*{as_expression(shown)}\s*$", rest, re.MULTILINE)
        if match is None:
            raise TutorialError(f"line {block.line}: the output has no line {shown!r} there:\n{output}")
        rest = rest[match.end() :]


def run_commands(block: Block, folder: pathlib.Path, timeout: float) -> str:
    with tempfile.TemporaryFile("w+") as log:  # a server in the background may hold the output open
        process = subprocess.Popen(["bash", "-euo", "pipefail", "-c", block.body], cwd=folder, stdin=subprocess.DEVNULL,
                                   stdout=log, stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = "no"
        finally:
            end_group(process)
        log.seek(0)
        output = log.read()
    if status != 0:
        raise TutorialError(f"line {block.line}: exit status {status}:\n{block.body}\n{output}")
    return output


def end_group(process: subprocess.Popen) -> None:
    """Nothing that a block started outlives it."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        pass
    process.wait()


def run_page(page: str, folder: pathlib.Path, timeout: float = 240) -> list[str]:
    """Returns the outputs of the commands. Raises TutorialError for the first block that is wrong."""
    if not (folder / "testdata").exists():
        (folder / "testdata").symlink_to(ROOT / "testdata")
    outputs: list[str] = []
    for block in blocks_of(page):
        if block.title == LEFT_OUT:
            continue
        if block.title:
            file = folder / block.title
            if not file.resolve().is_relative_to(folder.resolve()):
                raise TutorialError(f"line {block.line}: {block.title} lies elsewhere")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.body, encoding="utf-8")
        elif block.language == "sh":
            outputs.append(run_commands(block, folder, timeout))
        elif block.language == "text":
            if not outputs:
                raise TutorialError(f"line {block.line}: an output without commands")
            check_output(block, outputs[-1])
        else:
            raise TutorialError(f"line {block.line}: a block of {block.language!r} is neither a file nor run")
    if not outputs:
        raise TutorialError("the page runs nothing")
    return outputs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=pathlib.Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        try:
            outputs = run_page(options.page.read_text(encoding="utf-8"), pathlib.Path(name))
        except TutorialError as error:
            print(f"{options.page}: {error}", file=sys.stderr)
            return 1
    print(f"{options.page}: {len(outputs)} blocks of commands ran, with the output that the page shows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
