#!/usr/bin/env python3
"""Tries every model class of the installed transformers that has experts, and prints what came of
it; with --page also writes docs/python-survey.md.

    OMP_NUM_THREADS=1 PYTHONPATH=build/release/python python3 tools/transformers_survey.py [--page] [FAMILY ...]

Each is made small and random in float32, run, patched and run again: forward, greedy tokens and
gradients against its own code.
"""

import argparse
import logging
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python" / "tests"))

import torch  # noqa: E402
import transformers  # noqa: E402
from support import survey, survey_models  # noqa: E402

PAGE = ROOT / "docs" / "python-survey.md"
HEAD = """# Every class with experts

Every model class of transformers {version} (torch {torch}) whose model has experts: trunks, heads that
generate, classify or answer, and multimodal models. Each was made small, with random weights in float32,
and run before and after `conclave.transformers.patch`, by `tools/transformers_survey.py`. The bound of the error is {bar:.0e}.

- *Blocks*: modules replaced whole; *experts*: those alone; *left*: not replaced. Notes say why.
- *Error*: the largest relative L2 distance of a row of any result from the class's own code.
- *Tokens*: whether {new} greedy tokens are the same; a dash: the class does not generate from text alone.
- *Gradients*: of all parameters, by the model's own code, which a patched model trains with.

{count} classes of {families} families ran: {good} agree, {whole} of them with every MoE block replaced whole.
{missing} classes were not tried, for the reasons at the end. The worst error is {worst:.1e}.

| family | class | blocks | experts | left | error | tokens | gradients | notes |
|---|---|---|---|---|---|---|---|---|
"""


def short(reason: str) -> str:
    """A reason without the list of all families."""
    first, mark, alone = reason.partition("; experts alone")
    first = first.partition("; expected one of")[0]
    unknown = "config.json: model_type names no known architecture"
    return first.replace(unknown, "no table of this family") + mark + alone


def row(outcome: survey.Outcome, notes: dict[str, int]) -> str:
    marks = [f"[{notes.setdefault(short(r), len(notes) + 1)}]" for r in outcome.reasons]
    bad = [*outcome.silent, *outcome.eager]
    marks += [f"silent or eager: {', '.join(bad)}"] if bad else []
    return (
        f"| {outcome.family} | `{outcome.cls}` | {outcome.blocks} | {outcome.experts} | {outcome.left} "
        f"| {outcome.error:.1e} | {outcome.generates} | {outcome.gradient} | {' '.join(marks)} |\n"
    )


def is_whole(outcome: survey.Outcome) -> bool:
    heads = all("attention heads" in reason for reason in outcome.reasons)
    return outcome.blocks > 0 and outcome.experts == 0 and heads


def survey_all(only: list[str]) -> tuple[list[survey.Outcome], list[str]]:
    found, missing = [], []
    for family in survey_models.families():
        if only and family not in only:
            continue
        for cls in survey_models.classes_of(family):
            try:
                outcome = survey.try_class(family, cls)
            except survey_models.NotTried as error:
                missing.append(f"- `{cls.__name__}`: {error}\n")
                continue
            if outcome is not None:
                found.append(outcome)
                print("ok " if outcome.is_good else "BAD", row(outcome, {}).strip(), flush=True)
    return found, missing


def page_of(found: list[survey.Outcome], missing: list[str]) -> str:
    notes: dict[str, int] = {}
    rows = "".join(row(outcome, notes) for outcome in found)
    head = HEAD.format(
        version=transformers.__version__,
        torch=torch.__version__,
        bar=survey.BAR,
        new=survey.NEW_TOKENS,
        count=len(found),
        families=len({o.family for o in found}),
        good=sum(o.is_good for o in found),
        whole=sum(is_whole(o) for o in found),
        missing=len(missing),
        worst=max(o.error for o in found),
    )
    said = "".join(f"{number}. {note}\n" for note, number in notes.items())
    return f"{head}{rows}\n## Notes\n\n{said}\n## Not tried\n\n{''.join(missing)}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", action="store_true", help="write docs/python-survey.md")
    parser.add_argument("family", nargs="*", help="by default all")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    found, missing = survey_all(arguments.family)
    print("".join(missing), end="")
    if arguments.page and found:
        PAGE.write_text(page_of(found, missing))
    bad = [o.cls for o in found if not o.is_good]
    print(f"{len(found) - len(bad)} of {len(found)} classes agree; {len(missing)} not tried")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
