#!/usr/bin/env python3
"""Makes the golden checkpoints of testdata/models/ with transformers; tools/goldens/README.md explains.

    python3 tools/make_goldens.py                     remake all
    python3 tools/make_goldens.py --name deepseek_v3  remake one (may be given several times)
    python3 tools/make_goldens.py --check dots1       remake it aside and compare with the committed one
    python3 tools/make_goldens.py --check all         the same for all
    python3 tools/make_goldens.py --list              names, one per line
    python3 tools/make_goldens.py --models-md         write docs/models.md from the families' facts
"""

import argparse
import importlib
import pathlib
import pkgutil
import sys
import tempfile

import torch
import transformers

from goldens import build, families, models_md
from goldens.family import Family

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODELS = ROOT / "testdata" / "models"


def all_families() -> dict[str, Family]:
    found = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(families.__path__)):
        for family in importlib.import_module(f"goldens.families.{module}").FAMILIES:
            if family.name in found:
                raise SystemExit(f"two families are named {family.name}")
            found[family.name] = family
    return found


def check(family: Family) -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        remade = pathlib.Path(scratch)
        build.make(family, remade)
        return build.compare(family, MODELS / family.name, remade)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", action="append", help="remake only this one")
    parser.add_argument("--check", action="append", metavar="NAME", help="remake aside and compare")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--models-md", action="store_true", help="write docs/models.md")
    options = parser.parse_args()

    known = all_families()
    if options.check == ["all"]:
        options.check = list(known)
    unknown = set((options.name or []) + (options.check or [])) - known.keys()
    if unknown:
        raise SystemExit(f"no such family: {', '.join(sorted(unknown))}")
    if options.list:
        print("\n".join(known))
        return 0
    if options.models_md:
        (ROOT / "docs" / "models.md").write_text(models_md.page(known.values(), MODELS))
        return 0

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if options.check:
        problems = [problem for name in options.check for problem in check(known[name])]
        print("\n".join(problems) if problems else "as committed")
        return 1 if problems else 0
    for name in options.name or known:
        build.make(known[name], MODELS / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
