"""The calibration of whole runs: thousands of simulated runs of one sampler, with every bet that generations make."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import logsumexp

from specverify.properties.laws.sampled.draft_faults import GROUPS, RESIDUAL, LawUnderFault, payments
from specverify.properties.laws.sampled.gate import ALPHA_RUN, log_evidence
from specverify.properties.laws.sampled.links import Links, Trial
from specverify.reference.trace import Array

WIDTHS = (3, 16)
"""Fewest and most tokens of a vocabulary."""

NOISE = 2e-5
"""How far a logit of the engine may lie from the oracle's."""

TOKENS = 8
"""Tokens of a text."""

SETTINGS = 3
"""Temperatures of a run, each a stream beside the one over all of them."""


def gains_of(p: Array, q: Array, place: int, groups: tuple[str, ...]) -> Array:
    """What each bet gains by each token of one context [V, bets]: the links' bets, then the groups'."""
    rows = []
    bets = {name: pays for name, pays in payments(p, q, place).items() if name in groups}
    for token in range(len(p)):
        links = Links({name: GROUPS[name] for name in groups})
        links.add(Trial(p, replacement=token, noise=NOISE, bets=bets))
        rows.append([*links.parts, *(log_e for group in links.groups for log_e in group.log_es)])
    return np.array(rows)


def calibrate_streams(
    runs: int = 5_000,
    cases: int = 20,
    texts: int = 4,
    seed: int = 0,
    fault: LawUnderFault | None = None,
    reach: Callable[[int], float] = lambda place: 1.0,
    groups: tuple[str, ...] = tuple(GROUPS),
) -> dict[str, Any]:
    """Simulate runs of `--focus distribution` on a black box whose draft is known, and put the evidence together.

    Each case has TOKENS contexts, one for each place of its texts, each with laws p and q of its own; the runs share
    the contexts and draw their tokens on coins of their own. Evidence of tests, player and streams is put together as
    `specverify.properties.streams.run_evidence` does.

    Args:
        runs: Number of runs.
        cases: Cases of a run.
        texts: Texts of a case.
        seed: Of contexts and coins.
        fault: The law of a token under a fault; None for a right sampler.
        reach: Share of the draws that the fault reaches, by their place in the text.
        groups: The groups of bets on faults of the draft.

    Returns:
        runs, cases, draws of a run, seed; mean_e and its standard error; tails: for 20 and 100, the share of runs whose
        evidence reaches it, and Markov's bound; largest: the largest logarithm of a run's evidence; median; red: share
        of runs that reach 1 / ALPHA_RUN; groups: for each group, the largest logarithm of its stream and the share of
        runs whose stream reaches 100; seconds.
    """
    began = time.perf_counter()
    rng = np.random.default_rng(seed)
    links = len(Links().parts)
    by_case = np.zeros((cases, runs, links + sum(GROUPS[name] for name in groups)))
    for case in range(cases):
        for place in range(TOKENS):
            width = int(rng.integers(WIDTHS[0], WIDTHS[1] + 1))
            logits = rng.normal(0.0, 1.5, width)
            p, q = (np.exp(row) / np.exp(row).sum() for row in (logits, logits + rng.normal(0.0, 1.0, width)))
            gains = gains_of(p, q, place, groups)
            law = p if fault is None else p + reach(place) * (fault(p, q) - p)
            drawn = rng.choice(width, size=(texts, runs), p=np.maximum(law, 0.0) / np.maximum(law, 0.0).sum())
            by_case[case] += gains[drawn].sum(axis=0)
    evidence, streams = _evidence(by_case, links, groups)
    return {
        "runs": runs,
        "cases": cases,
        "draws": cases * texts * TOKENS,
        "seed": seed,
        "mean_e": float(np.exp(evidence).mean()) if fault is None else None,
        "standard_error": float(np.exp(evidence).std(ddof=1) / np.sqrt(runs)) if fault is None and runs > 1 else None,
        "tails": [{"e": e, "share": float((evidence >= np.log(e)).mean()), "markov": 1.0 / e} for e in (20, 100)],
        "largest": float(evidence.max()),
        "median": float(np.median(evidence)),
        "red": float((evidence >= -np.log(ALPHA_RUN)).mean()),
        "groups": {
            name: {"largest": float(log_es.max()), "share_at_100": float((log_es >= np.log(100.0)).mean())}
            for name, log_es in streams.items()
        },
        "seconds": time.perf_counter() - began,
    }


def _evidence(by_case: Array, links: int, groups: tuple[str, ...]) -> tuple[Array, dict[str, Array]]:
    """Logarithms of the evidence of each run [runs], and of the stream of each group [runs]."""
    ends = np.cumsum([links, *(GROUPS[name] for name in groups)])
    parts = dict(zip(groups, np.split(by_case, ends[:-1], axis=2)[1:], strict=True))
    # The draft link and the accept link have no trials here, and keep an e-value of 1.
    log_es = [*_by_link(by_case[..., :links]), *(_mean(parts[name]) for name in parts if name == RESIDUAL)]
    tests = logsumexp(np.stack(log_es), axis=0) - np.log(len(log_es))
    every = {name: _mean(sums.sum(axis=0)) for name, sums in parts.items()}
    whole_mean = _mean(by_case[..., :links].sum(axis=0))
    settings = [_mean(by_case[number::SETTINGS, :, :links].sum(axis=0)) for number in range(SETTINGS)]
    streams = np.stack([whole_mean, *settings, *every.values()])
    evidence = [log_evidence(tests[:, run], streams=streams[:, run].tolist()) for run in range(tests.shape[1])]
    return np.array(evidence), every


def _by_link(parts: Array) -> list[Array]:
    """The logarithm of the e-value of each link [cases, runs], from those of all links' bets."""
    sizes = [sums.size for sums in Links()._sums.values()]
    return [_mean(sums) for sums in np.split(parts, np.cumsum(sizes)[:-1], axis=2)]


def _mean(log_es: Array) -> Array:
    """The logarithm of the mean over the last axis."""
    return np.asarray(logsumexp(log_es, axis=-1) - np.log(log_es.shape[-1]))
