"""The measure `search`: how many ordinary cases it takes until each condition appears under which faults show."""

import statistics
import time
from itertools import islice
from typing import Any

from specverify.campaign.case_stream import Stream
from specverify.plan import default_dtypes
from specverify.properties.strategies.conditions import CONDITIONS

SEARCHES = 7
"""Searches, each with a seed of its own, whose medians are told."""


def measure(cases: int, number: int, searches: int = SEARCHES) -> dict[str, Any]:
    """Draw `cases` cases in each of `searches` searches, as `diff` draws them, and look for every condition.

    Nothing is judged and no backend runs; what a request accepts is the oracle's word.

    Returns:
        rows: for each condition its name, sentence, share of all cases, and `first`, the median over the searches of
        the first case that is an example (None where fewer than half of them met one); cases, searches, seed, seconds.
    """
    began = time.perf_counter()
    firsts: dict[str, list[float]] = {condition.name: [] for condition in CONDITIONS}
    counts = dict.fromkeys(firsts, 0)
    total = 0
    for turn in range(searches):
        first_cases = dict.fromkeys(firsts, float("inf"))
        drawn = Stream(1000 * number + turn, default_dtypes("cpu-eager"))
        for index, case in enumerate(islice(drawn, cases), 1):
            total += 1
            for condition in CONDITIONS:
                if condition.is_met(case):
                    counts[condition.name] += 1
                    first_cases[condition.name] = min(first_cases[condition.name], index)
        for name, earliest in first_cases.items():
            firsts[name].append(earliest)
    rows = []
    for condition in CONDITIONS:
        first = statistics.median_low(firsts[condition.name])
        rows.append(
            {
                "name": condition.name,
                "sentence": condition.sentence,
                "share": counts[condition.name] / total,
                "first": None if first == float("inf") else int(first),
            }
        )
    return {
        "rows": rows,
        "cases": cases,
        "searches": searches,
        "seed": number,
        "seconds": time.perf_counter() - began,
    }
