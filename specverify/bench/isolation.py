"""The command `bench isolation`: the cost of a separate process for a backend.

As many workers as in a run of `diff` judge at the same time. Each worker judges each of its cases on a backend in the
worker's process and on one in a process of its own, in turn.
"""

import multiprocessing as mp
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from typing import Any

from specverify.campaign.case_stream import Stream
from specverify.campaign.threads import for_workers
from specverify.campaign.worker import make_collections_rare
from specverify.isolation.backend_spec import BackendSpec
from specverify.isolation.isolated import Isolated
from specverify.plan import default_jobs, drawn_dtypes
from specverify.properties.invariants import ALL
from specverify.properties.verdict.invariant import taking_turns
from specverify.properties.verdict.judge import judge
from specverify.reference.oracle.decoder import Oracle
from specverify.setup.subjects import open_planted, subject_of

SPENT = ("drawing_s", "here_s", "isolated_s", "here_cpu_s", "isolated_cpu_s")
"""The seconds that a worker measures."""


def measure(backend: str, count: int, number: int, jobs: int | None = None) -> dict[str, Any]:
    """Judge cases of `diff` on a backend in the judge's process and on one in a process of its own, in turn.

    Each of `jobs` workers judges its share of `count` cases, those that a worker of `diff` with the same seed draws
    first. With as many workers as `diff` has by default (`jobs`), every core is busy, so that an engine's process takes
    the core that its waiting judge leaves. The processor time that a case takes is then the cost of the run; on idle
    cores it would also hold the time in which a core wakes up.

    Returns:
        backend, cases, jobs; drawing_s, here_s and isolated_s (judging alone, wall time), summed over the workers;
        ratio: (drawing_s + isolated_s) over (drawing_s + here_s); here_cpu_s and isolated_cpu_s (processor time of all
        processes), and cpu_ratio, defined alike.
    """
    jobs = jobs or default_jobs("cpu")
    share = -(-count // jobs)
    total: Counter[str] = Counter()
    with for_workers(1), ProcessPoolExecutor(jobs, mp.get_context("spawn")) as workers:
        for part in workers.map(_measure_share, [backend] * jobs, [share] * jobs, range(number, number + jobs)):
            total.update(part)
    ratios = {
        name: (total["drawing_s"] + total[f"isolated{kind}"]) / (total["drawing_s"] + total[f"here{kind}"])
        for name, kind in (("ratio", "_s"), ("cpu_ratio", "_cpu_s"))
    }
    seconds = {name: total[name] for name in SPENT}
    return {"backend": backend, "cases": int(total["cases"]), "jobs": jobs, **seconds, **ratios}


def _measure_share(backend: str, count: int, number: int) -> dict[str, float]:
    """One worker's cases and SPENT.

    The order of the two sides alternates from case to case. Each has an oracle of its own, so that neither profits from
    oracle runs that the other has cached. Cases are drawn once, and the drawing time counts for both.
    """
    import torch

    # One thread, as in a worker of `diff` on built-in models.
    torch.set_num_threads(1)
    opened = open_planted(backend, None)
    here, declared = subject_of(opened), opened.declaration
    began = time.perf_counter()
    interval = declared.variant_interval
    drawn = list(islice(Stream(number, drawn_dtypes(declared.dtypes), interval, within=declared), count))
    spent = dict.fromkeys(SPENT, 0.0) | {"drawing_s": time.perf_counter() - began, "cases": len(drawn)}
    make_collections_rare()  # as a worker of `diff` does
    with Isolated(BackendSpec(backend)) as apart:
        # Opening the backend has used processor time already, which does not count.
        began_there = apart.processor_s
        sides = [("here", here, Oracle()), ("isolated", apart.subject(), Oracle())]
        for place, case in enumerate(drawn):
            for name, subject, oracle in sides if place % 2 else reversed(sides):
                began, busy = time.perf_counter(), time.process_time()
                judge(case, taking_turns(case, ALL, here.pace), oracle, subject)
                spent[f"{name}_s"] += time.perf_counter() - began
                spent[f"{name}_cpu_s"] += time.process_time() - busy
        spent["isolated_cpu_s"] += apart.processor_s - began_there
    return spent
