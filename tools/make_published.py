#!/usr/bin/env python3
"""Makes testdata/published.json: layers as transformers' configuration classes describe them.

    python3 tools/make_published.py          write the table
    python3 tools/make_published.py --check  compare it with the committed one

Each family has a configuration without its optional keys and one with none of them at its default. What
they mean is read by transformers' own classes; epsilons and types of products, which stand in its modeling
code, are looked up there. Families that it does not have are written by hand, with the source named. The
table is made with the versions in tools/requirements-checkpoints.txt.
"""

import argparse
import json
import pathlib
import sys

import transformers

from published import by_hand, sigmoid, softmax
from published.row import record

TABLE = pathlib.Path(__file__).resolve().parent.parent / "testdata" / "published.json"


def table() -> str:
    """JSON with a case a line."""
    text = [f'{{"transformers": "{transformers.__version__}",\n"families": [']
    families = [record(row) for row in sigmoid.rows() + softmax.rows() + by_hand.rows()]
    for family in families:
        cases = family.pop("cases")
        head = json.dumps(family)[:-1] + ', "cases": [\n '
        end = "]}" + ("," if family is not families[-1] else "")
        text.append(head + ",\n ".join(json.dumps(case) for case in cases) + end)
    return "\n".join([*text, "]}"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the committed table")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if not options.check:
        TABLE.write_text(table())
        return 0
    same = TABLE.read_text() == table()
    print("as committed" if same else "differs from the committed table")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
