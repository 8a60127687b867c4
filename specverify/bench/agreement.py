"""Whether two ways of a bench gave the same text, by rule T.

The noise is measured in the bench itself: by how much our logits differ between the target alone and speculation, on
the same tokens. A first difference of two texts is a tie if the two tokens' logits lie within rule T's zone of it.
"""

from dataclasses import dataclass, replace

import numpy as np

from specverify.bench.turn import Turn
from specverify.properties.tolerance.ties import TIE_SIGMA
from specverify.reference.trace import Array, Trace


@dataclass(frozen=True)
class Agreement:
    """The comparison of one text with that of the target alone.

    Attributes:
        prompt: Number of the prompt, or of the dialogue.
        way: The other way.
        compared: Tokens up to the first difference, or all.
        at: Place of the first difference; None where the texts are equal.
        gap: How far the logit of the other way's token lies below the best one, there; 0.0 where one text ends.
        noise: Standard deviation of the noise of logits.
        tied: Whether the difference is a tie.
        place: Number of the turn in its dialogue, from 1 on; 0 for a prompt without one.
        batch: Requests that stepped together; 0 for a prompt by itself.
    """

    prompt: int
    way: str
    compared: int
    at: int | None = None
    gap: float = 0.0
    noise: float = 0.0
    tied: bool = False
    place: int = 0
    batch: int = 0

    @property
    def agrees(self) -> bool:
        """Whether the texts are equal, or part at a tie."""
        return self.at is None or self.tied


def logit_rows(trace: Trace) -> list[Array]:
    """The logits [vocabulary] from which each token of the output was chosen."""
    rows = list[Array]()
    for step in trace.steps:
        assert step.scored is not None
        assert step.accepted is not None
        assert step.emitted is not None
        rows += [step.scored.logits[row] for row in step.accepted.path[: len(step.emitted.tokens)]]
    return rows


def first_difference(first: tuple[int, ...], second: tuple[int, ...]) -> int | None:
    """The first place at which two texts differ; None if they are equal."""
    position = next(
        (place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    return None if len(first) == len(second) == position else position


def noise_between(target_rows: list[Array], turn_rows: list[Array], num_equal: int) -> float:
    """The root mean square of the differences of the first `num_equal` rows, and 0.0 without rows."""
    apart = [
        np.square(a - b, dtype=np.float64).mean()
        for a, b in zip(target_rows[:num_equal], turn_rows[:num_equal], strict=True)
    ]
    return float(np.sqrt(np.mean(apart))) if apart else 0.0


def compare_turn(target: Turn, target_rows: list[Array], turn: Turn, noise: float) -> Agreement:
    """The comparison of `turn` with `target`, whose logits are `target_rows`, at this noise."""
    position = first_difference(target.tokens, turn.tokens)
    compared = len(target.tokens) if position is None else position
    comparison = Agreement(turn.prompt, turn.way, compared, position, noise=noise, place=turn.place, batch=turn.batch)
    # Where one text is the beginning of the other, no logits tell how near they are.
    if position is None or position in (len(target.tokens), len(turn.tokens)):
        return comparison
    gap = float(target_rows[position].max() - target_rows[position][turn.tokens[position]])
    return replace(comparison, gap=gap, tied=gap <= TIE_SIGMA * noise)
