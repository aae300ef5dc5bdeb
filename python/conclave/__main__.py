"""`python -m conclave`: the command-line tool."""

from __future__ import annotations

import sys

from conclave import _conclave


def main() -> int:
    """Runs the tool with the arguments of this process. Returns its exit status."""
    return _conclave.run_tool(["conclave", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
