"""The work of `selftest`: a schedule of hunts, and the report of caught faults.

Each fault is planted and hunted as `diff` searches; the report names the invariant that caught it, or says that the
fault escaped.
"""

import multiprocessing as mp
import os
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from specverify import __version__
from specverify.backends import faults
from specverify.backends.faults.fault import Fault
from specverify.campaign.threads import for_workers
from specverify.plan import SELFTEST_S, default_dtypes, default_jobs, drawing_seed
from specverify.properties.invariants import ALL
from specverify.reports.pages.selftest import CleanRun, FaultHunt, SelfTest, facts, page
from specverify.reports.progress import Progress
from specverify.reports.record import Lines
from specverify.selftest.hunt import HuntPlan, HuntResult, enter, grounds_of, hunt
from specverify.setup.files import Outputs, make_folder
from specverify.setup.selection import Unknown
from specverify.setup.subjects import check_seams

ROUNDS = ((60, True), (150, True), (150, True), (60, False), (300, True), (600, True), (150, False), (2000, True))
"""Rounds against a fault that is still at large: (cases to judge, whether through the digests of clean runs).

Short rounds come first, so that no hard fault starves the others. Rounds without them see faults that only
variants of a case show. Each round starts where the one before ended, in the order in which `diff --jobs 1` with the
same seed draws its cases.
"""

CLEAN_EVERY = 16
"""One hunt in this many is followed by a hunt without a fault."""

CLEAN_CASES = 8
"""Cases of a hunt without a fault; they are judged by all invariants whose turn it is."""

SHRINK_S = 2.5
"""Seconds for shrinking one failing case."""


@dataclass(frozen=True)
class Options:
    """The options as typed."""

    globs: tuple[str, ...] = ()
    backend: str | None = None
    budget_s: float = SELFTEST_S
    seed: int = 0
    jobs: int | None = None


def matching_faults(globs: tuple[str, ...]) -> list[Fault]:
    """The faults that any of `globs` matches, by name or catalogue id; all without globs.

    Raises:
        Unknown: A glob matches no fault.
    """
    for glob in globs:
        if not any(fnmatchcase(name, glob) for fault in faults.ALL for name in (fault.name, fault.id)):
            raise Unknown(f"--fault {glob}: no fault matches; `specverify list faults` names them")
    patterns = globs or ("*",)
    return [
        fault
        for fault in faults.ALL
        if any(fnmatchcase(name, glob) for glob in patterns for name in (fault.name, fault.id))
    ]


def selftest(options: Options, outputs: Outputs, folder: Path) -> int:
    """Run the self-test; return 1 if a fault escapes or a clean run differs, 3 if nothing could be judged, else 0.

    Each hunt is appended to `selftest.jsonl` in `folder` as it ends, so that an interrupted test loses nothing.

    Raises:
        Unknown: A fault glob matches nothing, or the backend exposes no seams.
        UnknownBackend, Unavailable: The backend is unknown, or not available on this machine.
    """
    # Checked before any hunt, so that a wrong backend is one line and not one missing result for each fault.
    if options.backend is not None:
        check_seams(options.backend)
    chosen_faults = matching_faults(options.globs)
    names = [fault.name for fault in chosen_faults]
    began = time.time()
    report = SelfTest(
        [FaultHunt(fault.name, fault.id, fault.stage.word, dict(fault.harmless)) for fault in chosen_faults],
        invariants=[invariant.name for invariant in ALL],
    )
    make_folder(folder)
    with Lines(folder / "selftest.jsonl") as lines, Progress(None) as progress:
        for result in _results(names, options, began + options.budget_s, report):
            _note(report, result)
            lines.append(vars(result))
            progress.advance(result.cases, failures=int(result.caught))
    report.seconds = time.time() - began
    outputs.write(page(report), facts(report), lambda: _html_page(report))
    return report.exit_code


def _html_page(report: SelfTest) -> bytes:
    from specverify.reports.html.selftest import selftest_page  # Jinja is imported only for a page

    return selftest_page(report, __version__)


