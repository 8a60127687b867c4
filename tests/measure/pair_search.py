"""The measure `pairs`: which pairs of values and events default draws reach, and after how many cases.

Nothing is judged: the engine runs each drawn case once, because events are what its run reaches.
"""

import time
from itertools import islice
from typing import Any

from specverify.backends.base import Unsupported
from specverify.campaign.case_stream import Stream
from specverify.properties.verdict.coverage.pair_coverage import PairCoverage, declared_labels, possible_pairs
from specverify.properties.verdict.coverage.pairs import labels_of_requests
from specverify.setup.subjects import open_planted

MARKS = (100, 200, 500, 1000, 2000, 5000)
"""Numbers of cases after which the share is told."""


def measure(cases: int, seeds: tuple[int, ...], backend: str = "cpu-eager") -> dict[str, Any]:
    """Draw `cases` cases of each seed as `diff` draws them on `backend`, and count the pairs that their runs have.

    Returns:
        rows: for each seed and each of MARKS the share of pairs met; missing: for each seed the pairs that never met;
        absent: the labels that no case had; declined: for each seed the cases that the engine refused, which have no
        pair; possible, cases, backend, seconds (drawing and one run of each case).
    """
    began = time.perf_counter()
    engine = open_planted(backend, None)
    declaration = engine.declaration
    possible = possible_pairs(declared_labels(declaration))
    rows, missing, absent, declined = [], {}, {}, dict.fromkeys(seeds, 0)
    for seed in seeds:
        coverage = PairCoverage(possible)
        stream = Stream(seed, declaration.dtypes, declaration.variant_interval, declaration)
        for number, case in enumerate(islice(stream, cases), 1):
            try:
                coverage = coverage.with_case(labels_of_requests(case, engine.run(case)))
            except Unsupported:
                declined[seed] += 1
            if number in MARKS or number == cases:
                rows.append({"seed": seed, "cases": number, "met": coverage.num_met, "share": coverage.share})
        missing[seed] = [str(pair) for pair in coverage.missing]
        absent[seed] = [str(label) for label in coverage.absent]
    return {
        "rows": rows,
        "missing": missing,
        "absent": absent,
        "declined": declined,
        "possible": bin(possible).count("1"),
        "cases": cases,
        "backend": backend,
        "seconds": time.perf_counter() - began,
    }
