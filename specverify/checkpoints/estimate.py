"""The time of a run on a checkpoint, from the speed of its first steps."""

import time
from dataclasses import replace

from specverify.properties.verdict.invariant import Oracle
from specverify.properties.verdict.subject import NoTrace, Subject
from specverify.reference.case import Case

FEW, MORE = 2, 3
"""Steps of the two runs that are timed, after a first step has read the weights and the prompt."""

WORTH = 40
"""Tokens of a whole run below which nothing is timed: the run takes hardly longer."""


def estimate(first: Case, total: int, new_tokens: int, oracle: Oracle, subject: Subject) -> str:
    """One line: the measured seconds of a step, and of the whole run if each step emits one token.

    Drafted tokens that are accepted make a run faster, invariants that run a case again make it slower. The line is
    empty for a small run, and where the backend gives no trace; the first case will then say why.
    """
    if total * new_tokens < WORTH:
        return ""
    began = time.monotonic()
    try:
        for run in (subject, oracle):
            run(replace(first, steps=1))
        reading = time.monotonic() - began
        few, more = ([_seconds(run, replace(first, steps=steps)) for run in (oracle, subject)] for steps in (FEW, MORE))
    except NoTrace:
        return ""
    step = [max(0.0, long - short) / (MORE - FEW) for short, long in zip(few, more, strict=True)]
    total_s = total * (sum(few) + max(0, new_tokens - FEW) * sum(step))
    return (
        f"{total} cases of up to {new_tokens} tokens: about {_duration(total_s)}; reading the weights and the first "
        f"step took {reading:.1f} s, a step takes {step[0]:.2f} s in the oracle and {step[1]:.2f} s in the backend"
    )


def _seconds(run: Oracle | Subject, case: Case) -> float:
    began = time.monotonic()
    run(case)
    return time.monotonic() - began


def _duration(seconds: float) -> str:
    """`47 s`, `12 min` or `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
