"""The command `bench isolation`: what a process of its own costs a backend, each case judged here and there in turn."""

import time
from typing import Any

from hypothesis import given, seed

from properties.exploring import exploring
from properties.invariant import taking_turns
from properties.invariants import ALL
from properties.judge import judge
from properties.strategies import cases
from properties.subject import Subject
from reference.case import Case
from reference.decoder import Oracle
from specverify.isolation import door
from specverify.isolation.wanted import Wanted
from specverify.opening import open_planted, subject_of
from specverify.plan import default_dtypes


def measure(backend: str, count: int, number: int) -> dict[str, Any]:
    """Judge `count` drawn cases on a backend in this process and on one in a process of its own, in turn.

    Which of the two comes first alternates from case to case; each has an oracle of its own, so that neither finds
    answers that the other paid for. Drawing is done once, and counted for both.

    Returns:
        backend, cases, drawing_s, here_s and isolated_s (judging alone), and ratio: (drawing_s + isolated_s) over
        (drawing_s + here_s), which is what the whole of a worker's time grows by.
    """
    import torch

    torch.set_num_threads(1)
    drawn: list[Case] = []
    began = time.perf_counter()
    seed(number)(exploring(count)(given(cases(default_dtypes(backend)))(lambda case: drawn.append(case))))()
    drawing = time.perf_counter() - began
    here = subject_of(open_planted(backend, None))
    spent = {"here_s": 0.0, "isolated_s": 0.0}
    with door.opened(Wanted(backend)) as apart:
        sides = [("here_s", here, Oracle()), ("isolated_s", apart.subject(), Oracle())]
        for at, case in enumerate(drawn):
            for name, subject, oracle in sides if at % 2 else reversed(sides):
                spent[name] += _judging(case, subject, oracle)
    ratio = (drawing + spent["isolated_s"]) / (drawing + spent["here_s"])
    return {"backend": backend, "cases": len(drawn), "drawing_s": drawing, **spent, "ratio": ratio}


def _judging(case: Case, subject: Subject, oracle: Oracle) -> float:
    began = time.perf_counter()
    judge(case, taking_turns(case, ALL), oracle, subject)
    return time.perf_counter() - began
