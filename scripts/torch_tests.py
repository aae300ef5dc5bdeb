"""Counts the tests of the Python package that need torch, by the report of pytest."""

import pathlib
import re
import sys
import xml.etree.ElementTree as xml

MISSING = re.compile(r"(torch|transformers)\b.*(is not installed|could not|No module)|"
                     r"could not import '(torch|transformers)|no backend for transformers")
TESTS = pathlib.Path(__file__).resolve().parent.parent / "python" / "tests"


def needs_torch(case: xml.Element) -> bool:
    """By the file that the case is in: most of these fetch torch by a fixture."""
    for name in case.get("classname", "").split("."):
        path = TESTS / f"{name}.py"
        if path.is_file():
            return "torch" in path.read_text(encoding="utf-8")
    return False


def main(argv: list[str]) -> int:
    cases = list(xml.parse(argv[1]).getroot().iter("testcase"))
    ran = [c for c in cases if needs_torch(c) and c.find("skipped") is None]
    skipped = [c for c in cases if (s := c.find("skipped")) is not None
               and MISSING.search(s.get("message", "") + " " + (s.text or ""))]
    print(f"torch: {len(ran)} of {len(cases)} tests ran in files that use it, "
          f"{len(skipped)} skipped for want of torch or transformers")
    if "--require" not in argv or (ran and not skipped):
        return 0
    for case in skipped:
        print(f"  {case.get('classname')}::{case.get('name')}: {case.find('skipped').get('message')}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
