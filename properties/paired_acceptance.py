"""Whether two runs on the same prompts accept drafted tokens alike: a paired test by position.

Steps of one text depend on each other, so prompts are compared and not steps. If both runs follow one law on every
prompt, nothing changes when their counts on a prompt trade places. The test trades them at random (a sign-flip test:
Fisher, The Design of Experiments, 1935) and takes the largest standardised difference over all positions, so that one
error rate holds for all of them together (Westfall and Young, Resampling-Based Multiple Testing, 1993).
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from specverify.reference.trace import Array

Prompt = TypeVar("Prompt", bound=Hashable)
"""The name of a prompt, or the id of a case."""

ALPHA = 0.001
"""The share of comparisons of equal laws that are told to differ, where no other one is asked for."""

TRADES_PER_ALPHA = 20
"""Random trades, in units of one over the error rate."""


@dataclass(frozen=True)
class AcceptCounts:
    """The counts of one run on one prompt.

    Attributes:
        accepted: For each position, how often a drafted token was accepted there.
        offered: How often one could have been: all steps of the run, or all drafted tokens.
    """

    accepted: tuple[int, ...]
    offered: int


@dataclass(frozen=True)
class Position:
    """One position in both runs.

    Attributes:
        number: From 1 on; 0 for all positions together.
        first, second: Accepted tokens over the offered ones; at 0 their sum over positions, the accepted length.
        p_value: The share of trades that show a difference as large at any position.
    """

    number: int
    first: float
    second: float
    p_value: float


@dataclass(frozen=True)
class AcceptanceTest:
    """The result of a test.

    Attributes:
        prompts: Number of prompts that both runs have.
        differing: Number of them whose counts differ.
        alpha: The error rate.
        positions: All positions together, then each.
        least_p: The smallest p-value that so many prompts can show.
    """

    prompts: int
    differing: int
    alpha: float
    positions: tuple[Position, ...]
    least_p: float

    @property
    def p_value(self) -> float:
        """The p-value of the whole test: the smallest of the positions, each of which counts all of them."""
        return min((position.p_value for position in self.positions), default=1.0)

    @property
    def verdict(self) -> str:
        """`equal` (all counts), `differs`, `agrees` (no difference is shown), or `too few` prompts to show one."""
        if not self.prompts:
            return "too few"
        if not self.differing:
            return "equal"
        if self.p_value <= self.alpha:
            return "differs"
        return "agrees" if self.least_p <= self.alpha else "too few"


def counts_of_lengths(lengths: Sequence[int]) -> AcceptCounts:
    """The counts of a run's steps, each with this number of accepted drafted tokens."""
    return AcceptCounts(
        tuple(sum(length >= depth for length in lengths) for depth in range(1, max(lengths, default=0) + 1)),
        len(lengths),
    )


def compare_acceptance(
    first: Mapping[Prompt, AcceptCounts], second: Mapping[Prompt, AcceptCounts], alpha: float = ALPHA
) -> AcceptanceTest:
    """Compare two runs on the prompts that both have."""
    prompts = [prompt for prompt in first if prompt in second and first[prompt].offered and second[prompt].offered]
    if not prompts:
        return AcceptanceTest(0, 0, alpha, (), 1.0)
    differing = [prompt for prompt in prompts if first[prompt] != second[prompt]]
    depth = max(len(counts[prompt].accepted) for counts in (first, second) for prompt in prompts)
    accepted = np.array([[_padded(counts[prompt], depth) for prompt in prompts] for counts in (first, second)])
    offered = np.array([[counts[prompt].offered for prompt in prompts] for counts in (first, second)], dtype=float)
    # Column 0 holds all positions together.
    accepted = np.concatenate([accepted.sum(2, keepdims=True), accepted], 2)
    shares = [accepted[run].sum(0) / offered[run].sum() for run in (0, 1)]
    observed, traded = _differences(accepted, offered, _trades(len(prompts), alpha))
    spread = np.sqrt(np.square(traded).mean(0))
    spread[spread == 0] = 1.0
    largest = (np.abs(traded) / spread).max(1)
    # The observed order is one of the trades; a hair below it, so that rounding hides no tie.
    p_values = [
        (1 + int((largest >= abs(value) / scale - 1e-9).sum())) / (1 + len(largest))
        for value, scale in zip(observed, spread, strict=True)
    ]
    positions = [
        Position(number, float(shares[0][number]), float(shares[1][number]), p_values[number])
        for number in range(depth + 1)
    ]
    # With every prompt traded the difference is as large: of 2^n trades, two at least are as far out as this one.
    return AcceptanceTest(len(prompts), len(differing), alpha, tuple(positions), 2.0 ** (1 - len(differing)))


def _padded(counts: AcceptCounts, depth: int) -> Array:
    return np.array([*counts.accepted, *[0] * (depth - len(counts.accepted))], dtype=float)


def _trades(prompts: int, alpha: float) -> Array:
    """Which prompts trade places, float32 [trades, prompts] of 0 and 1; the same for equal arguments."""
    count = int(TRADES_PER_ALPHA / alpha)
    return np.random.default_rng(0).integers(0, 2, (count, prompts)).astype(np.float32)


def _differences(accepted: Array, offered: Array, trades: Array) -> tuple[Array, Array]:
    """The difference of shares at each position as observed [positions], and after each trade [trades, positions]."""
    moved_accepted, moved_offered = accepted[1] - accepted[0], offered[1] - offered[0]
    numerators = trades @ moved_accepted.astype(np.float32)
    denominators = trades @ moved_offered.astype(np.float32)
    first = (accepted[0].sum(0) + numerators) / (offered[0].sum() + denominators)[:, None]
    second = (accepted[1].sum(0) - numerators) / (offered[1].sum() - denominators)[:, None]
    observed: Array = accepted[1].sum(0) / offered[1].sum() - accepted[0].sum(0) / offered[0].sum()
    return observed, second - first
