"""The law of plain decode's error, the measure `control`; `specverify.properties.run_statistics` has its figures."""

import time
from collections import defaultdict
from itertools import islice
from typing import Any

import numpy as np

from specverify.campaign.case_stream import Stream
from specverify.properties.invariants import ALL
from specverify.properties.run_statistics import MEAN, exactness, excess_error
from specverify.properties.verdict.finding import ControlError
from specverify.properties.verdict.judge import judge
from specverify.reference.oracle.decoder import Oracle
from specverify.setup.subjects import open_planted, subject_of


def measure(cases: int, backend: str = "cpu-eager", seed: int = 0) -> dict[str, Any]:
    """Judge `cases` drawn cases of each dtype by `attention.context-exact`.

    Returns:
        backend, cases, seconds; rows: by dtype and quantity the prompts, the architectures, mean and deviation of the
        logarithm of the ratio, the largest ratio, and the statistic of the run; red: why a clean run would differ.
    """
    began = time.perf_counter()
    invariants = tuple(invariant for invariant in ALL if invariant.name == "attention.context-exact")
    subject, oracle = subject_of(open_planted(backend, None)), Oracle()
    errors: list[ControlError] = []
    for dtype in MEAN:
        if subject.abilities is not None and dtype not in subject.abilities.dtypes:
            continue
        drawn = Stream(seed, (dtype,), subject.variant_interval, subject.abilities)
        for case in islice((case for case in drawn if case.session is None), cases):
            errors += judge(case, invariants, oracle, subject).control_errors
    logs: dict[tuple[str, str], list[float]] = defaultdict(list)
    for error in errors:
        if error.ratio > 0:
            logs[error.dtype, error.quantity].append(float(np.log(error.ratio)))
    rows = [
        {
            **vars(exactness_row),
            "mean": float(np.mean(logs[exactness_row.dtype, exactness_row.quantity])),
            "deviation": float(np.std(logs[exactness_row.dtype, exactness_row.quantity])),
            "largest": float(np.exp(max(logs[exactness_row.dtype, exactness_row.quantity]))),
        }
        for exactness_row in exactness(errors)
    ]
    seconds = time.perf_counter() - began
    return {"backend": backend, "cases": cases, "seconds": seconds, "rows": rows, "red": excess_error(errors)}
