"""Faults in the library: the build they are planted over, the campaign, the report."""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import time

from . import python_tests
from .build_tree import BuildTree
from .campaign import LARGE, Campaign, Result, uses_gpu
from .faults import ROOT, Fault, read_catalog
from .programs import Selection

WORK = ROOT / "build" / "planted"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--build", type=pathlib.Path, help="a finished build folder to plant over")
    parser.add_argument("--prefix", type=pathlib.Path, help="folder of packages, with usr/ in it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--gpu-jobs", type=int, default=3, help="programs on the GPU at once")
    parser.add_argument("--minutes", type=float, default=600, help="for all, the build included")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--cuda", action="store_true", help="faults of CUDA code (needs a GPU)")
    what.add_argument("--python", action="store_true", help="faults of the Python package")
    parser.add_argument("--area", action="append", default=[], help="a file of the catalog")
    parser.add_argument("--only", action="append", default=[], help="text in a fault's name or file")
    parser.add_argument("--resume", type=pathlib.Path, help="a report: what it found is left out")
    parser.add_argument("--programs", action="append", default=[], help="text in a program's name")
    parser.add_argument("--filters", type=pathlib.Path, metavar="FILE",
                        help="JSON: for each fault the cases that shall see it; only those run")
    parser.add_argument("--out", type=pathlib.Path, default=WORK / "report")


def earlier(options: argparse.Namespace) -> dict[str, dict]:
    """The rows of the report to resume, by fault."""
    if options.resume is None:
        return {}
    rows = json.loads(options.resume.read_text())["faults"]
    return {f"{row['area']}/{row['name']}": row for row in rows}


def read_filters(path: pathlib.Path, faults: list[Fault]) -> dict[str, list[Selection]]:
    """The cases of each fault by its key, a program's together and in the file's order.

    The file is a list of {"key": "area/name", "program": "tests/...", "filter": "Suite.Case"}, with
    "under": ["compute-sanitizer", ...] where a tool has to watch. Of Python code "program" has the
    files for pytest and "filter" an expression for its -k, or nothing.
    """
    rows = json.loads(path.read_text())
    strange = sorted({row["key"] for row in rows} - {fault.key for fault in faults})
    if strange:
        raise ValueError(f"{path}: no faults of the catalog: {', '.join(strange)}")
    filters: dict[str, dict[tuple, list[str]]] = {}
    for row in rows:
        runs = filters.setdefault(row["key"], {})
        runs.setdefault((row["program"], tuple(row.get("under", ()))), []).append(row["filter"])
    def join(program: str, cases: list[str]) -> str:
        return (" or " if program.startswith("python/") else ":").join(cases)

    return {key: [Selection(program, join(program, cases), under)
                  for (program, under), cases in runs.items()]
            for key, runs in filters.items()}


def usable_filters(filters: dict[str, list[Selection]],
                   folder: pathlib.Path) -> dict[str, list[Selection]]:
    """Without programs that were not built and tools that the machine lacks."""
    def usable(selection: Selection) -> bool:
        found = (folder / selection.program).exists() and all(
            shutil.which(tool) for tool in selection.under[:1])
        if not found:
            print(f"left out, since it is not there: {selection}", flush=True)
        return found

    return {key: [each for each in selections if usable(each)]
            for key, selections in filters.items()}


def chosen(options: argparse.Namespace) -> list[Fault]:
    done = {key for key, row in earlier(options).items() if row["status"] == "found"}
    return [
        fault
        for fault in read_catalog()
        if fault.is_cuda == options.cuda and fault.is_python == options.python
        and (options.filters is None or fault.key in options.filters)
        and (not options.area or fault.area in options.area)
        and (not options.only
             or any(text in fault.name or text in fault.file for text in options.only))
        and fault.key not in done
    ]


def package_options(prefix: pathlib.Path | None) -> list[str]:
    """Where CMake finds the packages that the machine itself lacks."""
    if prefix is None:
        return []
    usr = prefix.resolve() / "usr"
    options = [f"-DCMAKE_PREFIX_PATH={usr}", f"-DCMAKE_CXX_FLAGS=-isystem {usr}/include"]
    for package in ("fmt", "nlohmann_json", "GTest", "CLI11"):
        found = sorted(usr.rglob(f"{package}Config.cmake")) + sorted(
            usr.rglob(f"{package.lower()}-config.cmake"))
        if found:
            options.append(f"-D{package}_DIR={found[0].parent}")
    return options


