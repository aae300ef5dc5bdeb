"""Faults in the Python package, over the package that build/release/python holds."""

import collections
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

from .campaign import GRACE_SECONDS, Result
from .faults import ROOT, Fault
from .programs import Selection

PACKAGE = ROOT / "build" / "release" / "python" / "conclave"
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
PASSED = re.compile(r"\b(\d+) passed\b")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`how`: passed, failed, timed out, or nothing ran; `case`: what failed first."""

    how: str
    case: str = ""


def run_tests(package: pathlib.Path, arguments: list[str], limit: float, threads: int) -> Outcome:
    """Runs pytest, which imports the package from the folder that holds it."""
    python = ROOT / "build" / "python" / "bin" / "python"
    command = [str(python) if python.exists() else sys.executable, "-m", "pytest", "-q", "-x",
               "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1",
                   "OMP_NUM_THREADS": str(threads), "CONCLAVE_NUM_THREADS": str(threads)}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True,
                              timeout=limit)
    except subprocess.TimeoutExpired:
        return Outcome("timed out")
    if done.returncode == 0:
        return Outcome("passed" if PASSED.search(done.stdout) else "nothing ran")
    failed = FAILED.findall(done.stdout)
    last = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()[-1][:100]
    # 5: pytest found no test of such a name.
    return Outcome("nothing ran" if done.returncode == 5 else "failed", failed[0] if failed else last)


def arguments_of(selection: Selection) -> list[str]:
    return [*selection.program.split(), *(["-k", selection.cases] if selection.cases else [])]


def tests_of(file: str) -> list[Selection]:
    """Test files named after the module first, then all."""
    name = pathlib.Path(file).stem.strip("_")
    folder = pathlib.Path(file).parent.name
    near = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "python/tests").glob("test_*.py"))
            if name in path.stem or (folder != "conclave" and folder in path.stem)]
    return [*([Selection(" ".join(near))] if near else []), Selection("python/tests")]


def copy_package(target: pathlib.Path) -> pathlib.Path:
    """A copy of the sources beside a link to the extension module, which is large."""
    def put(source: str, place: str) -> None:
        if source.endswith(".so"):
            os.symlink(os.path.realpath(source), place)
        else:
            shutil.copyfile(source, place)

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(PACKAGE, target / "conclave", copy_function=put,
                    ignore=shutil.ignore_patterns("__pycache__"))
    return target / "conclave"


class PythonCampaign:
    """Each fault in a package of its own, several at a time."""

    def __init__(self, faults: list[Fault], work: pathlib.Path, deadline: float, jobs: int,
                 chosen: dict[str, list[Selection]] | None) -> None:
        self.faults = faults
        self.work = work
        self.deadline = deadline
        self.jobs = jobs
        self.chosen = chosen
        self.threads = max(1, (os.cpu_count() or 1) // jobs)
        self.usable: set[Selection] = set()

    def _run(self, package: pathlib.Path, selection: Selection) -> Outcome:
        limit = max(1.0, self.deadline - time.monotonic()) + GRACE_SECONDS
        return run_tests(package, arguments_of(selection), limit, self.threads)

    def measure(self) -> None:
        """Finds out which of the chosen cases pass without a fault: the others say nothing."""
        selections = list(dict.fromkeys(
            selection for fault in self.faults for selection in self.chosen[fault.key]))
        package = copy_package(self.work / "sound")
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            outcomes = list(pool.map(lambda each: self._run(package, each), selections))
        for selection, outcome in zip(selections, outcomes, strict=True):
            if outcome.how == "passed":
                self.usable.add(selection)
            else:
                print(f"{selection} without a fault: {outcome.how}, left out {outcome.case}",
                      flush=True)

    def _wanted(self, fault: Fault) -> list[Selection]:
        """The chosen cases, then all of the module: the choice may be older than the tests."""
        if self.chosen is None:
            return tests_of(fault.file)
        chosen = [each for each in self.chosen[fault.key] if each in self.usable]
        return [*chosen, tests_of(fault.file)[0]] if chosen else []

    def plant(self, fault: Fault) -> Result:
        result = Result(fault)
        if time.monotonic() > self.deadline:
            return result
        begin = time.monotonic()
        package = copy_package(self.work / re.sub(r"[^a-z0-9]+", "_", fault.name.lower()))
        (package / pathlib.Path(fault.file).relative_to("python/conclave")).write_text(
            fault.planted(ROOT))
        for selection in self._wanted(fault):
            if time.monotonic() > self.deadline:
                break
            outcome = self._run(package, selection)
            if outcome.how == "timed out":
                break
            if outcome.how == "failed":
                result.status, result.how, result.program = "found", "failed", "pytest"
                result.case = outcome.case
                break
            result.status = "survived"
            result.passed.append(str(selection))
        shutil.rmtree(package.parent, ignore_errors=True)
        result.seconds = time.monotonic() - begin
        print(f"{result.status:10} {fault.key}: {result.case}", flush=True)
        return result

    def run(self) -> list[Result]:
        if self.chosen is not None:
            self.measure()
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            results = list(pool.map(self.plant, self.faults))
        counts = collections.Counter(result.status for result in results)
        print(", ".join(f"{number} {status}" for status, number in sorted(counts.items())))
        return results


def run(faults: list[Fault], work: pathlib.Path, deadline: float, jobs: int = 1,
        chosen: dict[str, list[Selection]] | None = None) -> list[Result]:
    return PythonCampaign(faults, work, deadline, jobs, chosen).run()
