"""The output of a greedy request, token by token, beside the one it must have."""

from dataclasses import dataclass
from itertools import zip_longest

from specverify.reference.architecture import Seeded
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reports.html.pictures.grid import Cell, Grid, Row, omission, shown_indices
from specverify.reports.html.pictures.step_truth import StepTruth

MOST = 16
"""Most tokens that are shown."""


@dataclass(frozen=True)
class TokensPicture:
    """Two rows of tokens, and the first wrong one in a sentence."""

    grid: Grid
    words: str


def tokens_picture(truth: StepTruth, output: tuple[int, ...]) -> TokensPicture | None:
    """The picture of the backend's `output`; None where it is right, or where the right one is not known here."""
    case = truth.case
    is_drawn = not case.sampling.greedy or case.sampling.processors
    # Coins and custom processors are the run's own; a checkpoint's text is not computed again for a page.
    if truth.oracle_step is None or is_drawn or not isinstance(case.model, Seeded):
        return None
    try:
        expected = Oracle()(case).output
    except Malformed:
        return None  # the whole request does not fit the model, although its step does
    if expected == output:
        return None
    pairs = list(zip_longest(expected, output))
    first = next(
        token_index
        for token_index, (expected_token, observed_token) in enumerate(pairs)
        if expected_token != observed_token
    )
    shown_indices_ = shown_indices(len(pairs), [first], MOST)
    rows = (
        Row("must be", tuple(_cell(i, pairs[i][0], False, False) for i in shown_indices_)),
        Row("is", tuple(_cell(i, pairs[i][1], pairs[i][0] != pairs[i][1], i == first) for i in shown_indices_)),
    )
    names = tuple(f"token {i}" for i in shown_indices_)
    expected_text, observed_text = (("nothing" if token is None else str(token)) for token in pairs[first])
    grid = Grid(
        "The output", names, rows, left_out=omission([(len(pairs), len(shown_indices_), "tokens")]), small=False
    )
    return TokensPicture(grid, f"Token {first} of the output must be {expected_text} and is {observed_text}.")


def _cell(i: int, token: int | None, wrong: bool, here: bool) -> Cell:
    """The cell of one token of the output; None stands behind the end."""
    text = "–" if token is None else str(token)
    words = f"token {i} of the output is {text}" + (", which is wrong" if wrong else "")
    return Cell("empty" if token is None else "context", text, words, wrong, here)
