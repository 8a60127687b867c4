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

from properties.causes import by_cause
from properties.finding import Verdict
from properties.tally import Counts, Tally, condemned, nothing_fused
from properties.ties import too_many, vacuous
from specverify.environment import environment
from specverify.news import Broken, Done, Opened
from specverify.plan import Plan
from specverify.threads import ForWorkers

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
    with ForWorkers((os.cpu_count() or 1) if plan.model else 1):
        for worker in workers:
            worker.start()
    code = None
    open_workers = set(range(plan.jobs))
    known = False
    interrupt = _Interrupt(stop)
    while open_workers:
        try:
            worker, message = news.get(timeout=0.2)
        except queue.Empty:
            code = _bury(workers, open_workers, tally) or code
            if interrupt.at and time.monotonic() - interrupt.at > GRACE_S:
                break
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
            if code == 2:
                stop.set()  # what is wrong with the input is wrong for every worker
    for process in workers:
        process.join(timeout=2)
        if process.is_alive():
            process.terminate()
    _conclude(tally)
    if interrupt.done():
        tally.stopped = "interrupted (Ctrl-C)"
        tally.errors.append(f"interrupted after {tally.cases} cases: what did not run is not a pass")
    if tally.stopped is None and time.monotonic() > deadline:
        tally.stopped = f"time budget of {plan.time_budget_s:g} s used up"
    tally.failures = by_cause(tally.failures)
    tally.seconds = time.monotonic() - began
    return tally, code


class _Interrupt:
    """Turns the first Ctrl-C into a request to stop, so that no report is cut short; the second one is final."""

    def __init__(self, stop: Event) -> None:
        self.at = 0.0
        self._stop = stop
        self._before = signal.signal(signal.SIGINT, self._arrived)

    def _arrived(self, *_: object) -> None:
        if self.at:
            raise KeyboardInterrupt
        self.at = time.monotonic()
        self._stop.set()

    def done(self) -> bool:
        """Hand Ctrl-C back, and say whether it was pressed."""
        signal.signal(signal.SIGINT, self._before)
        return self.at > 0


def _conclude(tally: Tally) -> None:
    """What only the whole run can say: ties or samples that cannot be chance, and ties that hid too much."""
    excess = too_many(tally)
    if excess is not None:
        tally.excess_ties = excess
    tally.excess_evidence = condemned(tally)
    tally.errors += [why for why in (vacuous(tally), nothing_fused(tally)) if why is not None]


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
