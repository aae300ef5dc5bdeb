"""The tree's own tests of fused MoE, run against this package: what passed, what failed and why."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

FILES = (
    *(
        f"tests/kernels/moe/test_{name}.py"
        for name in (
            "moe",
            "moe_layer",
            "routing",
            "routing_simulator",
            "zero_expert_moe",
            "fused_topk",
            "grouped_topk",
            "moe_align_block_size",
            "moe_permute_unpermute",
            "count_expert_num_tokens",
            "batched_moe",
            "modular_kernel_combinations",
            "moe_weight_loading_padded",
            "fp8_tp_loading",
            "shared_fused_moe_routed_transform",
            "triton_moe_no_act_mul",
            "block_fp8",
            "block_int8",
            "cpu_fused_moe",
            "expert_substitution",
        )
    ),
    "tests/distributed/test_eplb_algo.py",
    "tests/distributed/test_eplb_utils.py",
)


# Names and packages that are not this one's.
_ELSEWHERE = ("absent", "ModuleNotFoundError")


def run(tree: pathlib.Path, file: str, most: int, seconds: int) -> list[dict[str, Any]]:
    """A line for each function, test and file that could not be read."""
    here = pathlib.Path(__file__).parent
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    places = [os.path.abspath(place) for place in given if place]  # the tests run in the tree
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as log:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(here), *places]),
            "DROP_IN_TREE": str(tree),
            "DROP_IN_LOG": log.name,
            "DROP_IN_MOST": str(most),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "plugin", "--noconftest"]
        command += ["-p", "no:cacheprovider", "--rootdir", str(tree), file]
        late = []
        try:
            subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            late = [{"file": file, "outcome": "late", "reason": f"ended after {seconds} s"}]
        lines = pathlib.Path(log.name).read_text().splitlines()
    return [json.loads(line) for line in lines] + late


def sort(lines: list[dict[str, Any]]) -> dict[str, collections.Counter[str]]:
    """Reasons and how often, by passed, failed, not applicable and late."""
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for line in lines:
        if "test" not in line:
            continue
        reason = line["reason"].split(" object at 0x")[0]
        if line["outcome"] == "passed":
            found["passed"][""] += 1
        elif line["kind"] == "Late":
            found["late"][reason] += 1
        elif line["outcome"] == "skipped" or line["kind"] in _ELSEWHERE:
            found["not applicable"][reason] += 1
        else:
            found["failed"][f"{line['kind']}: {reason}"] += 1
    return found


def report(tree: pathlib.Path, most: int, seconds: int, part: str) -> None:
    """Prints a table of the files with this part of a name, and reasons below it."""
    print("| file | collected | chosen | passed | failed | not applicable | late |")
    print("|---|---|---|---|---|---|---|")
    total: collections.Counter[str] = collections.Counter()
    notes = []
    for file in (file for file in FILES if part in file):
        if not (tree / file).exists():
            print(f"| {file} | not in this tree | | | | | |")
            continue
        lines = run(tree, file, most, seconds)
        found = sort(lines)
        numbers = {name: sum(found[name].values()) for name in ("passed", "failed")}
        numbers["not applicable"] = sum(found["not applicable"].values())
        numbers["late"] = sum(found["late"].values())
        collected = sum(line.get("collected", 0) for line in lines)
        chosen = sum(line.get("run", 0) for line in lines)
        cells = " | ".join(map(str, numbers.values()))
        print(f"| {pathlib.Path(file).name} | {collected} | {chosen} | {cells} |", flush=True)
        total.update(numbers)
        notes += [f"- {file}: {line['reason']}" for line in lines if "file" in line]
        for name in ("failed", "not applicable"):
            notes += [f"- {file}, {name} {n}: {why}" for why, n in found[name].most_common(6)]
    ran = total["passed"] + total["failed"]
    share = 100 * total["passed"] / ran if ran else 0
    print(f"\n{total['passed']} passed, {total['failed']} failed ({share:.1f} % of {ran} passed), ")
    print(f"{total['not applicable']} not applicable, {total['late']} too long.\n")
    print("\n".join(notes))
