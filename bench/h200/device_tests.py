#!/usr/bin/env python3
"""Runs the GPU tests, plainly or under compute-sanitizer, and writes what came of it.

    device_tests.py run --bin build/release/tests --out results.jsonl [--log tests.log]
    device_tests.py sanitize --bin build/release/tests --out results.jsonl [--tool racecheck]
                             [--family routing] [--launches 80] [--jobs 4] [--limit 60]
    device_tests.py report results.jsonl... > 2026-11-20-tests.md

`--bin` is searched for the executables by name; one that is missing is reported, not passed over.
Under the sanitizer only tests on small shapes run: see SANITIZED. Each run ends within --limit
seconds, and a run that did not finish says so. --jobs runs several at once, which helps little
under racecheck: there they take turns on the GPU. --launches has a tool look at the first launches
of each run only.
"""

import argparse
import collections
import concurrent.futures
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

EXECUTABLES = [
    "cuda_support_selftest",
    "dispatch_cuda_test",
    "routing_cuda_test",
    "gemm_cuda_test",
    "layer_cuda_routing_test",
    "cuda_layer_test",
    "cuda_large_test",
    "device_kernels_test",
]

TOOLS = ["memcheck", "racecheck", "synccheck", "initcheck"]

PARTS = "*.SharedExp*:*.ZeroExp*:*.MoreTokens*:*.GroupsAnd*:*.GateWith*:*.HiddenOf*:CudaLayerTest.*"

# Tests on small shapes that between them launch every kernel of the library, by what they are for.
SANITIZED = [
    ("stream", "device_kernels_test", "*EachFormat_SmallShapes*cuda_stream_sm90"),
    ("stream, e4m3", "device_kernels_test", "*EachFormat_SmallShapes*cuda_stream_fp8_sm90"),
    ("tile", "device_kernels_test", "*EachFormat_SmallShapes*cuda_tile_sm90"),
    ("tile, e4m3", "device_kernels_test", "*EachFormat_SmallShapes*cuda_tile_fp8_sm90"),
    ("reference", "device_kernels_test", "*EachFormat_SmallShapes*cuda_reference"),
    ("single launch", "device_kernels_test", "DeviceDecode.EachFormat_SmallShapes*"),
    ("quantise", "device_kernels_test", "QuantizeRowsCuda.*"),
    ("combine", "dispatch_cuda_test", "DeviceCombine.*-*ManyTokens*:*TwoToThe31*"),
    ("sorted rows", "dispatch_cuda_test", "DeviceSpread.*"),
    ("group, sanitise", "dispatch_cuda_test", "DeviceGroup.*:DeviceSanitize*-*Thousand*"),
    ("routing", "routing_cuda_test", "DeviceRouter.*-*RandomSpecs*:*ManyExperts*"),
    ("route and group", "layer_cuda_routing_test", "RouteAndGroup.*"),
    ("gate", "gemm_cuda_test", "DeviceGate.*"),
    ("other routers", "cuda_layer_test", "CudaRouters.*:CudaTokenRouter.*-*SizesOfModels*"),
    ("layer, each kernel", "cuda_layer_test", "CudaForward.EveryKernel*:CudaForward.OneChoice*"),
    ("layer, e4m3", "cuda_layer_test", "CudaForward.E4m3*"),
    ("layer, codes", "cuda_layer_test", "CudaForward.EveryFormOfCodes*"),
    ("layer, by parts", "cuda_layer_test", PARTS),
    ("sums in any order", "cuda_layer_test", "CudaUnordered.*-*Tile_*:*Workspace*"),
    ("skewed choices", "cuda_layer_test", "CudaSkew.*"),
    ("layer, replayed", "cuda_layer_test", "CudaReplay.OtherRowsThroughTheGate*"),
    ("layer, drawn", "cuda_layer_test", "*CudaRandomLayer.*/?"),
    ("layer, any part", "cuda_layer_test", "*CudaRandomSpec.*/?"),
]

# Tests that fill memory before a kernel is to write it blind initcheck: it runs on the others.
POISONED = {
    "device_kernels_test",
    "dispatch_cuda_test",
    "routing_cuda_test",
    "layer_cuda_routing_test",
}

