"""The command `bench throughput`: cases judged per second, and the overhead.

The overhead is the wall time over the time in the backend's own forwards.
"""

import time
from typing import Any

from specverify.plan import drawn_dtypes
from specverify.properties.invariants import ALL
from specverify.properties.strategies import cases
from specverify.properties.strategies.settings import explore
from specverify.properties.tally import Tally
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.invariant import taking_turns
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.oracle.decoder import Oracle
from specverify.setup.subjects import open_planted, subject_of


def throughput(backend: str, count: int, number: int, dtypes: tuple[str, ...] = ()) -> dict[str, Any]:
    """Draw and judge `count` cases in this process, as one worker of `diff` does.

    Returns:
        cases, seconds, cases_per_second, drawing_s (strategies), judging_s, forward_s (inside the backend's own
        forwards), runs (of the backend), overhead (seconds over forward_s: the ratio to keep at 2 or below).
    """
    import torch

    # One thread, as in a worker of `diff` on built-in models.
    torch.set_num_threads(1)
    opened = open_planted(backend, None)
    declared, subject, oracle, tally = opened.declaration, subject_of(opened), Oracle(), Tally(backend)
    judging = 0.0

    def judge_case(case: Case) -> None:
        nonlocal judging
        began = time.perf_counter()
        verdict: Verdict = judge(case, taking_turns(case, ALL, subject.pace), oracle, subject)
        judging += time.perf_counter() - began
        tally.add(verdict)

    began = time.perf_counter()
    explore(number, count, cases(dtypes or drawn_dtypes(declared.dtypes), within=declared), judge_case)
    seconds = time.perf_counter() - began
    return {
        "backend": backend,
        "cases": tally.cases,
        "seconds": seconds,
        "cases_per_second": tally.cases / seconds,
        "drawing_s": seconds - judging,
        "judging_s": judging,
        "forward_s": subject.forward_s,
        "runs": subject.runs,
        "overhead": seconds / subject.forward_s,
    }
