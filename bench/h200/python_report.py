#!/usr/bin/env python3
"""The record of a run of the Python package's GPU tests, from pytest's XML. See python_tests.sh."""

import argparse
import collections
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

COMPARISONS = {
    "test_model_with_experts_backend_has_eager_logits": "float32, the experts backend",
    "test_model_with_patched_blocks_has_eager_logits": "float32, whole blocks by `patch`",
    "test_bfloat16_model_is_as_near_to_float32_as_eager": "bfloat16, the farther of the two ways",
}


NUMBERS = ("distance", "eager")


def outcome(case):
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            return ("failed" if kind == "error" else kind.replace("failure", "failed")), found
    return "passed", None


def cases_of(paths):
    for path in paths:
        yield from ElementTree.parse(path).iter("testcase")


def properties_of(case):
    return {p.get("name"): p.get("value") for p in case.iter("property")}


def machine():
    import torch
    import transformers

    import conclave

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return (
        f"One {gpu.replace(', ', ', driver ')}; commit {conclave._conclave.build_info()['commit']}; CPython "
        f"{sys.version.split()[0]}, torch {torch.__version__}, transformers {transformers.__version__}."
    )


def table_of_files(cases):
    counts = collections.defaultdict(collections.Counter)
    seconds = collections.Counter()
    for case in cases:
        name = case.get("classname").split(".")[-1]
        counts[name][outcome(case)[0]] += 1
        seconds[name] += float(case.get("time"))
    lines = ["| file | cases | passed | skipped | failed | s |", "|---|---:|---:|---:|---:|---:|"]
    total = collections.Counter()
    for name, count in sorted(counts.items()):
        total.update(count)
        lines.append(
            f"| `{name}.py` | {sum(count.values())} | {count['passed']} | {count['skipped']} | "
            f"{count['failed']} | {seconds[name]:.1f} |"
        )
    lines.append(
        f"| all | {sum(total.values())} | {total['passed']} | {total['skipped']} | "
        f"{total['failed']} | {sum(seconds.values()):.1f} |"
    )
    return lines


def table_of_families(cases):
    found = collections.defaultdict(list)
    for case in cases:
        properties = properties_of(case)
        if "distance" in properties:
            found[case.get("name").partition("[")[0]].append(
                (float(properties["distance"]), properties, case, outcome(case)[0])
            )
    lines = [
        "| what | models | classes | passed | worst distance | of |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for test, text in COMPARISONS.items():
        rows = sorted(found[test], key=lambda row: row[0])
        if not rows:
            continue
        worst, properties, _, _ = rows[-1]
        eager = f" (eager {float(properties['eager']):.1e})" if "eager" in properties else ""
        lines.append(
            f"| {text} | {len(rows)} | {len({r[1]['class'] for r in rows})} | "
            f"{sum(r[3] == 'passed' for r in rows)} | {worst:.1e}{eager} | `{properties['class']}` |"
        )
    kinds = collections.Counter(r[1].get("replaced") for r in found[list(COMPARISONS)[1]])
    return [
        *lines,
        "",
        f"`patch` replaced whole blocks in {kinds['block']} of these models. Where this version of transformers",
        f"computes something else than the published formula, it replaced the experts alone ({kinds['experts']}) or",
        f"nothing ({kinds['']}), and said so.",
    ]


def table_of_reasons(cases):
    reasons = collections.Counter()
    for case in cases:
        kind, found = outcome(case)
        if kind == "skipped":
            reasons[found.get("message").replace("|", "\\|")] += 1
    lines = ["| skipped because | cases |", "|---|---:|"]
    return lines + [f"| {reason} | {count} |" for reason, count in reasons.most_common()]


def log_of(cases):
    """A line for each case, and what a failed one said."""
    for case in sorted(cases, key=lambda c: (c.get("classname"), c.get("name"))):
        kind, found = outcome(case)
        numbers = {k: f"{float(v):.2e}" for k, v in properties_of(case).items() if k in NUMBERS}
        more = "".join(f"  {name} {value}" for name, value in numbers.items())
        file = case.get("classname").split(".")[-1]
        yield f"{kind:8}{file}::{case.get('name')}  {float(case.get('time')):.2f} s{more}"
        if kind == "failed":
            yield from (f"        {line}" for line in (found.text or "").splitlines())


def failures(cases):
    return [
        f"- `{case.get('classname').split('.')[-1]}.{case.get('name')}`: {outcome(case)[1].get('message')}"
        for case in cases
        if outcome(case)[0] == "failed"
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=pathlib.Path)
    parser.add_argument("--log", type=pathlib.Path, required=True, help="to write every case to")
    options = parser.parse_args()
    cases = list(cases_of(options.results))
    lines = ["# The Python package with CUDA tensors", "", machine()]
    options.log.write_text("\n".join(log_of(cases)) + "\n")
    lines += [f"Run by `bench/h200/python_tests.sh`; every case is in `{options.log.name}`.", ""]
    lines += table_of_files(cases) + [""]
    failed = failures(cases)
    if failed:
        lines += ["Failed:", "", *failed, ""]
    lines += ["## Models of transformers", ""]
    lines += [
        "The tiny models of `testdata/models` on the GPU, eager against Conclave. In float32 the largest",
        "relative L2 distance of a token's logits over a prefill and 16 greedy tokens, which must be the same.",
        "In bfloat16 the median over the tokens of six prompts, against the same weights in float32, which must",
        "not be above that of eager experts by a tenth.",
        "",
    ]
    lines += table_of_families(cases)
    lines += ["", "## Not run", ""]
    lines += table_of_reasons(cases)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
