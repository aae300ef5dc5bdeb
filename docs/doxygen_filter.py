#!/usr/bin/env python3
"""Prints a header with its plain // comments as doxygen comments. Usage: doxygen_filter.py FILE

The comment that starts a file describes the file, one above a declaration describes what follows,
one behind a member describes the member. A blank line ends a comment's claim on what follows.
"""

import re
import sys

WHOLE_LINE = re.compile(r"^(\s*)//(?!/) ?(.*)$")
BEHIND = re.compile(r"^(.*[;,{}>)\w]\s*)//(?!/) ?(.*)$")


def escaped(text: str) -> str:
    """Shapes and ranges hold characters that doxygen would take for commands or HTML."""
    text = re.sub(r"([\\@&#<>])", r"\\\1", text)
    return re.sub(r"`([^`]+)`", r"<tt>\1</tt>", text)


def main(path: str) -> None:
    with open(path, encoding="utf-8") as file:
        lines = file.read().splitlines()
    member_comment = False
    for number, line in enumerate(lines):
        whole = WHOLE_LINE.match(line)
        behind = None if whole else BEHIND.match(line)
        if whole:
            # A line that only continues the comment behind a member belongs to that member.
            mark = "///<" if member_comment and len(whole.group(1)) > 8 else "///"
            if number == 0:
                print("/// \\file")
                print("///")
            print(f"{whole.group(1)}{mark} {escaped(whole.group(2))}")
            continue
        if behind:
            print(f"{behind.group(1)}///< {escaped(behind.group(2))}")
        else:
            # Doxygen 1.9 does not know nested inline namespaces.
            print(line.replace("namespace conclave::inline v0", "namespace conclave"))
        member_comment = behind is not None


if __name__ == "__main__":
    main(sys.argv[1])
