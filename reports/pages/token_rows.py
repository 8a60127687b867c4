"""Three rows of tokens on the terminal: the prompt, the output that must be, and the output that is."""

from collections.abc import Sequence
from itertools import zip_longest

from specverify.properties.tally import Failure
from specverify.properties.texts import Texts
from specverify.reference.trace import Stage
from specverify.reports.format import cut
from specverify.reports.layout80 import INDENT, WIDTH

MARK = "▲"
"""The mark below the first token that differs."""

ABSENT = "–"
"""What stands where one output has no token any more."""

OF_TEXT = (Stage.ACCEPTED, Stage.EMITTED)
"""The stages whose differences show in the output."""


def shown_texts(failure: Failure) -> Texts | None:
    """The texts of a failure that is about its output; None for another one, and where its texts agree."""
    texts = failure.texts
    if texts is None or failure.finding.stage not in OF_TEXT:
        return None
    return texts if texts.must_be is None or texts.first_difference is not None else None


def token_rows(texts: Texts, width: int = WIDTH) -> list[tuple[str, str]]:
    """Labelled rows of token ids, aligned, with the first difference marked, and the same as text where it is known."""
    room = width - INDENT
    rows = [("prompt", _last_tokens(texts.prompt, room))]
    first = texts.first_difference
    if texts.must_be is None:
        return _with_words([*rows, ("is", _first_tokens(texts.observed, room))], texts, room)
    pairs = list(zip_longest(texts.must_be, texts.observed))
    cell = max((len(str(token)) for pair in pairs for token in pair if token is not None), default=1)
    fitting = max(1, (room - 4) // (cell + 1))
    start = 0 if first is None or first < fitting - 1 else first - fitting // 2
    lead = "… " if start else ""
    fitting_pairs = pairs[start : start + fitting]
    ellipsis = " …" if start + fitting < len(pairs) else ""
    for label, tokens in (
        ("must be", [due for due, _ in fitting_pairs]),
        ("is", [observed for _, observed in fitting_pairs]),
    ):
        cells = " ".join((ABSENT if token is None else str(token)).rjust(cell) for token in tokens)
        rows.append((label, f"{lead}{cells}{ellipsis}"))
    rows = _with_words(rows, texts, room)
    if first is not None:
        mark_column = len(lead) + (first - start) * (cell + 1) + cell - 1
        words = f"{MARK} token {first} of the output, counted from 0"
        mark = " " * mark_column + words if mark_column + len(words) <= room else " " * mark_column + MARK
        place = next(number for number, (label, _) in enumerate(rows) if label == "is") + 1
        rows.insert(place, ("", mark))
    return rows


def _with_words(rows: list[tuple[str, str]], texts: Texts, room: int) -> list[tuple[str, str]]:
    """`rows`, each followed by its text in quotes where it is known."""
    if not texts.words:
        return rows
    rows_with_words: list[tuple[str, str]] = []
    for (label, tokens), words in zip(rows, texts.words, strict=False):
        rows_with_words.append((label, tokens))
        if words:
            rows_with_words.append(("", f"“{cut(words, room - 2)}”"))
    return rows_with_words


def _last_tokens(tokens: Sequence[int], room: int) -> str:
    """The last tokens that fit, since the output follows them."""
    text = " ".join(map(str, tokens))
    if len(text) <= room:
        return text
    text = text[-(room - 2) :]
    return f"… {text[text.index(' ') + 1 :]}" if " " in text else f"… {tokens[-1]}"


def _first_tokens(tokens: Sequence[int], room: int) -> str:
    """The first tokens that fit."""
    text = " ".join(map(str, tokens))
    return text if len(text) <= room else f"{text[: room - 2].rpartition(' ')[0]} …"
