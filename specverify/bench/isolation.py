"""The command `bench isolation`: the cost of a separate process for a backend.

Each drawn case is judged on a backend in this process and on one in a process of its own, in turn.
"""

import gc
import time
from typing import Any

from properties.invariants import ALL
from properties.strategies import cases
from properties.strategies.settings import explore
from properties.verdict.invariant import taking_turns
from properties.verdict.judge import judge
from reference.case import Case
from reference.oracle.decoder import Oracle
from specverify.isolation.isolated import Isolated
from specverify.isolation.wanted import Wanted
from specverify.plan import drawn_dtypes
from specverify.setup.subjects import open_planted, subject_of


def measure(backend: str, count: int, number: int) -> dict[str, Any]:
    """Judge `count` drawn cases on a backend in this process and on one in a process of its own, in turn.

    The order of the two alternates from case to case. Each has an oracle of its own, so that neither profits from
    oracle runs that the other has cached. Cases are drawn once, and the drawing time counts for both.

    Returns:
        backend, cases, drawing_s, here_s and isolated_s (judging alone, wall time), ratio: (drawing_s + isolated_s)
        over (drawing_s + here_s); here_cpu_s and isolated_cpu_s (processor time of all processes), and cpu_ratio,
        defined alike. cpu_ratio is the cost in a run with one worker per core, where a waiting process frees its core.
    """
    import torch

    # One thread, as in a worker of `diff` on built-in models.
    torch.set_num_threads(1)
    opened = open_planted(backend, None)
    here, declared = subject_of(opened), opened.declaration
    drawn: list[Case] = []
    began = time.perf_counter()
    explore(number, count, cases(drawn_dtypes(declared.dtypes), within=declared), lambda case: drawn.append(case))
    drawing = time.perf_counter() - began
    gc.freeze()  # as a worker does
    spent = dict.fromkeys(("here_s", "isolated_s", "here_cpu_s", "isolated_cpu_s"), 0.0)
    with Isolated(Wanted(backend)) as apart:
        # Opening the backend has used processor time already, which does not count.
        began_there = apart.processor_s
        sides = [("here", here, Oracle()), ("isolated", apart.subject(), Oracle())]
        for at, case in enumerate(drawn):
            for name, subject, oracle in sides if at % 2 else reversed(sides):
                began, busy = time.perf_counter(), time.process_time()
                judge(case, taking_turns(case, ALL), oracle, subject)
                spent[f"{name}_s"] += time.perf_counter() - began
                spent[f"{name}_cpu_s"] += time.process_time() - busy
        spent["isolated_cpu_s"] += apart.processor_s - began_there
    gc.unfreeze()
    ratios = {
        name: (drawing + spent[f"isolated{kind}"]) / (drawing + spent[f"here{kind}"])
        for name, kind in (("ratio", "_s"), ("cpu_ratio", "_cpu_s"))
    }
    return {"backend": backend, "cases": len(drawn), "drawing_s": drawing, **spent, **ratios}
