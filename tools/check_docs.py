#!/usr/bin/env python3
"""Checks the documentation against the tree it describes.

Usage: tools/check_docs.py [ROOT]
Prints file:line and the rule for each violation; exit status 1 if there is one. Rules:
  errors   docs/errors.md lists every ErrorCode with its number, and no other
  links    a relative link or picture of a .md file leads to a file, and to a heading where it names one; one of
           docs/ to a file in docs/, as the site has no others
  paths    a path in `backticks` below a known top folder exists
  records  docs/adr/README.md lists every record, numbers are used once
"""

import pathlib
import re
import sys

TOP_FOLDERS = ("apps", "bench", "cmake", "docs", "examples", "include", "scripts", "share", "src",
               "testdata", "tests", "tools")
DOCUMENTS = ("*.md", "docs/**/*.md", "testdata/*.md", "bench/**/*.md", "examples/*.md")

ENUMERATOR = re.compile(r"^\s*(k\w+) = (\d+),", re.MULTILINE)
ERROR_ROW = re.compile(r"^\| (\d+) \| `(k\w+)` \| \S.* \| \S.* \|$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.*)$", re.MULTILINE)
PATH = re.compile(r"`((?:%s)/[\w./-]*[\w/])`" % "|".join(TOP_FOLDERS))
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
ADR_FILE = re.compile(r"^(\d{4})-[a-z0-9-]+\.md$")


def line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def without_fences(text: str) -> str:
    """Blank lines in place of fenced code, so that line numbers stay."""
    return FENCE.sub(lambda match: "\n" * match.group(0).count("\n"), text)


def check_errors(root: pathlib.Path) -> list[str]:
    header, page = root / "include/conclave/error.h", root / "docs/errors.md"
    if not header.is_file():
        return []
    enum = header.read_text(encoding="utf-8").split("enum class ErrorCode", 1)[1].split("};", 1)[0]
    codes = {name: number for name, number in ENUMERATOR.findall(enum)}
    rows = {}
    found = []
    text = page.read_text(encoding="utf-8")
    for match in ERROR_ROW.finditer(text):
        number, name = match.groups()
        where = f"docs/errors.md:{line_of(text, match.start())}"
        if name in rows:
            found.append(f"{where}: errors: {name} is listed twice")
        elif codes.get(name) != number:
            found.append(f"{where}: errors: {name} is {codes.get(name, 'not an ErrorCode')}, "
                         f"the page says {number}")
        rows[name] = number
    found += [f"docs/errors.md:1: errors: {name} = {codes[name]} has no row"
              for name in codes if name not in rows]
    return found


def anchors_of(text: str) -> set[str]:
    """What headings are called in addresses, by GitHub and by the site alike."""
    words = (re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in HEADING.findall(without_fences(text)))
    return {word.replace(" ", "-") for word in words}


def check_references(root: pathlib.Path) -> list[str]:
    found = []
    for document in sorted({path for glob in DOCUMENTS for path in root.glob(glob)}):
        name = document.relative_to(root).as_posix()
        text = without_fences(document.read_text(encoding="utf-8"))
        for match in LINK.finditer(text):
            target, _, anchor = match.group(1).partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            where = f"{name}:{line_of(text, match.start())}: links: {match.group(1)}"
            leads_to = (document.parent / target).resolve() if target else document.resolve()
            if leads_to.suffix == ".md" and leads_to.is_file() and anchor:
                if anchor not in anchors_of(leads_to.read_text(encoding="utf-8")):
                    found.append(f"{where} is no heading of that page")
            if not leads_to.exists():
                found.append(f"{where} is not there")
            elif name.startswith("docs/") and not leads_to.is_relative_to(root / "docs"):
                found.append(f"{where} is no page of the site; name its path in `backticks`")
        if name == "CHANGELOG.md":
            continue  # its older entries speak of older trees
        for match in PATH.finditer(text):
            if not (root / match.group(1)).exists():
                found.append(f"{name}:{line_of(text, match.start())}: paths: {match.group(1)} "
                             "is not there")
    return found


def check_records(root: pathlib.Path) -> list[str]:
    folder = root / "docs/adr"
    if not folder.is_dir():
        return []
    index = (folder / "README.md").read_text(encoding="utf-8")
    found, numbers = [], {}
    for path in sorted(folder.glob("*.md")):
        if path.name == "README.md":
            continue
        match = ADR_FILE.match(path.name)
        if not match:
            found.append(f"docs/adr/{path.name}:1: records: a record is named NNNN-title.md")
            continue
        if match.group(1) in numbers:
            found.append(f"docs/adr/{path.name}:1: records: {numbers[match.group(1)]} has the "
                         "same number")
        numbers[match.group(1)] = path.name
        if f"({path.name})" not in index:
            found.append(f"docs/adr/README.md:1: records: {path.name} is not listed")
    return found


def main(argv: list[str]) -> int:
    root = pathlib.Path(argv[1] if len(argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    found = check_errors(root) + check_references(root) + check_records(root)
    print("\n".join(found) if found else "docs: error codes, links, paths and records are right")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
