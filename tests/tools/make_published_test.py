#!/usr/bin/env python3
"""Remakes the table of published configurations and compares it with the committed one.

Exits with 77, which ctest reports as skipped, where the pinned transformers is not installed.
"""

import importlib.metadata
import pathlib
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SKIPPED = 77


def pinned() -> str:
    for line in (ROOT / "tools/requirements-checkpoints.txt").read_text().splitlines():
        if line.startswith("transformers=="):
            return line.partition("==")[2]
    raise SystemExit("tools/requirements-checkpoints.txt pins no transformers")


def installed() -> str:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return "none"


class PublishedTest(unittest.TestCase):
    def test_committed_table_is_what_transformers_says(self):
        command = [sys.executable, str(ROOT / "tools/make_published.py"), "--check"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)


if __name__ == "__main__":
    if installed() != pinned():
        print(f"skipped: transformers is {installed()}, wanted {pinned()}")
        sys.exit(SKIPPED)
    unittest.main()
