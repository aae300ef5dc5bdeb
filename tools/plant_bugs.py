#!/usr/bin/env python3
"""Plants known faults, one at a time, and measures whether and when something notices.

    python3 tools/plant_bugs.py fuzz [--seconds 600]
    python3 tools/plant_bugs.py library [--build build/release] [--jobs 2] [--minutes 60]
                                        [--cuda | --python] [--area routing]... [--only TEXT]...
                                        [--filters FILE] [--out build/planted/report]
    python3 tools/plant_bugs.py list

`fuzz` plants faults in the parsers and runs the harnesses in a copy of the tree. `library` plants
the faults of tools/planting/faults in the library, the tool and (--python) the package, and runs the
tests: those of the fault's module first. The sources stay as they are.

With --filters, only the faults of that file are planted, and each meets the cases that the file names
for it; where these pass, all tests of the fault's module come next. Only what is chosen is measured
without a fault, so that a whole campaign takes minutes:

    python3 tools/plant_bugs.py library --build build/release --jobs 16 --minutes 7 \\
                                        --filters tools/planting/cpu_cases.json
    python3 tools/plant_bugs.py library --python --jobs 16 --minutes 7 \\
                                        --filters tools/planting/python_cases.json
    python3 tools/plant_bugs.py library --build build/release --cuda --minutes 7 \\
                                        --filters tools/planting/cuda_cases.json

A row of the file is {"key": "area/name", "program": "tests/layer/layer_test", "filter": "Suite.Case"},
and may have "under": ["compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "9"]. Of a Python
fault the program is the files for pytest, and the filter what its -k takes, or empty; the package is
that of build/release/python.
Without --build a build folder of its own is made, with -O1; --prefix names folders with the packages
where the machine has none. A fault that nothing notices is an exit status of 1.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from planting import fuzz, library
from planting.faults import problems, read_catalog


def list_catalog() -> int:
    faults = read_catalog()
    for fault in faults:
        print(f"{fault.area:14} {fault.kind:20} {fault.file:48} {fault.name}")
    wrong = problems(faults)
    print("\n".join([*wrong, f"{len(faults)} faults, {sum(f.is_cuda for f in faults)} of CUDA"]))
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    fuzz.add_options(commands.add_parser("fuzz", help="faults in the parsers, for the fuzzers"))
    library.add_options(commands.add_parser("library", help="faults in the library, for its tests"))
    commands.add_parser("list", help="the catalog, and what of it no longer fits the tree")
    options = parser.parse_args()
    if options.command == "fuzz":
        return fuzz.run_harnesses(options.seconds)
    return library.run_library(options) if options.command == "library" else list_catalog()


if __name__ == "__main__":
    sys.exit(main())