def _results(names: list[str], options: Options, until: float, report: SelfTest) -> Iterator[HuntResult]:
    """The result of each hunt as it ends: rounds over the faults still at large, with clean hunts in between."""
    backends = grounds_of(names, options.backend)
    jobs = options.jobs or default_jobs("cpu")
    # Fresh processes: they read the thread settings of `for_workers` when they import NumPy.
    context = mp.get_context("spawn")
    stop = context.Event()
    with for_workers(1), ProcessPoolExecutor(jobs, context, initializer=enter, initargs=(os.getpid(), stop)) as pool:
        course = Course(names, backends, options.seed, until)
        pending = {pool.submit(hunt, task) for task in course.first()}
        try:
            while pending:
                finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in finished:
                    yield (result := future.result())
                    pending |= {pool.submit(hunt, task) for task in course.after(result)}
                pending |= {pool.submit(hunt, task) for task in course.spare(jobs - len(pending))}
                if not course.at_large and not course.clean_due:
                    stop.set()  # all faults are caught: end the rounds that still run beside the last one
        except BrokenProcessPool:
            report.errors.append("a worker died: its hunts were not judged; try --jobs 1, and --fault to find which")
        except KeyboardInterrupt:
            report.errors.append("interrupted: what did not run is not a pass")
            stop.set()
            for future in pending:
                future.cancel()


class Course:
    """The order of hunts: the next round of a fault queues behind the waiting hunts, so that no worker is idle."""

    def __init__(self, names: list[str], backends: dict[str, str], seed: int, until: float) -> None:
        self._names = names
        self._backends = backends
        self._seed = seed
        self._until = until
        self._round = dict.fromkeys(names, 0)
        self.at_large = set(names)
        self.clean_due = 0
        self._num_hunts = 0

    def first(self) -> list[HuntPlan]:
        """The first round, ordered by backend."""
        # Workers remember the digests and the streams of a backend, so that its faults run one after the other.
        ordered = sorted(self._names, key=lambda name: self._backends[name])
        return [task for name in ordered for task in self._hunts(name)]

    def after(self, result: HuntResult) -> list[HuntPlan]:
        """The hunts that follow a result: the fault's next round, if no case showed the fault and time is left."""
        self.clean_due -= result.fault is None
        if result.caught or result.missing is not None:
            self.at_large.discard(result.fault or "")
        if result.fault not in self.at_large or time.time() > self._until:
            return []
        return self._next(result.fault)

    def spare(self, workers: int) -> list[HuntPlan]:
        """Hunts for idle workers: later rounds of faults at large, beside the rounds that still run."""
        if workers <= 0 or time.time() > self._until:
            return []
        least_hunted = sorted(self.at_large, key=lambda name: (self._round[name], name))[:workers]
        return [task for name in least_hunted for task in self._next(name)]

    def _next(self, name: str) -> list[HuntPlan]:
        self._round[name] += 1
        return self._hunts(name) if self._round[name] < len(ROUNDS) else []

    def _hunts(self, name: str) -> list[HuntPlan]:
        number, backend = self._round[name], self._backends[name]
        cases, sieved = ROUNDS[number]
        skip = sum(count for count, _ in ROUNDS[:number])
        dtypes = default_dtypes(backend)
        plans = [HuntPlan(name, backend, drawing_seed(self._seed), cases, dtypes, SHRINK_S, self._until, sieved, skip)]
        self._num_hunts += 1
        # The very first hunt has one beside it, so that every self-test has a clean run.
        if self._num_hunts % CLEAN_EVERY == 1:
            # Each clean hunt has a seed of its own, so that clean runs see ever new cases.
            clean = drawing_seed(self._seed, self._num_hunts)
            self.clean_due += 1
            plans.append(HuntPlan(None, backend, clean, CLEAN_CASES, dtypes, SHRINK_S, self._until))
        return plans


def _note(report: SelfTest, result: HuntResult) -> None:
    """Enter the result of one hunt into the report."""
    report.errors += [line for line in result.internal if line not in report.errors]
    if result.fault is None:
        report.clean_runs.append(CleanRun(result.backend, result.cases, result.by, result.case, result.missing))
        return
    row = next(row for row in report.faults if row.name == result.fault)
    if row.caught:
        return  # another round, which ran beside this one, has caught the fault
    row.backend = result.backend
    row.missing = result.missing
    # The number of the case in `diff`'s order, or the furthest case so far: rounds may end out of order.
    row.cases = result.skip + result.cases if result.caught else max(row.cases, result.skip + result.cases)
    row.seconds += result.seconds
    row.cpu += result.cpu
    if result.caught:
        row.caught = True
        row.by = result.by
        row.stage_named = result.stage
        row.case = result.case
        row.nodes = result.nodes
        row.actions = result.actions
        row.failed = result.failed
