"""The measure `calibration`: thousands of black-box tests of correct samplers, which must not raise an alarm."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import kstest

from specverify.properties.laws.sampled.cells import LawTest
from specverify.properties.laws.sampled.evalue import log_evalue
from specverify.properties.laws.sampled.gate import ALPHA_RUN, culprits, log_evidence
from specverify.properties.laws.sampled.screen import Betting, Plan, g_test, plan, play
from specverify.reference.trace import Array

CELLS = (4, 64)
"""Fewest and most cells of a test."""

TV = 0.05
"""What every test is planned to show."""

BATCH = 2_000
"""Tests whose first stage is computed at once."""


LARGEST = 300.0
"""Logarithm at which e-values are cut for their mean alone, which no correct sampler comes near."""


def is_red(log_es: Array, alpha_run: float = ALPHA_RUN, tests: int | None = None) -> bool:
    """Whether the run's evidence is 1 / alpha_run or more; arguments and errors are those of `log_evidence`."""
    return log_evidence(log_es, tests) >= -float(np.log(alpha_run))


def run_is_red(law_tests: Sequence[LawTest], tests: int | None = None) -> bool:
    """Whether the tests of a run, of any number of laws, are red together."""
    return is_red(np.array([law_test.outcome.log_e for law_test in law_tests]), tests=tests)


def calibrate(tests: int = 10_000, seed: int = 0, tv: float = TV, bias: float = 0.0) -> dict[str, Any]:
    """Run `tests` black-box tests through screen-then-bet, as `lossless.distribution` does.

    Each has a law of its own: 4 to 64 cells, Dirichlet of concentration .2, 1 or 5, a third with cells of 1e-12 to
    1e-4, a third with impossible cells. The first stage is computed for many tests at once; what the screen holds back
    goes on alone, from the same counts.

    Args:
        tests: How many; also what the bar counts.
        seed: Of laws and samples.
        tv: The total variation that each is planned to show.
        bias: Total variation by which the sampler misses its law; above 0, the alarms that ought to come.

    Returns:
        tests, seed, tv, bias, alpha_run; mean_e and its standard error; tails: for 20 and 100, the share of tests whose
        e-value reaches it, and Markov's bound; screen_ks: statistic and p-value of the screen's p-values against the
        uniform law (they come from the chi-square limit on discrete counts, so they are nearly uniform, not exactly);
        flagged, suspect, failed: tests held back, undecided, and over the bar alone; red: the gate on the sum of all
        e-values; culprits; samples: drawn in all; seconds.
    """
    if tests < 1 or not 0.0 <= bias < 0.5:
        raise ValueError(f"{tests} tests with a bias of {bias} are no calibration")
    began = time.perf_counter()
    rng = np.random.default_rng(seed)
    log_es, screened = np.empty(tests), np.empty(tests)
    verdicts = {"pass": 0, "suspect": 0, "fail": 0}
    flagged, samples = 0, 0
    for start in range(0, tests, BATCH):
        laws = _laws(rng, min(BATCH, tests - start))
        drawn = _biased(rng, laws, bias)
        plans = [plan(int(cells), tv, tests) for cells in (laws > 0).sum(axis=1)]
        counts = rng.multinomial(np.array([test_plan.first for test_plan in plans]), drawn)
        values, p_values = log_evalue(counts, laws), g_test(counts, laws)
        for index, test_plan in enumerate(plans):
            if values[index] < test_plan.log_bar and p_values[index] > test_plan.alpha_screen:
                verdicts["pass"] += 1
                samples += test_plan.first
                continue
            flagged += 1
            values[index], verdict, n = _go_on(rng, laws[index], drawn[index], counts[index], test_plan)
            verdicts[verdict] += 1
            samples += n
        log_es[start : start + len(laws)], screened[start : start + len(laws)] = values, p_values
    es = np.exp(np.minimum(log_es, LARGEST))
    uniform = kstest(screened, "uniform")
    return {
        "tests": tests,
        "seed": seed,
        "tv": tv,
        "bias": bias,
        "alpha_run": ALPHA_RUN,
        "mean_e": float(es.mean()),
        "standard_error": float(es.std(ddof=1) / np.sqrt(tests)) if tests > 1 else 0.0,
        "tails": [{"e": e, "share": float((es >= e).mean()), "markov": 1.0 / e} for e in (20, 100)],
        "screen_ks": {"statistic": float(uniform.statistic), "p_value": float(uniform.pvalue)},
        "flagged": flagged,
        "suspect": verdicts["suspect"],
        "failed": verdicts["fail"],
        "red": is_red(log_es),
        "culprits": len(culprits(log_es)),
        "samples": samples,
        "seconds": time.perf_counter() - began,
    }


def _go_on(rng: np.random.Generator, p: Array, drawn: Array, counts: Array, how: Plan) -> tuple[float, str, int]:
    """The bet of a test that the screen held back, from the counts that the screen saw: log E, verdict, samples."""
    bet = Betting(p, how)
    bet.add(counts)
    outcome = play([bet], lambda n: [rng.multinomial(n, drawn)])[0]
    return outcome.log_e, outcome.verdict, outcome.n


def _laws(rng: np.random.Generator, tests: int) -> Array:
    """Random laws [tests, most cells], ascending: unused and impossible cells are 0 and come first.

    The largest cell is the last, because NumPy's multinomial gives it what rounding leaves over: a cell of
    probability 0 there would now and then be drawn.
    """
    fewest, most = CELLS
    cells = rng.integers(fewest, most + 1, tests)[:, None]
    used = np.arange(most) < cells
    shape = rng.choice([0.2, 1.0, 5.0], tests)[:, None]
    weights = np.where(used, rng.gamma(shape, size=(tests, most)), 0.0)
    kind = rng.integers(0, 3, tests)[:, None]
    few = np.arange(most) < 2
    tiny = weights.sum(axis=1, keepdims=True) * 10.0 ** rng.uniform(-12.0, -4.0, (tests, most))
    weights = np.where(few & (kind == 1), tiny, np.where(few & (kind == 2), 0.0, weights))
    weights = np.sort(weights, axis=1)
    # A Dirichlet of small shape underflows now and then to cells that are possible on paper only.
    weights = np.where(weights < 1e-13 * weights[:, -1:], 0.0, weights)
    laws: Array = weights / weights.sum(axis=1, keepdims=True)
    return laws


def _biased(rng: np.random.Generator, laws: Array, bias: float) -> Array:
    """The laws from which to draw: `laws`, or laws that lie `bias` away from them in total variation."""
    if bias == 0.0:
        return laws
    # From the largest cell, which has more than the bias nearly always, to the others in proportion.
    moved = np.minimum(bias, laws[:, -1:])
    other_laws = laws.copy()
    other_laws[:, -1] = 0.0
    drawn: Array = laws + moved * other_laws / other_laws.sum(axis=1, keepdims=True)
    drawn[:, -1] -= moved[:, 0]
    return drawn
