"""The campaign: worker processes search, this process counts, records and reports; nothing finished is lost."""

import multiprocessing as mp
import os
import queue
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from properties.finding import FINISHED, Verdict
from properties.strategies.smaller import size
from properties.tally import Counts, Failure, Tally
from properties.ties import too_many, vacuous
from specverify.environment import environment
from specverify.news import Broken, Done, Opened
from specverify.plan import Plan

Arrived = Callable[[Verdict], None]

GRACE_S = 15.0
"""Seconds a worker gets to finish its case after an interrupt."""


def run(plan: Plan, arrived: Arrived, opened: Callable[[Opened], None]) -> tuple[Tally, int | None]:
    """Run `plan` in its worker processes.

    Args:
        plan: What to do.
        arrived: Called with every verdict as it arrives.
        opened: Called once, when the first worker's backend is open.

    Returns:
        The tally, and the exit code that a broken start asks for, or None.
    """
    context = mp.get_context("spawn")
    stop, found = context.Event(), context.Event()
    news: Any = context.Queue()
    began = time.monotonic()
    deadline = began + plan.time_budget_s if plan.time_budget_s else float("inf")
    tally = Tally(plan.backend, environment={**environment(), "seed": str(plan.seed), "jobs": str(plan.jobs)})
    workers = [
        context.Process(target=_work, args=(plan.slice(at), news, stop, found, deadline), daemon=True)
        for at in range(plan.jobs)
    ]
    with _threads(plan):
        for worker in workers:
            worker.start()
    code = None
    open_workers, interrupted_at = set(range(plan.jobs)), 0.0
    known = False
    while open_workers:
        try:
            worker, message = news.get(timeout=0.2)
        except queue.Empty:
            code = _bury(workers, open_workers, tally) or code
            if interrupted_at and time.monotonic() - interrupted_at > GRACE_S:
                break
            continue
        except KeyboardInterrupt:
            tally.stopped = "interrupted (Ctrl-C)"
            interrupted_at = time.monotonic()
            stop.set()
            continue
        if isinstance(message, Opened):
            tally.backend, tally.emulated = message.name, message.emulated
            tally.environment |= message.environment
            if not known:
                known = True
                tally.invariants = {name: Counts() for name in message.invariants} | tally.invariants
                opened(message)
        elif isinstance(message, Verdict):
            tally.add(message)
            arrived(message)
        elif isinstance(message, Done):
            open_workers.discard(worker)
            tally.shrink_seconds = max(tally.shrink_seconds, message.shrink_s)
            if message.failure is not None:
                tally.failures.append(message.failure)
        elif isinstance(message, Broken):
            open_workers.discard(worker)
            if message.why not in tally.errors:
                tally.errors.append(message.why)
            code = code if code is not None else message.code
    for process in workers:
        process.join(timeout=2)
        if process.is_alive():
            process.terminate()
    _conclude(tally)
    if interrupted_at:
        tally.errors.append(f"interrupted after {tally.cases} cases: what did not run is not a pass")
    if tally.stopped is None and time.monotonic() > deadline:
        tally.stopped = f"time budget of {plan.time_budget_s:g} s used up"
    tally.failures = _distinct(tally.failures)
    tally.seconds = time.monotonic() - began
    return tally, code


def _conclude(tally: Tally) -> None:
    """What only the whole run can say: ties that cannot be chance, and ties that hid too much."""
    excess = too_many(tally)
    if excess is not None:
        tally.excess_ties = excess
    why = vacuous(tally)
    if why is not None:
        tally.errors.append(why)


def _distinct(failures: list[Failure]) -> list[Failure]:
    """One failure for each located difference, at its smallest, of those that several workers met.

    A variant that broke off says least of where; it is left out where another failure says more.
    """
    best: dict[tuple[str, int], Failure] = {}
    for failure in failures:
        key = (failure.finding.invariant, failure.finding.stage)
        held = best.get(key)
        if held is None or size(failure.verdict.case) < size(held.verdict.case):
            best[key] = failure
    located = [failure for failure in best.values() if failure.finding.expected != FINISHED]
    return located or list(best.values())


def _bury(workers: list[Any], open_workers: set[int], tally: Tally) -> int | None:
    """Note workers that died without a word."""
    code = None
    for at in sorted(open_workers):
        if workers[at].exitcode is not None and workers[at].exitcode != 0:
            open_workers.discard(at)
            died = workers[at].exitcode
            how = f"signal {signal.Signals(-died).name}" if died < 0 else f"exit code {died}"
            tally.errors.append(f"worker {at} died ({how}); its unfinished cases were not judged: try --jobs 1")
            code = 3
    return code


class _threads:
    """Environment of the workers: small matrices run fastest on one BLAS thread, a real checkpoint on all."""

    NAMES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

    def __init__(self, plan: Plan) -> None:
        self._wanted = str(os.cpu_count() or 1) if plan.model else "1"
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> None:
        self._before = {name: os.environ.get(name) for name in self.NAMES}
        for name in self.NAMES:
            os.environ.setdefault(name, self._wanted)

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)


def _work(plan: Plan, news: Any, stop: Event, found: Event, deadline: float) -> None:
    """One worker process: open, search, say what was found. It leaves Ctrl-C to its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    number = plan.seed % 1000

    def stopped() -> bool:
        return stop.is_set() or found.is_set() or time.monotonic() > deadline

    from specverify import worker

    try:
        worker.work(plan, lambda message: news.put((number, message)), stopped, stop, found)
    except worker.Refused as why:
        news.put((number, Broken(str(why), why.code)))
    except Exception as why:  # a defect of ours: one line that says where, and no verdict
        at = traceback.extract_tb(why.__traceback__)[-1]
        line = f"internal error in worker {number}: {type(why).__name__}: {why} ({Path(at.filename).name}:{at.lineno})"
        news.put((number, Broken(line, 3)))
