"""Faults in the Python package, over the package that build/release/python holds."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

from .campaign import Result
from .faults import ROOT, Fault

PACKAGE = ROOT / "build" / "release" / "python"
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def run_tests(package: pathlib.Path, tests: list[str], limit: float) -> tuple[int | None, str]:
    python = ROOT / "build" / "python" / "bin" / "python"
    command = [str(python) if python.exists() else sys.executable, "-m", "pytest", "-q", "-x",
               "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True,
                              timeout=limit)
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout


def tests_of(file: str) -> list[list[str]]:
    """Test files named after the module first, then all."""
    name = pathlib.Path(file).stem.strip("_")
    folder = pathlib.Path(file).parent.name
    near = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "python/tests").glob("test_*.py"))
            if name in path.stem or (folder != "conclave" and folder in path.stem)]
    return [near, ["python/tests"]] if near else [["python/tests"]]


def run(faults: list[Fault], work: pathlib.Path, deadline: float) -> list[Result]:
    results = []
    for fault in faults:
        result = Result(fault)
        results.append(result)
        if time.monotonic() > deadline:
            continue
        package = work / "package"
        shutil.rmtree(package, ignore_errors=True)
        shutil.copytree(PACKAGE, package, symlinks=False)
        target = package / pathlib.Path(fault.file).relative_to("python")
        begin = time.monotonic()
        target.write_text(fault.planted(ROOT))
        for tests in tests_of(fault.file):
            status, text = run_tests(package, tests, max(10.0, deadline - time.monotonic()))
            if status is None:
                break
            if status == 0:
                result.status = "survived"
                continue
            failed = FAILED.findall(text)
            result.status, result.how, result.program = "found", "failed", "pytest"
            result.case = failed[0] if failed else text.strip().splitlines()[-1][:100]
            break
        result.seconds = time.monotonic() - begin
        print(f"{result.status:10} {fault.area}/{fault.name}: {result.case}", flush=True)
    return results
