"""Rule T: a token other than the oracle's may be a tie.

It is a tie only inside the noise of the logits. Ties are counted, and never forgiven.
"""

from collections.abc import Iterator

import numpy as np
from scipy.special import ndtr

from specverify.properties.verdict.finding import Finding, Positions, Tie
from specverify.reference.trace import Array, Stage

TIE_SIGMA = 8.0
"""Largest gap of a tie, in sigmas of the control (worst of 501 clean bfloat16 mismatches: 5.7)."""


def gaps(logits: Array, tokens: tuple[int, ...]) -> Array:
    """The distance of each token's logit below the best logit of its row: [len(tokens)]."""
    rows = logits[: len(tokens)]
    return np.asarray(rows.max(axis=1) - rows[np.arange(len(tokens)), list(tokens)])


def is_decided(row: Array, sigma: float) -> bool:
    """Whether the two best logits of `row` lie further apart than the logits of a tie can."""
    if len(row) < 2:
        return True
    second, best = np.partition(row, -2)[-2:]
    return bool(best - second > TIE_SIGMA * sigma)


def near_and_predicted(logits: Array, sigma: float) -> tuple[int, float]:
    """The number of rows whose two best logits lie within the tie zone, and the ties predicted over all rows."""
    if logits.shape[1] < 2 or sigma <= 0:
        return 0, 0.0
    # The prediction sums over the eight runners-up; the tokens below them are neglected.
    top = -np.sort(-logits, axis=1)[:, :9]
    distances = top[:, :1] - top[:, 1:]
    near = int((distances[:, 0] <= TIE_SIGMA * sigma).sum())
    # Both logits carry noise, so their difference has sigma * sqrt(2).
    return near, float(ndtr(-distances / (np.sqrt(2) * sigma)).sum())


def judge_tokens(
    invariant: str, logits: Array, output: tuple[int, ...], sigma: float, steps: list[int], control_ties: int
) -> Iterator[Finding | Tie | Positions]:
    """Judge each token of `output` against the oracle's logits [len(output), V] given the tokens before it.

    The oracle's logits are teacher-forced, so that one flip does not cascade. `steps` are those that emitted each
    token; `control_ties` are those of the control over its own tokens.
    """
    near, predicted = near_and_predicted(logits, sigma)
    yield Positions(len(output), near, predicted, control_ties)
    for position, gap in enumerate(gaps(logits, output)):
        if gap == 0:
            continue
        if gap <= TIE_SIGMA * sigma:
            yield Tie(invariant, position, float(gap / sigma))
        else:
            expected_token = int(logits[position].argmax())
            where: dict[str, int | str] = {"position": position}
            step = steps[position] if position < len(steps) else 0
            yield Finding(
                invariant, Stage.EMITTED, step, where, expected_token, output[position], float(gap / sigma / TIE_SIGMA)
            )
