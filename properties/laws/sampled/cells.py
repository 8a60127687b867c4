"""Cells: emitted blocks sorted into a few tests with exact probabilities, and judged by them.

Some tests look at all blocks, others are conditional on the number of tokens. They judge the law of a backend that
takes no tape.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specverify.properties.laws.sampled.evalue import SUMS_TO
from specverify.properties.laws.sampled.screen import Betting, Outcome, plan, play
from specverify.reference.trace import Array

Block = tuple[int, ...]
"""The tokens that one round emitted: the accepted tokens and the token after them."""

MERGED: Block = (-1,)
"""Label of the cell of merged rare blocks."""

IMPOSSIBLE: Block = (-2,)
"""Label of the cell, of probability 0, of blocks that the law does not allow."""

LEAST_SHARE = 0.002
"""Smallest expected share of a cell; rarer cells are merged with each other."""

MOST_TRIALS = 200_000
"""Most rounds for one law; a test whose condition is met too rarely then states which deviation it could not show."""

MOST_CELLS = 64
"""Most cells of a test; the samples that a deviation takes grow with the square root of their number."""


@dataclass(frozen=True, eq=False)
class Partition:
    """One test: which blocks count, the cell of each block, and the probability of each cell.

    Attributes:
        name: The subject of the test, in words.
        length: Number of emitted tokens that a block must have to count; 0 counts all blocks.
        cell_of: The cell of every possible block that counts.
        labels: What the blocks of each cell share: tokens, MERGED or IMPOSSIBLE (always the last cell).
        p: Probability of each cell given that a block counts, float64 [cells].
        share: Probability that a block counts.
    """

    name: str
    length: int
    cell_of: Mapping[Block, int]
    labels: tuple[Block, ...]
    p: Array
    share: float

    @property
    def cells(self) -> int:
        """Number of cells of probability above 0."""
        return int((self.p > 0).sum())


def partitions(
    expected: Mapping[Block, float], height: int, least: float = LEAST_SHARE, most: int = MOST_CELLS
) -> tuple[Partition, ...]:
    """The tests of a law of blocks, most basic first; a test that repeats another, or has one cell, is left out.

    They are: the support; the first token; the first two tokens (a block of one token counts with that token alone, so
    that no completion is needed); whole blocks; the number of tokens; and the tokens given a rejection at each depth
    and given full acceptance, whose laws are those of `expected` under the same condition.

    Args:
        expected: Probability of each emitted block, 1 to height + 1 tokens long; entries of 0 are impossible.
        height: Height of the drafted tree.
        least: Cells of a smaller share are merged.
        most: Most cells of one test.

    Raises:
        ValueError: `expected` holds a negative probability or NaN, a block of another length, or sums not to 1.
    """
    for block, weight in expected.items():
        # Not `weight < 0.0`: NaN is refused too.
        if not weight >= 0.0:
            raise ValueError(f"block {block} has probability {weight}")
        if not 1 <= len(block) <= height + 1:
            raise ValueError(f"block {block} does not come from a tree of height {height}")
    total = sum(expected.values())
    if abs(total - 1.0) > SUMS_TO:
        raise ValueError(f"the blocks' probabilities sum to {total:.9g}")
    possible = {block: weight / total for block, weight in sorted(expected.items()) if weight > 0.0}
    candidates = [
        _partition("support", possible, 0, lambda block: (), 0.0, most),
        _partition("first token", possible, 0, lambda block: block[:1], least, most),
        _partition("first two tokens", possible, 0, lambda block: block[:2], least, most),
        _partition("whole blocks", possible, 0, lambda block: block, least, most),
        _partition("number of tokens", possible, 0, lambda block: (len(block),), 0.0, most),
    ]
    for length in range(1, height + 2):
        weights = {block: weight for block, weight in possible.items() if len(block) == length}
        if weights:
            name = (
                "tokens given full acceptance" if length == height + 1 else f"tokens given rejection at depth {length}"
            )
            candidates.append(_partition(name, weights, length, lambda block: block, least, most))
    chosen: list[Partition] = [candidates[0]]
    for candidate in candidates[1:]:
        if candidate.cells > 1 and all(candidate.cell_of != earlier.cell_of for earlier in chosen):
            chosen.append(candidate)
    return tuple(chosen)


def _partition(
    name: str, weights: Mapping[Block, float], length: int, key: Callable[[Block], Block], least: float, most: int
) -> Partition:
    share = sum(weights.values())
    label: dict[Block, Block] = {block: key(block) for block in weights}
    # Rare cells are first merged by first token and length, so that a bias of one token does not cancel in the rest;
    # cells that are still rare go to MERGED.
    coarser: Callable[[Block], Block]
    for coarser in (lambda block: (*key(block)[:1], -2 - len(block)), lambda block: MERGED):
        mass = _mass(label, weights)
        rare = {cell for cell, weight in mass.items() if weight < least * share}
        rare |= set(sorted(mass, key=lambda cell: -mass[cell])[most - 1 :]) if len(mass) > most else set()
        if len(rare) > 1:
            label = {block: coarser(block) if cell in rare else cell for block, cell in label.items()}
    mass = _mass(label, weights)
    labels = (*mass, IMPOSSIBLE)
    number = {cell: index for index, cell in enumerate(labels)}
    p = np.array([*mass.values(), 0.0]) / share
    return Partition(name, length, {block: number[cell] for block, cell in label.items()}, labels, p, share)


def _mass(label: Mapping[Block, Block], weights: Mapping[Block, float]) -> dict[Block, float]:
    mass: dict[Block, float] = {}
    for block, cell in label.items():
        mass[cell] = mass.get(cell, 0.0) + weights[block]
    return mass


def tally(blocks: Array) -> dict[Block, int]:
    """How often each block occurs among `blocks`, int [n, height + 1] padded with -1 at the end.

    A row that is no block, such as padding alone or padding before a token, is counted as it stands, without the
    padding at its end: no law allows it.
    """
    rows = np.ascontiguousarray(blocks, dtype=np.int64)
    if rows.ndim != 2:
        raise ValueError(f"blocks have shape {rows.shape}, not [n, tokens]")
    if not len(rows):
        return {}
    # `rows.min()` may be -1, the padding, or less in a broken block.
    low = int(rows.min())
    base = int(rows.max() - rows.min()) + 1
    if base ** rows.shape[1] < 2**62:
        # Each row as one number in base `base`: sorting numbers is 10 times faster than sorting rows.
        code = (rows - low) @ (base ** np.arange(rows.shape[1], dtype=np.int64))
        _, first, often = np.unique(code, return_index=True, return_counts=True)
        kinds = rows[first]
    else:
        kinds, often = np.unique(rows, axis=0, return_counts=True)
    block_counts: dict[Block, int] = {}
    for kind, times in zip(kinds.tolist(), often.tolist(), strict=True):
        while kind and kind[-1] == -1:
            kind.pop()
        block_counts[tuple(kind)] = block_counts.get(tuple(kind), 0) + times
    return block_counts


def counts_of(blocks: Array | Mapping[Block, int], partition: Partition) -> Array:
    """Counts of `blocks` (rows, or a `tally` of them) in the cells of `partition`: int64 [cells]."""
    block_counts = blocks if isinstance(blocks, Mapping) else tally(blocks)
    counts = np.zeros(len(partition.p), dtype=np.int64)
    for block, times in block_counts.items():
        if partition.length in (0, len(block)):
            counts[partition.cell_of.get(block, len(partition.p) - 1)] += times
    return counts


@dataclass(frozen=True, eq=False)
class LawTest:
    """The test of a law, and its outcome."""

    partition: Partition
    outcome: Outcome


def judge_blocks(
    draw: Callable[[int], Array],
    expected: Mapping[Block, float],
    height: int,
    tv: float = 0.05,
    tests: int | None = None,
    most: int = MOST_TRIALS,
) -> tuple[LawTest, ...]:
    """Judge the blocks of one world by every partition of its law; the same rounds feed all of them.

    `draw` gives the blocks of n more rounds, int [n, height + 1] padded with -1. A total variation of `tv` over a
    test's cells is to be shown with probability .99. `tests` of the whole run set the bar; by default those of this
    law.
    """
    split = partitions(expected, height)
    planned = len(split) if tests is None else tests
    # The plan's bar counts the tests of the run, so that one bet alone may condemn it.
    bets = [Betting(partition.p, plan(partition.cells, tv, planned), partition.share) for partition in split]

    def counts(n: int) -> Sequence[Array]:
        block_counts = tally(draw(n))
        return [counts_of(block_counts, partition) for partition in split]

    outcomes = play(bets, counts, most)
    return tuple(LawTest(partition, outcome) for partition, outcome in zip(split, outcomes, strict=True))
