"""Sums up pytest's reports, and counts the tests of the Python package that need torch.

    scripts/torch_tests.py REPORT.xml ... [--require]
"""

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
    roots = [xml.parse(name).getroot() for name in argv[1:] if not name.startswith("--")]
    cases = [case for root in roots for case in root.iter("testcase")]
    status = check_torch(cases, "--require" in argv)
    times = [float(suite.get("time", 0)) for root in roots for suite in root.iter("testsuite")]
    print(summary(cases, max(times, default=0)))
    return status


def summary(cases: list[xml.Element], seconds: float) -> str:
    """In the words of pytest's own last line."""
    failed = sum(c.find("failure") is not None or c.find("error") is not None for c in cases)
    skipped = sum(c.find("skipped") is not None for c in cases)
    passed = len(cases) - failed - skipped
    first = f"{failed} failed, " if failed else ""
    return f"{first}{passed} passed, {skipped} skipped in {seconds:.1f}s"


def check_torch(cases: list[xml.Element], required: bool) -> int:
    ran = [c for c in cases if needs_torch(c) and c.find("skipped") is None]
    skipped = [c for c in cases if (s := c.find("skipped")) is not None
               and MISSING.search(s.get("message", "") + " " + (s.text or ""))]
    print(f"torch: {len(ran)} of {len(cases)} tests ran in files that use it, "
          f"{len(skipped)} skipped for want of torch or transformers")
    if not required or (ran and not skipped):
        return 0
    for case in skipped:
        print(f"  {case.get('classname')}::{case.get('name')}: {case.find('skipped').get('message')}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
