"""The texts of a failure as a picture: the prompt, the output that must be, and the output that is."""

from dataclasses import dataclass
from itertools import zip_longest

from specverify.properties.texts import Texts
from specverify.reports.format import cut
from specverify.reports.html.pictures.grid import Cell, Grid, Row, omission, shown_indices

MOST = 16
"""Most tokens that are shown of a row."""


@dataclass(frozen=True)
class TokensPicture:
    """Rows of tokens, the first wrong one in a sentence, and the rows as text where a tokenizer is known.

    Attributes:
        prompt: The grid of the prompt's last tokens.
        grid: The grid of the outputs: what must be, where it is known, and what is.
        words: The first wrong token in a sentence; empty where none is known.
        lines: Name and text of each row.
    """

    prompt: Grid
    grid: Grid
    words: str
    lines: tuple[tuple[str, str], ...] = ()


def tokens_picture(texts: Texts) -> TokensPicture:
    """The picture of `texts`."""
    first = texts.first_difference
    pairs = list(zip_longest(texts.observed if texts.must_be is None else texts.must_be, texts.observed))
    indices = shown_indices(len(pairs), [0 if first is None else first], MOST)
    observed = tuple(
        _cell(index, pairs[index][1], pairs[index][0] != pairs[index][1], index == first) for index in indices
    )
    due = Row("must be", tuple(_cell(index, pairs[index][0], False, False) for index in indices))
    rows = (Row("is", observed),) if texts.must_be is None else (due, Row("is", observed))
    names = tuple(f"token {index}" for index in indices)
    left_out = omission([(len(pairs), len(indices), "tokens")])
    grid = Grid("The output", names, rows, left_out=left_out, small=False)
    begin = max(0, len(texts.prompt) - MOST)
    prompt_row = Row(
        "prompt", tuple(_prompt_cell(index, texts.prompt[index]) for index in range(begin, len(texts.prompt)))
    )
    prompt_names = tuple(f"token {index}" for index in range(begin, len(texts.prompt)))
    prompt_left_out = omission([(len(texts.prompt), len(prompt_names), "tokens")])
    prompt = Grid("The prompt", prompt_names, (prompt_row,), left_out=prompt_left_out, small=False)
    labels = ("prompt", "must be", "is") if texts.must_be is not None else ("prompt", "is")
    lines = tuple((label, cut(words, 400)) for label, words in zip(labels, texts.words, strict=False))
    return TokensPicture(prompt, grid, _difference_words(pairs, first), lines)


def _difference_words(pairs: list[tuple[int | None, int | None]], first: int | None) -> str:
    if first is None:
        return ""
    due, observed = (("nothing" if token is None else str(token)) for token in pairs[first])
    return f"Token {first} of the output must be {due} and is {observed}."


def _prompt_cell(index: int, token: int) -> Cell:
    return Cell("node", str(token), f"token {index} of the prompt is {token}")


def _cell(index: int, token: int | None, wrong: bool, here: bool) -> Cell:
    """The cell of one token of the output; None stands behind the end."""
    text = "–" if token is None else str(token)
    words = f"token {index} of the output is {text}" + (", which is wrong" if wrong else "")
    return Cell("empty" if token is None else "context", text, words, wrong, here)
