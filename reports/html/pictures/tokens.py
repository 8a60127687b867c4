"""The output of a greedy request, token by token, beside the one it must have."""

from dataclasses import dataclass
from itertools import zip_longest

from reference.architecture import Seeded
from reference.malformed import Malformed
from reference.oracle.decoder import Oracle
from reports.html.pictures.grid import Cell, Grid, Row, omission, shown_indices
from reports.html.pictures.step_truth import StepTruth

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
    drawn = not case.sampling.greedy or case.sampling.processors
    # Coins and custom processors are the run's own; a checkpoint's text is not computed again for a page.
    if truth.oracle_step is None or drawn or not isinstance(case.model, Seeded):
        return None
    try:
        wanted = Oracle()(case).output
    except Malformed:
        return None  # the whole request does not fit the model, although its step does
    if wanted == output:
        return None
    pairs = list(zip_longest(wanted, output))
    first = next(at for at, (due, got) in enumerate(pairs) if due != got)
    shown = shown_indices(len(pairs), [first], MOST)
    rows = (
        Row("must be", tuple(_cell(at, pairs[at][0], False, False) for at in shown)),
        Row("is", tuple(_cell(at, pairs[at][1], pairs[at][0] != pairs[at][1], at == first) for at in shown)),
    )
    names = tuple(f"token {at}" for at in shown)
    due, got = (("nothing" if one is None else str(one)) for one in pairs[first])
    grid = Grid("The output", names, rows, left_out=omission([(len(pairs), len(shown), "tokens")]), small=False)
    return TokensPicture(grid, f"Token {first} of the output must be {due} and is {got}.")


def _cell(at: int, token: int | None, wrong: bool, here: bool) -> Cell:
    """The cell of one token of the output; None stands behind the end."""
    text = "–" if token is None else str(token)
    words = f"token {at} of the output is {text}" + (", which is wrong" if wrong else "")
    return Cell("empty" if token is None else "context", text, words, wrong, here)