# The oracles of the tests are no part of the library, and slow under a tool.
NOT_OURS = "kns=testing"


def find(root: str, name: str) -> str | None:
    for path in sorted(pathlib.Path(root).rglob(name)):
        if path.is_file():
            return str(path)
    return None


def run_limited(command: list[str], limit: float) -> tuple[int | None, str]:
    """The exit status, None where it ran out of time, and everything that it printed."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        text, _ = process.communicate(timeout=limit)
        return process.returncode, text
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            text, _ = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
        return None, text


def numbers_of_case(case: dict) -> dict:
    """What a case recorded: worst errors, ratios, counts."""
    known = {"name", "file", "line", "status", "result", "timestamp", "time", "classname"}
    known |= {"value_param", "type_param", "failures", "skipped"}
    return {key: value for key, value in case.items() if key not in known}


def read_cases(path: str) -> list[dict]:
    try:
        document = json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError):
        return []
    cases = []
    for suite in document["testsuites"]:
        for case in suite["testsuite"]:
            if case["status"] != "RUN":
                continue
            failed = "failures" in case
            skipped = case.get("result") == "SKIPPED"
            cases.append(
                {
                    "case": f"{suite['name']}.{case['name']}",
                    "outcome": "failed" if failed else "skipped" if skipped else "passed",
                    "seconds": float(case["time"].rstrip("s")),
                    "recorded": numbers_of_case(case),
                }
            )
    return cases


def run_plainly(name: str, path: str, limit: float) -> tuple[dict, str]:
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/cases.json"
        status, text = run_limited([path, f"--gtest_output=json:{output}"], limit)
        cases = read_cases(output)
    if not cases:  # no GoogleTest: a line for each case, the last word its verdict
        lines = [line.rstrip() for line in text.splitlines()]
        lines = [
            line for line in lines if line != "all good" and re.search(r" (good|FAILED)$", line)
        ]
        cases = [
            {
                "case": f"{name}.{line.split('  ')[0].strip()}",
                "outcome": "passed" if line.endswith("good") else "failed",
            }
            for line in lines
        ]
    result = {
        "executable": name,
        "status": status,
        "seconds": round(time.monotonic() - begin, 1),
        "cases": cases,
    }
    return result, text


def short(name: str) -> str:
    """Without namespaces, template arguments and parameters."""
    return re.sub(r"[<(].*", "", name.replace("(anonymous namespace)::", "")).split("::")[-1]


def sites_of(text: str) -> dict[str, int]:
    """What a tool reported, by place: the lines that met, and the kernel where it is said."""
    sites: collections.Counter[str] = collections.Counter()
    for block in re.split(r"^=+ *$", text, flags=re.MULTILINE):
        places = re.findall(r"\bat (.+?)\+0x[0-9a-f]+ in (\S+:\d+)", block)
        if not places:
            sites["a copy by the host"] += "Host API memory access" in block
            continue
        frames = re.findall(r"Device Frame: *(?:void )?(.+?)\+0x", block)
        where = " and ".join(dict.fromkeys(f"{short(name)} {line}" for name, line in places))
        sites[f"{where} in {short(frames[-1])}" if frames else where] += 1
    return {site: count for site, count in sites.most_common(20) if count > 0}


def run_under(tool: str, entry: tuple, path: str, options: argparse.Namespace) -> tuple[dict, str]:
    family, name, test_filter = entry
    begin = time.monotonic()
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99"]
    command += ["--show-backtrace", "device", "--print-limit", "400"]
    if options.launches:
        command += ["--launch-count", str(options.launches)]
    command += ["--kernel-name-exclude", NOT_OURS, path, f"--gtest_filter={test_filter}"]
    status, text = run_limited(command, options.limit)
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    passed = re.search(r"\[  PASSED  \] (\d+) test", text)
    result = {
        "executable": name,
        "tool": tool,
        "family": family,
        "filter": test_filter,
        "launches": options.launches,
        "finished": status is not None,
        "errors": int(summary.group(1)) if summary else None,
        "passed": int(passed.group(1)) if passed else 0,
        "seconds": round(time.monotonic() - begin, 1),
        "sites": sites_of(text),
    }
    return result, text


def run_control(tool: str, path: str, limit: float) -> dict:
    """A tool must find the fault that was planted for it."""
    begin = time.monotonic()
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99", path, tool]
    status, text = run_limited(command, limit)
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    return {
        "control": tool,
        "found": int(summary.group(1)) if summary else 0,
        "finished": status is not None,
        "seconds": round(time.monotonic() - begin, 1),
    }


def append(path: str, result: dict) -> None:
    with open(path, "a", encoding="utf-8") as out:
        out.write(json.dumps(result) + "\n")


def log(path: str | None, text: str) -> None:
    if path:
        with open(path, "a", encoding="utf-8") as out:
            out.write(text)


def describe_machine() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown GPU"
    name, driver = lines.splitlines()[0].split(", ")
    return f"{name}, driver {driver}"


def describe_sanitizer() -> str:
    text = run_limited(["compute-sanitizer", "--version"], 20)[1]
    version = re.search(r"[Vv]ersion ([0-9.]+)", text)
    return version.group(1) if version else "of an unknown version"


def command_run(options: argparse.Namespace) -> bool:
    append(options.out, {"machine": describe_machine(), "date": time.strftime("%Y-%m-%d")})
    good = True
    for name in options.only or EXECUTABLES:
        path = find(options.bin, name)
        if path is None:
            append(options.out, {"executable": name, "status": "missing", "cases": []})
            good = False
            continue
        result, text = run_plainly(name, path, options.limit)
        append(options.out, result)
        log(options.log, "".join(line for line in text.splitlines(True) if "[ RUN" not in line))
        failed = [case["case"] for case in result["cases"] if case["outcome"] == "failed"]
        print(f"{name}: {len(result['cases'])} cases, {len(failed)} failed, {result['seconds']} s")
        for case in failed:
            print(f"  {case}")
        good = good and result["status"] == 0
    return good


def planned_runs(options: argparse.Namespace) -> list[tuple]:
    """In the order in which tools and families are named."""
    entries = {entry[0]: entry for entry in SANITIZED}
    runs = []
    for tool in options.tool or TOOLS:
        for family in options.family or entries:
            name = entries[family][1]
            path = find(options.bin, name)
            if path is None or (tool == "initcheck" and name in POISONED):
                continue
            runs.append((tool, entries[family], path, options))
    return runs


def command_sanitize(options: argparse.Namespace) -> bool:
    append(options.out, {"sanitizer": describe_sanitizer()})
    good = True
    planted = find(options.bin, "planted_faults")
    for tool in options.tool or TOOLS if planted else []:
        control = run_control(tool, planted, options.limit)
        append(options.out, control)
        print(f"{tool:10} finds {control['found']} planted faults, {control['seconds']} s")
        good = good and control["found"] > 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        waiting = [pool.submit(run_under, *run) for run in planned_runs(options)]
        for done in concurrent.futures.as_completed(waiting):
            result, text = done.result()
            append(options.out, result)
            log(
                options.log,
                f"{result['tool']} {result['executable']} {result['filter']}\n"
                f"{text[:6000]}\n...\n{text[-2000:]}\n",
            )
            print(
                f"{result['tool']:10} {result['family']}: {result['errors']} errors, "
                f"{result['passed']} passed, {result['seconds']} s"
                f"{'' if result['finished'] else ', NOT FINISHED'}",
                *(f"{count} x {site}" for site, count in result["sites"].items()),
                sep="\n  ",
                flush=True,
            )
            good = good and result["errors"] == 0 and result["finished"]
    return good


def report_cases(results: list[dict]) -> list[str]:
    lines = [
        "| executable | cases | passed | skipped | failed | s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        outcomes = [case["outcome"] for case in result["cases"]]
        lines.append(
            f"| `{result['executable']}` | {len(outcomes)} | {outcomes.count('passed')} "
            f"| {outcomes.count('skipped')} | {outcomes.count('failed')} "
            f"| {result.get('seconds', 0)} |"
        )
        if result["status"] != 0:
            lines[-1] += f" ended with {result['status']}"
    return lines


def report_recorded(results: list[dict]) -> list[str]:
    """By suite, and by kernel where a suite runs once for each: sums of counts, else the most."""
    figures: dict[tuple[str, str], float] = {}
    for result in results:
        for case in result["cases"]:
            suite = re.sub(r"^\w+/", "", case["case"]).split(".")[0]
            kernel = re.search(r"/(cuda_\w+)$", case["case"])
            subject = f"{suite} {kernel.group(1)}" if kernel else suite
            for key, value in case.get("recorded", {}).items():
                before = figures.get((subject, key), 0.0)
                is_count = key in ("checked", "candidates")
                number = float(value)
                figures[subject, key] = before + number if is_count else max(before, number)
    if not figures:
        return []
    lines = ["", "What the cases recorded: sums of counts, the largest of all else.", ""]
    lines += ["| suite | figure | value |", "|---|---|---:|"]
    return lines + [f"| `{name}` | {key} | {value:g} |" for (name, key), value in figures.items()]


def report_tools(all_results: list[dict]) -> list[str]:
    results = [result for result in all_results if "tool" in result]
    if not results:
        return []
    versions = {result["sanitizer"] for result in all_results if "sanitizer" in result}
    name = " ".join(["compute-sanitizer", *sorted(versions)])
    lines = ["", f"Errors by {name}, on the small shapes of each test:", ""]
    tools = [tool for tool in TOOLS if any(result["tool"] == tool for result in results)]
    lines += [f"| kernels | tests | {' | '.join(tools)} |", "|---|---|" + "---:|" * len(tools)]
    for family, name, test_filter in SANITIZED:
        row = []
        for tool in tools:
            found = [r for r in results if (r["tool"], r.get("family")) == (tool, family)]
            if not found:
                row.append("poison" if tool == "initcheck" and name in POISONED else "not run")
            elif not found[-1]["finished"]:
                row.append(f"unfinished in {found[-1]['seconds']:.0f} s")
            else:
                launches = found[-1].get("launches")
                first = f" (first {launches} launches)" if launches else ""
                row.append(f"{found[-1]['errors']}{first}")
        lines.append(f"| {family} | `{name}` `{test_filter}` | {' | '.join(row)} |")
    controls = {result["control"]: result["found"] for result in all_results if "control" in result}
    if controls:
        row = [str(controls.get(tool, "not run")) for tool in tools]
        lines.append(f"| planted, must be found | `planted_faults` | {' | '.join(row)} |")
    sites = [
        f"- {result['tool']}, {result['family']}: {count} of {site}"
        for result in results
        for site, count in result.get("sites", {}).items()
    ]
    if sites:
        lines += ["", "What was printed, by place:", "", *sites]
    return lines


def command_report(options: argparse.Namespace) -> bool:
    lines = [
        text for path in options.results for text in pathlib.Path(path).read_text().splitlines()
    ]
    results = [json.loads(line) for line in lines]
    plain = [result for result in results if "cases" in result]
    for result in results:
        if "machine" in result:
            print(f"# GPU tests, {result['date']}\n\n{result['machine']}; the executables behind")
            print(
                "`ctest -L cuda`, built in Release. The log of every case lies beside this file.\n"
            )
            break
    print("\n".join(report_cases(plain)))
    print("\n".join(report_tools(results)))
    print("\n".join(report_recorded(plain)))
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    sanitize = commands.add_parser("sanitize")
    for command in (run, sanitize):
        command.add_argument("--bin", required=True)
        command.add_argument("--out", required=True)
        command.add_argument("--log")
        command.add_argument("--limit", type=float, default=60, help="seconds for each run")
    run.add_argument("--only", action="append", help="an executable")
    sanitize.add_argument("--tool", action="append", choices=TOOLS)
    sanitize.add_argument("--family", action="append", help="as the first column of the report")
    sanitize.add_argument("--launches", type=int, help="as many are looked at, the first")
    sanitize.add_argument("--jobs", type=int, default=1)
    report = commands.add_parser("report")
    report.add_argument("results", nargs="+")
    options = parser.parse_args()
    do = {"run": command_run, "sanitize": command_sanitize, "report": command_report}
    return 0 if do[options.command](options) else 1


if __name__ == "__main__":
    sys.exit(main())
