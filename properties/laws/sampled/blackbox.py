"""Judging the law of a backend that takes no tape, by the blocks that it emits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specverify.properties.laws.sampled.cells import Block, Partition, counts_of, partitions, tally
from specverify.properties.laws.sampled.gate import ALPHA_RUN, is_red
from specverify.properties.laws.sampled.power import plan
from specverify.properties.laws.sampled.screen import Betting, Outcome, play
from specverify.reference.trace import Array

MOST_TRIALS = 200_000
"""Most rounds for one law; a test whose condition is met too rarely then states which deviation it could not show."""


@dataclass(frozen=True, eq=False)
class LawTest:
    """One test of one law, and its outcome."""

    partition: Partition
    outcome: Outcome


def judge_blocks(
    draw: Callable[[int], Array],
    expected: Mapping[Block, float],
    height: int,
    tv: float = 0.05,
    tests: int | None = None,
    alpha_run: float = ALPHA_RUN,
    most: int = MOST_TRIALS,
) -> tuple[LawTest, ...]:
    """Judge the blocks of one world by every partition of its law; the same rounds feed all of them.

    Args:
        draw: Function that gives the blocks of n more independent rounds, int [n, height + 1] padded with -1.
        expected: Probability of each block.
        height: Height of the drafted tree.
        tv: Total variation over a test's cells that is to be shown with probability .99.
        tests: Number of tests of the whole run, which sets the bar; by default the tests of this law.
        alpha_run: The false-alarm rate of the run.
        most: Most rounds.
    """
    split = partitions(expected, height)
    planned = len(split) if tests is None else tests
    # The plan's bar counts the tests of the run, so that one bet alone may condemn it.
    bets = [Betting(partition.p, plan(partition.cells, tv, planned, alpha_run), partition.share) for partition in split]

    def counts(n: int) -> Sequence[Array]:
        block_counts = tally(draw(n))
        return [counts_of(block_counts, partition) for partition in split]

    outcomes = play(bets, counts, most)
    return tuple(LawTest(partition, outcome) for partition, outcome in zip(split, outcomes, strict=True))


def run_is_red(law_tests: Sequence[LawTest], alpha_run: float = ALPHA_RUN, tests: int | None = None) -> bool:
    """Whether the tests of a run, of any number of laws, are red together."""
    return is_red(np.array([law_test.outcome.log_e for law_test in law_tests]), alpha_run, tests)
