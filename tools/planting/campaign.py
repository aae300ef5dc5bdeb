"""Plants every fault of a list and looks for the test that sees it.

Work is cut into small pieces (compile a fault, run one shard of one program) which workers take in
order of their worth: all faults meet the programs of their own module before any meets the others,
so that what a time limit cuts off is what would have found least.
"""

import dataclasses
import heapq
import itertools
import pathlib
import re
import shutil
import threading
import time

from .build_tree import TOOL, BuildTree, Failed
from .faults import Fault
from .programs import Outcome, Selection, run_program

SHARD_SECONDS = 20.0
COMPILE_LIMIT = 400.0
GRACE_SECONDS = 20.0  # what has begun may end
MEASURED_SHARDS = 6
TOOL_TESTS = "tool_commands_test"
# Their shapes are large, and other programs of their modules have the same kernels.
LARGE = ("production_shapes_test", "cuda_large_test", "complexity_tests")


@dataclasses.dataclass
class Result:
    """`status`: found, survived, unfinished, or broken (it does not compile or link)."""

    fault: Fault
    status: str = "unfinished"
    how: str = ""
    program: str = ""
    case: str = ""
    seconds: float = 0.0
    passed: list[str] = dataclasses.field(default_factory=list)
    left: int = 0


@dataclasses.dataclass(frozen=True)
class Baseline:
    """What runs without a fault: its time, and the cases that fail all the same."""

    seconds: float
    failing: tuple[str, ...]


