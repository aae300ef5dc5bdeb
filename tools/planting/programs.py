"""Test programs: run whole or in shards, and what came of it."""

import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import time

FAILED_CASE = re.compile(r"^\[  FAILED  \] ([\w/]+\.[\w/]+)", re.MULTILINE)
STARTED_CASE = re.compile(r"^\[ RUN      \] ([\w/]+\.[\w/]+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Selection:
    """A program, or some of its cases; `under` is what runs it, such as a tool and its options."""

    program: str
    cases: str = ""  # as --gtest_filter takes them
    under: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([*self.under, self.program, *([self.cases] if self.cases else [])])


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`how`: passed, failed, crashed or timed out; `cases`: those that failed, or the last begun."""

    how: str
    cases: tuple[str, ...]
    seconds: float


def run_program(
    command: list[str],
    root: pathlib.Path,
    limit: float,
    shard: tuple[int, int] = (0, 1),
    without: tuple[str, ...] = (),
    cases: str = "",
    stop_early: bool = True,
    environment: dict[str, str] | None = None,
) -> Outcome:
    """Runs a GoogleTest program in the tree's root; the process group ends with its time."""
    command = [*command, "--gtest_color=no"]
    if stop_early:
        command.append("--gtest_fail_fast")
    if cases or without:
        excluded = "-" + ":".join(without) if without else ""
        command.append(f"--gtest_filter={cases or '*'}{excluded}")
    surroundings = {**os.environ, **(environment or {})}
    surroundings["GTEST_SHARD_INDEX"] = str(shard[0])
    surroundings["GTEST_TOTAL_SHARDS"] = str(shard[1])
    begin = time.monotonic()
    process = subprocess.Popen(
        command, cwd=root, env=surroundings, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )
    late = False
    try:
        text, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        late = True
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
    seconds = time.monotonic() - begin
    failed = tuple(dict.fromkeys(FAILED_CASE.findall(text)))
    started = STARTED_CASE.findall(text)
    last = tuple(started[-1:]) or ("before the first case",)
    if late:
        return Outcome("timed out", failed or last, seconds)
    if process.returncode == 0:
        if cases and not started:
            return Outcome("failed", (f"no case is named {cases}",), seconds)
        return Outcome("passed", (), seconds)
    if failed and process.returncode == 1:
        return Outcome("failed", failed, seconds)
    return Outcome("crashed", failed or last, seconds)
