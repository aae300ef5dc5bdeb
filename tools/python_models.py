#!/usr/bin/env python3
"""Tries every tiny model of testdata with transformers and writes docs/python-models.md.

    PYTHONPATH=build/release/python python3 tools/python_models.py

Each is run eagerly, with the experts backend, and with its blocks patched: prefill and 16 greedy
tokens in float32.
"""

import contextlib
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python" / "tests"))

import torch  # noqa: E402
import transformers  # noqa: E402
from support import models  # noqa: E402

import conclave.transformers  # noqa: E402
from conclave.errors import ConclaveUnsupportedError  # noqa: E402

PAGE = ROOT / "docs" / "python-models.md"
HEAD = """# Model classes of transformers that were tried

Every model of `testdata/models` that has a class in transformers {version} (torch {torch}), with random
weights in float32: a prefill of {batch} x {prompt} tokens, then {new} greedy tokens, eager against
Conclave. The numbers are the largest relative L2 distance of a token's logits over all of them; "same"
says that the tokens are equal. Made by `tools/python_models.py`; the same comparison runs as
`python/tests/test_transformers_models.py`.

- *Backend*: `experts_implementation="conclave"`. A dash: the class has no exchangeable experts.
- *Patch*: `conclave.transformers.patch(model)`, and what it replaced.

{count} model classes, {families} folders; {passed} passed. The worst distance is {worst:.1e}.

| model | class | backend | patch | replaced |
|---|---|---|---|---|
"""
TAIL = """
Not tried, because this version has no class for them: {missing}.
"""


def outcome(model, expected) -> tuple[str, float, bool]:
    actual = models.run(model, models.prompt())
    worst = models.worst_difference(actual, expected)
    same = actual.tokens == expected.tokens
    text = f"{worst:.1e}, " + ("same" if same else "other tokens")
    return (text if expected.tokens else f"{worst:.1e}"), worst, same and worst <= 2e-5


def replaced(report) -> str:
    kinds = [m.replaced for m in report.replaced]
    text = ", ".join(f"{kinds.count(kind)} {kind}" + "s" * (kinds.count(kind) > 1 and kind == "block")
                     for kind in dict.fromkeys(kinds))  # fmt: skip
    left = [f"not `{m.module}`: {m.reason.partition(';')[0]}" for m in report.not_replaced]
    return "; ".join([text, *left])


def try_model(name: str) -> tuple[str, str, list[float], bool]:
    """The row of a model, its class, distances, and whether all went well."""
    model = models.load(name)
    expected = models.run(model, models.prompt())
    backend, distances, good = "-", [], True
    with contextlib.suppress(ConclaveUnsupportedError):  # of a class that the backend cannot reach
        conclave.transformers.set_implementation(model)
        backend, worst, good = outcome(model, expected)
        distances.append(worst)
    conclave.transformers.set_implementation(model, "eager")
    report = conclave.transformers.patch(model)
    patched, worst, also_good = outcome(model, expected)
    distances.append(worst)
    kind = type(model).__name__
    row = f"| `{name}` | `{kind}` | {backend} | {patched} | {replaced(report)} |\n"
    return row, kind, distances, good and also_good


def main() -> int:
    transformers.logging.set_verbosity_error()
    rows, kinds, distances, missing, passed = [], set(), [0.0], [], 0
    for name in models.folders():
        try:
            row, kind, worst, good = try_model(name)
        except models.NoClass:
            missing.append(f"`{name}`")
            continue
        rows.append(row)
        kinds.add(kind)
        distances += worst
        passed += good
    head = HEAD.format(
        version=transformers.__version__,
        torch=torch.__version__,
        batch=models.PROMPT[0],
        prompt=models.PROMPT[1],
        new=models.NEW_TOKENS,
        count=len(kinds),
        families=len(rows),
        passed=passed,
        worst=max(distances),
    )
    PAGE.write_text(head + "".join(rows) + TAIL.format(missing=", ".join(missing)))
    print(f"{passed} of {len(rows)} passed, worst {max(distances):.1e}")
    return 0 if passed == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