def build_base(options: argparse.Namespace) -> pathlib.Path:
    """Configures and builds a folder of its own, with the test programs that will run."""
    folder = WORK / ("cuda" if options.cuda else "cpu")
    flags = "-O1 -DNDEBUG"
    configure = [
        "cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
        f"-DCMAKE_CXX_FLAGS_RELEASE={flags}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
        f"-DCONCLAVE_CUDA={'ON' if options.cuda else 'OFF'}", "-DCONCLAVE_BUILD_TOOL=OFF",
        "-DCONCLAVE_BUILD_BENCH=OFF", "-DCONCLAVE_BUILD_EXAMPLES=OFF",
        *package_options(options.prefix),
    ]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    listed = subprocess.run(["ninja", "-C", str(folder), "-t", "targets", "all"],
                            text=True, capture_output=True, check=True).stdout
    programs = [line.split(": ")[0] for line in listed.splitlines()
                if "EXECUTABLE_LINKER" in line and line.startswith("tests/")]
    wanted = [program for program in programs if is_wanted(program, options)]
    subprocess.run(["ninja", "-C", str(folder), "-j", str(options.jobs), "--quiet", *wanted],
                   check=True)
    return folder


def is_wanted(program: str, options: argparse.Namespace) -> bool:
    if options.filters is not None:
        return any(program == selection.program
                   for selections in options.filters.values() for selection in selections)
    if options.programs and not any(text in program for text in options.programs):
        return False
    if program.endswith(LARGE):
        return False
    on_device = uses_gpu(program) or pathlib.Path(program).name in (
        "cuda_plan_test", "tile_choice_test", "decode_plan_test")
    return on_device == options.cuda and program.endswith(("_test", "_tests"))


def write_report(results: list[Result], seconds: float, out: pathlib.Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"area": r.fault.area, "name": r.fault.name, "class": r.fault.kind, "file": r.fault.file,
         "status": r.status, "how": r.how, "program": pathlib.Path(r.program).name,
         "case": r.case, "seconds": round(r.seconds, 1), "passed": sorted(r.passed)}
        for r in results
    ]
    out.with_suffix(".json").write_text(
        json.dumps({"seconds": round(seconds), "faults": rows}, indent=1) + "\n")
    count = {status: sum(row["status"] == status for row in rows)
             for status in ("found", "survived", "unfinished", "broken")}
    text = ["# Planted faults", "", f"{len(rows)} faults in {seconds:.0f} s: " + ", ".join(
        f"{number} {status}" for status, number in count.items()), ""]
    for status in ("survived", "unfinished", "broken"):
        if count[status]:
            text += [f"## {status.capitalize()}", ""]
            text += [f"- {row['area']}: {row['name']} ({row['class']}; {row['file']})"
                     + (f"\n  {row['how'][-300:]}" if status == "broken" else "")
                     for row in rows if row["status"] == status] + [""]
    text += ["## Found", "", "| area | fault | class | by | s |", "|---|---|---|---|---:|"]
    text += [f"| {row['area']} | {row['name']} | {row['class']} | {row['program']}: {row['case']} "
             f"({row['how']}) | {row['seconds']} |" for row in rows if row["status"] == "found"]
    out.with_suffix(".md").write_text("\n".join(text) + "\n")


def run_library(options: argparse.Namespace) -> int:
    begin = time.monotonic()
    if options.filters is not None:
        options.filters = read_filters(options.filters, read_catalog())
    faults = chosen(options)
    if options.python:
        results = python_tests.run(faults, WORK / "python", begin + 60 * options.minutes,
                                   options.jobs, options.filters)
    else:
        folder = (options.build or build_base(options)).resolve()
        if options.filters is not None:
            options.filters = usable_filters(options.filters, folder)
        print(f"built after {time.monotonic() - begin:.0f} s", flush=True)
        campaign = Campaign(
            BuildTree(ROOT, folder), faults, WORK / "overlays", jobs=options.jobs,
            gpu_jobs=options.gpu_jobs, deadline=begin + 60 * options.minutes,
            passed={key: row["passed"] for key, row in earlier(options).items()},
            chosen=options.filters,
            say=lambda text: print(f"{time.monotonic() - begin:6.0f} s  {text}", flush=True))
        campaign.measure([program for program in campaign.tree.programs
                          if (folder / program).exists() and is_wanted(program, options)])
        print(f"measured after {time.monotonic() - begin:.0f} s", flush=True)
        results = campaign.run()
    write_report(results, time.monotonic() - begin, options.out)
    found = sum(result.status == "found" for result in results)
    survived = sum(result.status == "survived" for result in results)
    print(f"{found} of {len(results)} found, {survived} survived, "
          f"{len(results) - found - survived} without a verdict; "
          f"see {options.out.with_suffix('.md')}")
    return 0 if found == len(results) else 1
