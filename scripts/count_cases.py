"""Counts the cases in a report of ctest, most of whose entries are parts of a GoogleTest program.

    scripts/count_cases.py REPORT.xml

An entry of anything else is one case. Names those that failed, since ctest names their program.
"""

import re
import sys
import xml.etree.ElementTree as xml

# The line that ends a case, and not the list of failures behind the last one.
END = re.compile(
    r"\[(       OK|  FAILED |  SKIPPED) \] (\S+?)(?:, where .*)? \(\d+ ms\)$", re.MULTILINE
)
BEGIN = re.compile(r"\[ RUN      \] (\S+)$", re.MULTILINE)
# The other reasons why ctest did not start an entry are failures.
LACKING = ("SKIP_RETURN_CODE", "SKIP_REGULAR_EXPRESSION")


def outcomes(entry: xml.Element) -> dict[str, str]:
    """By the name of each case: passed, skipped or failed; the worst of those of several ranks."""
    output = entry.findtext("system-out") or ""
    words = {"OK": "passed", "SKIPPED": "skipped", "FAILED": "failed"}
    cases: dict[str, str] = {}
    for end, name in END.findall(output):
        if cases.get(name) != "failed":
            cases[name] = words[end.strip()]
    whole = outcome_of(entry)
    if whole == "failed" and "failed" not in cases.values():
        # It was ended in the midst of a case, or by what is no case.
        cases |= {name: whole for name in BEGIN.findall(output) if name not in cases}
        if "failed" not in cases.values():
            cases[entry.get("name", "")] = whole
    elif not cases and "[==========] Running 0 tests" not in output:
        cases[entry.get("name", "")] = whole
    return cases


def outcome_of(entry: xml.Element) -> str:
    status = entry.get("status")
    if status == "run":
        return "passed"
    reason = skipped.get("message", "") if (skipped := entry.find("skipped")) is not None else ""
    return "skipped" if status == "disabled" or reason.startswith(LACKING) else "failed"


def main(argv: list[str]) -> int:
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for entry in xml.parse(argv[1]).getroot().iter("testcase"):
        for name, outcome in outcomes(entry).items():
            counts[outcome] += 1
            if outcome == "failed":
                whole = entry.get("name")
                print(f"failed: {name}" + (f" in {whole}" if whole != name else ""))
    print("{passed} cases passed, {failed} failed, {skipped} skipped".format(**counts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