class Campaign:
    def __init__(self, tree: BuildTree, faults: list[Fault], work: pathlib.Path, *,
                 jobs: int, gpu_jobs: int, deadline: float,
                 passed: dict[str, list[str]] | None = None,
                 chosen: dict[str, list[Selection]] | None = None, say=print) -> None:
        self.tree = tree
        self.faults = faults
        self.work = work
        self.jobs = jobs
        self.deadline = deadline
        self.say = say
        # Programs that an earlier campaign ran on the fault are not run again.
        earlier = passed or {}
        self.results = {id(fault): Result(fault, passed=list(earlier.get(fault.key, ())))
                        for fault in faults}
        # What each fault meets, by its key; every program where this is None.
        self.chosen = chosen
        self.baseline: dict[Selection, Baseline] = {}
        self.gpu_jobs = gpu_jobs
        self.gpu_busy = 0
        self.lock = threading.Condition()
        # Pieces for the processor, and pieces that need the GPU as well.
        self.queues: tuple[list, list] = ([], [])
        self.order = itertools.count()
        self.running = 0

    # The queue.

    def put(self, worth: tuple, action, needs_gpu: bool = False) -> None:
        with self.lock:
            heapq.heappush(self.queues[needs_gpu], (worth, next(self.order), needs_gpu, action))
            self.lock.notify()

    def _take(self):
        """The first piece whose needs are met; None when there is nothing left to wait for."""
        with self.lock:
            while True:
                if time.monotonic() > self.deadline:
                    return None
                usable = [queue for queue in self.queues
                          if queue and (queue is self.queues[0] or self.gpu_busy < self.gpu_jobs)]
                if usable:
                    piece = heapq.heappop(min(usable, key=lambda queue: queue[0]))
                    self.running += 1
                    self.gpu_busy += piece[2]
                    return piece
                if not any(self.queues) and self.running == 0:
                    self.lock.notify_all()
                    return None
                self.lock.wait(timeout=1.0)

    def _work(self) -> None:
        while (piece := self._take()) is not None:
            try:
                piece[3]()
            finally:
                with self.lock:
                    self.running -= 1
                    self.gpu_busy -= piece[2]
                    self.lock.notify_all()

    def drain(self) -> None:
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    # Programs that pass without a fault.

    def measure(self, programs: list[str]) -> None:
        """Runs each program as it is, or what was chosen of it, in shards, for its time and for
        what fails without a fault."""
        if self.chosen is None:
            selections = [Selection(program) for program in programs]
        else:
            selections = list(dict.fromkeys(itertools.chain(*self.chosen.values())))
        outcomes: dict[Selection, list[Outcome]] = {selection: [] for selection in selections}

        def measure_shard(selection: Selection, index: int, shards: int) -> None:
            outcome = run_program([*selection.under, str(self.tree.folder / selection.program)],
                                  self.tree.root, self._limit(900.0), (index, shards),
                                  cases=selection.cases, stop_early=False)
            with self.lock:
                outcomes[selection].append(outcome)

        for selection in selections:
            shards = 1 if selection.cases else MEASURED_SHARDS
            for index in range(shards):
                self.put((0,), lambda selection=selection, index=index, shards=shards:
                         measure_shard(selection, index, shards), uses_gpu(selection.program))
        self.drain()
        for selection, parts in outcomes.items():
            self._keep(selection, parts)

    def _keep(self, selection: Selection, parts: list[Outcome]) -> None:
        failing = tuple(case for part in parts for case in part.cases)
        ended = len(parts) == (1 if selection.cases else MEASURED_SHARDS) and not any(
            part.how in ("crashed", "timed out") for part in parts)
        # A program does without the cases that fail, but chosen cases say nothing if any does.
        usable = ended and not (selection.cases and failing)
        if usable:
            self.baseline[selection] = Baseline(sum(part.seconds for part in parts), failing)
        if failing or not ended:
            self.say(f"{selection} without a fault: {'fails' if ended else 'does not end'}"
                     f"{'' if usable else ', left out'} {', '.join(failing)}")

    def _limit(self, seconds: float) -> float:
        """At most `seconds`, and not long after the deadline."""
        return min(seconds, max(1.0, self.deadline - time.monotonic()) + GRACE_SECONDS)

    # A fault's way.

    def run(self) -> list[Result]:
        self._plant_all(self.faults)
        survivors = self._survivors()
        if self.chosen is not None and survivors:
            self._widen(survivors)
            self._plant_all(survivors)
        for fault in {id(each): each for each in [*survivors, *self._survivors()]}.values():
            result = self.results[id(fault)]
            if result.status == "unfinished":
                result.status = "survived"
                self.say(f"survived  {fault.key}")
        return [self.results[id(fault)] for fault in self.faults]

    def _plant_all(self, faults: list[Fault]) -> None:
        """Those first whose objects are many: nothing else takes as long."""
        for fault in faults:
            objects = len(self.tree.users.get(fault.file, ()))
            self.put((0, -objects), lambda fault=fault: self._plant(fault))
        self.drain()

    def _survivors(self) -> list[Fault]:
        def survived(result: Result) -> bool:
            return result.status == "unfinished" and result.left == 0 and bool(result.passed)

        return [fault for fault in self.faults if survived(self.results[id(fault)])]

    def _widen(self, faults: list[Fault]) -> None:
        """All programs of the modules take the place of chosen cases that did not see a fault: the
        choice may be older than the tests."""
        whole: dict[str, list[Selection]] = {}
        for fault in faults:
            self.say(f"passed    {fault.key}: its cases alone; all of its module come next")
            programs = {selection.program for selection in self.chosen[fault.key]}
            programs |= {program for program in self.tree.programs if is_near(fault, program)}
            whole[fault.key] = [Selection(program) for program in sorted(programs)
                                if (self.tree.folder / program).exists()
                                and uses_gpu(program) <= fault.is_cuda
                                and not program.endswith(LARGE)]
        self.chosen = whole
        self.measure([])

    def _plant(self, fault: Fault) -> None:
        result = self.results[id(fault)]
        # nvcc loses folders whose names hold an apostrophe, and would find the sound header.
        overlay = self.work / re.sub(r"[^a-z0-9]+", "_", fault.key.lower())
        shutil.rmtree(overlay, ignore_errors=True)
        path = overlay / fault.file
        path.parent.mkdir(parents=True)
        begin = time.monotonic()
        try:
            path.write_text(fault.planted(self.tree.root))
            library, own = self.tree.concerned(fault.file)
            if not library and not any(own.values()):
                raise Failed(f"no object of this build holds {fault.file}")
            made = {name: self.tree.compile(name, overlay, fault.file, self._limit(COMPILE_LIMIT))
                    for name in library}
        except (Failed, ValueError, OSError) as error:
            if time.monotonic() > self.deadline:
                return
            result.status, result.how = "broken", str(error)[-600:]
            self.say(f"broken    {fault.key}: {str(error)[-300:]}")
            return
        result.seconds += time.monotonic() - begin
        selections = [selection for selection in self._wanted(fault)
                      if str(selection) not in result.passed]
        with self.lock:
            result.left = len(selections)
        for number, selection in enumerate(selections):
            self._put_selection(fault, selection, number, overlay, made,
                                own.get(selection.program, []))

    def _wanted(self, fault: Fault) -> list[Selection]:
        if self.chosen is None:
            return list(self.baseline)
        return [selection for selection in self.chosen.get(fault.key, ())
                if selection in self.baseline]

    def _worth(self, fault: Fault, selection: Selection, number: int) -> tuple:
        program = selection.program
        if self.chosen is not None:
            return (-1, number)  # before other faults are compiled: verdicts come as time passes
        module = fault.file.split("/")[1]
        near = is_near(fault, program)
        neighbours = {"gemm": "experts", "quant": "experts", "activation": "experts",
                      "core": "layer", "placement": "layer", "checkpoint": "conformance"}
        beside = program.startswith(f"tests/{neighbours.get(module, 'layer')}/")
        apart = fault.is_cuda != uses_gpu(program)
        return (1 + (0 if near else 1 if beside else 2) + (2 if apart else 0),
                self.baseline[selection].seconds)

    def _put_selection(self, fault: Fault, selection: Selection, number: int,
                       overlay: pathlib.Path, made: dict[str, pathlib.Path],
                       own: list[str]) -> None:
        program = selection.program
        baseline = self.baseline[selection]
        shards = 1 if selection.cases else max(1, min(8, round(baseline.seconds / SHARD_SECONDS)))
        target = overlay / "programs" / str(number) / program
        tool = target.with_name("planted_tool")
        # These tests start the tool, which has the fault as well.
        environment = {"CONCLAVE_TEST_TOOL": str(tool)} if program.endswith(TOOL_TESTS) else {}
        linking = threading.Lock()
        state = {"left": shards, "linked": False}

        def linked() -> bool:
            with linking:
                if not state["linked"]:
                    replaced = dict(made)
                    for name in own:
                        replaced[name] = self.tree.compile(name, overlay, fault.file,
                                                           self._limit(COMPILE_LIMIT))
                    self.tree.link(program, replaced, target, self._limit(COMPILE_LIMIT))
                    if environment:
                        self.tree.link(TOOL, replaced, tool, self._limit(COMPILE_LIMIT))
                    state["linked"] = True
                return True

        def run_shard(index: int) -> None:
            result = self.results[id(fault)]
            if result.status == "unfinished":
                begin = time.monotonic()
                limit = self._limit(5 * baseline.seconds / shards + 30)
                try:
                    linked()
                    outcome = run_program([*selection.under, str(target)], self.tree.root, limit,
                                          (index, shards), baseline.failing, selection.cases,
                                          environment=environment)
                    if outcome.how == "timed out" and time.monotonic() > self.deadline:
                        return
                    self._judge(fault, program, outcome)
                except Failed as error:
                    if time.monotonic() > self.deadline:
                        return
                    result.status, result.how = "broken", str(error)[-600:]
                    self.say(f"broken    {fault.key}: {str(error)[-300:]}")
                result.seconds += time.monotonic() - begin
            with self.lock:
                state["left"] -= 1
                if state["left"] == 0:
                    result.left -= 1
                    result.passed.append(str(selection))
                    target.unlink(missing_ok=True)
                    tool.unlink(missing_ok=True)
                if result.left == 0:
                    shutil.rmtree(overlay, ignore_errors=True)

        for index in range(shards):
            self.put(self._worth(fault, selection, number), lambda index=index: run_shard(index),
                     uses_gpu(program))

    def _judge(self, fault: Fault, program: str, outcome: Outcome) -> None:
        result = self.results[id(fault)]
        if outcome.how == "passed":
            return
        with self.lock:
            if result.status == "found":
                return
            result.status, result.how = "found", outcome.how
            result.program, result.case = program, outcome.cases[0]
        done = sum(1 for other in self.results.values() if other.status != "unfinished")
        self.say(f"found     {fault.key}: {outcome.how} {outcome.cases[0]} "
                 f"({pathlib.Path(program).name}; {done} of {len(self.faults)})")


def is_near(fault: Fault, program: str) -> bool:
    """Whether the program tests the module of the fault."""
    module = "tool" if fault.file.startswith("apps/") else fault.file.split("/")[1]
    return program.startswith(f"tests/{module}/")


def uses_gpu(program: str) -> bool:
    """By the names of the programs that launch kernels; the plans' tests need no GPU."""
    name = pathlib.Path(program).name
    return name != "cuda_plan_test" and ("cuda" in name or name.startswith("device_"))
