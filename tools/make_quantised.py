#!/usr/bin/env python3
"""Makes the quantised checkpoints of testdata/quantised/: experts in codes as each method stores them.

    python3 tools/make_quantised.py               remake all
    python3 tools/make_quantised.py --name NAME   remake one or several
    python3 tools/make_quantised.py --check       remake all aside and compare the model files

tools/quantised/ has a file a method; testdata/quantised/README.md says which package wrote what, and
tools/requirements-quantised.txt names the packages. Each golden.safetensors holds hidden states, ids,
weights and the output in float64, computed here from the files on disk in numpy: codes and scales are
those stored, rows are quantised by the rule of docs/quantisation.md, sums are float64. Where the method's
package decodes weights on a CPU, it must make the same of them.
"""

import argparse
import filecmp
import pathlib
import tempfile

from quantised import awq, blocks_fp4, bnb, compressed, compressed_codes, fp8, gptq, mixed, mlx, modelopt, modelopt_codes, quark
from quantised.case import Case

MODELS = pathlib.Path(__file__).resolve().parent.parent / "testdata" / "quantised"
METHODS = (fp8, compressed, compressed_codes, modelopt, modelopt_codes, gptq, awq, bnb, mlx, quark, blocks_fp4, mixed)
CASES = {name: case for method in METHODS for name, case in method.CASES.items()}


def check(name: str, case: Case) -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        remade = pathlib.Path(scratch)
        case.make(remade)
        return [
            f"{name}/{path.name} differs"
            for path in sorted(remade.iterdir())
            if path.name != "golden.safetensors" and not filecmp.cmp(path, MODELS / name / path.name, shallow=False)
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", choices=CASES, nargs="+", default=list(CASES), help="remake only these")
    parser.add_argument("--check", action="store_true", help="remake aside and compare the model files")
    options = parser.parse_args()
    problems = []
    for name, case in CASES.items():
        if name not in options.name:
            continue
        if options.check:
            problems += check(name, case())
        else:
            made = case()
            made.make(MODELS / name)
            size = sum(path.stat().st_size for path in (MODELS / name).iterdir()) // 1024
            print(f"{name:40} {size:5} KiB {getattr(made, 'worst', 0):.1e}", flush=True)
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
