"""Drawn cases of one backend, judged by every invariant."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

from specverify.first_contact.memory import memory_figures
from specverify.isolation import door
from specverify.isolation.backend_spec import BackendSpec
from specverify.plan import drawn_dtypes
from specverify.properties.invariants import ALL
from specverify.properties.strategies import cases
from specverify.properties.strategies.settings import explore
from specverify.properties.tally import Failure
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.session import Mate
from specverify.reports import bundle
from specverify.setup.environment import environment

LEFT = "left"
"""The figure of a part that counts its items which the time did not reach."""


def rows_computed(case: Case) -> int:
    """About how many rows of layers a run computes: every layer for each token of every request."""
    requests = [(case.prompt, case.stops), *((mate.prompt, mate.stops) for mate in mates_of(case))]
    layers = case.model.architecture.layers if isinstance(case.model, Seeded) else 1
    return layers * sum(len(prompt) + stops.max_new_tokens for prompt, stops in requests)


def mates_of(case: Case) -> tuple[Mate, ...]:
    """The other requests of a case's session; none without one."""
    return () if case.session is None else case.session.mates


def judge_drawn_cases(
    device: str, backend: str, count: int, begin: int, folder: Path, until: float
) -> tuple[bool, dict[str, Any]]:
    """Whether a case differs; the counts of outcomes, the fallbacks, the seconds of forwards, and what memory is left.

    Short cases come first: they tell as much, and where a case takes minutes the time is spent on many. None begins
    that would not end in time at the pace of those before it.

    Args:
        device: cuda or npu.
        backend: Its name.
        count: How many cases.
        begin: The number of the first; others are others.
        folder: Where bundles are saved.
        until: The time of `time.monotonic` at which the cases must have ended; LEFT counts those that did not begin.

    Raises:
        Unavailable: The backend cannot be opened.
    """
    with door.open_backend(BackendSpec(backend)) as opened:
        declared = opened.declaration
        drawn: dict[Case, None] = {}

        def collect(case: Case) -> None:
            drawn.setdefault(case)

        explore(begin, count, cases(drawn_dtypes(declared.dtypes), within=declared), collect)
        subject = opened.subject()
        oracle = Oracle()
        outcomes: Counter[str] = Counter()
        fallbacks: Counter[str] = Counter()
        differing: list[str] = []
        forward_s = 0.0
        slowest_s = 0.0
        left = 0
        rows = 0
        judged_s = 0.0
        for case in sorted(drawn, key=rows_computed):
            expected_s = judged_s * rows_computed(case) / max(rows, 1)
            if time.monotonic() + expected_s >= until:
                left += 1
                continue
            began = time.perf_counter()
            verdict = judge(case, ALL, oracle, subject)
            case_s = time.perf_counter() - began
            rows += rows_computed(case)
            judged_s += case_s
            slowest_s = max(slowest_s, case_s)
            outcomes.update(verdict.outcomes.values())
            fallbacks.update(verdict.fallbacks)
            forward_s += verdict.forward_s
            if verdict.first is not None:
                file = bundle.save(folder, Failure(verdict, verdict.first, case.id, backend=backend), environment())
                differing.append(f"{file.name}: {verdict.first.invariant}: {str(verdict.first.observed)[:200]}")
        figures = {
            "cases": len(drawn) - left,
            LEFT: left or None,
            "outcomes": dict(outcomes),
            "fallbacks": dict(fallbacks.most_common(10)),
            "forward_s": round(forward_s, 3),
            "slowest_s": round(slowest_s, 3),
            "free_mb_beside_engine": memory_figures(device).get("free_mb"),
            "differing": differing,
        }
    return bool(differing), figures
