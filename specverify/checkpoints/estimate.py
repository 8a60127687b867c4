"""The time of a run on a checkpoint, from the speed of its first steps."""

import time
from dataclasses import replace

from properties.verdict.invariant import Oracle
from properties.verdict.subject import NoTrace, Subject
from reference.case import Case

STEPS = 2
"""Steps of the case that is timed, after its first step has read the weights and the prompt."""


def estimate(first: Case, total: int, new_tokens: int, oracle: Oracle, subject: Subject) -> str:
    """One line: the measured seconds of a step, and of the whole run if each step emits one token.

    Drafted tokens that are accepted make a run faster, invariants that run a case again make it slower. The line is
    empty where the backend gives no trace; the first case will then say why.
    """
    began = time.monotonic()
    try:
        for run in (subject, oracle):
            run(replace(first, steps=1))
        reading = time.monotonic() - began
        seconds = [_seconds_a_step(run, replace(first, steps=STEPS)) for run in (oracle, subject)]
    except NoTrace:
        return ""
    whole = total * new_tokens * sum(seconds)
    return (
        f"{total} cases of up to {new_tokens} tokens: about {_told(whole)}; reading the weights and the first step "
        f"took {reading:.1f} s, a step takes {seconds[0]:.2f} s in the oracle and {seconds[1]:.2f} s in the backend"
    )


def _seconds_a_step(run: Oracle | Subject, case: Case) -> float:
    began = time.monotonic()
    run(case)
    return (time.monotonic() - began) / STEPS


def _told(seconds: float) -> str:
    """`47 s`, `12 min` or `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
