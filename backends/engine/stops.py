"""The stop rules of a request, applied token by token to each accepted block.

Only so much of the output's text is held as a stop string can span across two blocks.
"""

from dataclasses import dataclass

from specverify.reference.case import Case


@dataclass(frozen=True)
class Limits:
    """The limits at which the output of one request ends.

    Attributes:
        most: The largest number of output tokens.
        least: `min_tokens`: among the first `least` output tokens only `most` ends the output.
        eos: Token ids that end the output with reason `eos`.
        stop: Stop tokens of the request, which end the output with reason `stop`.
        strings: Stop strings; the output ends with the token that completes one of them.
        pieces: The text of every token id, if there are stop strings.
    """

    most: int
    least: int = 0
    eos: frozenset[int] = frozenset()
    stop: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    pieces: tuple[str, ...] = ()

    @property
    def reach(self) -> int:
        """The largest number of characters of a stop string that lie before the token which completes the string."""
        return max(map(len, self.strings), default=1) - 1


@dataclass(frozen=True)
class OutputTail:
    """The part of the output that later stop decisions depend on: its number of tokens, and the tail of its text."""

    tokens: int = 0
    tail: str = ""


def limits(case: Case) -> Limits:
    """The limits of `case`; `max_length` counts the prompt too, so the output gets the rest of it."""
    stops = case.stops
    most = stops.max_new_tokens
    if stops.max_length:  # 0 means no such limit
        most = min(most, stops.max_length - len(case.prompt))
    least = case.sampling.min_tokens
    return Limits(most, least, frozenset(stops.eos), frozenset(stops.stop_tokens), stops.stop_strings, stops.pieces)


def follow(written: OutputTail, tokens: list[int], ends: Limits) -> OutputTail:
    """The output after `tokens` more; of its text only the tail stays, in which a stop string may have begun."""
    if not ends.strings:
        return OutputTail(written.tokens + len(tokens))
    text = written.tail + "".join(ends.pieces[token] for token in tokens)
    # Not text[-reach:], which would keep the whole text for a reach of 0.
    return OutputTail(written.tokens + len(tokens), text[len(text) - min(ends.reach, len(text)) :])


def clip(block: list[int], written: OutputTail, ends: Limits) -> tuple[list[int], str | None]:
    """Cut an accepted block where the output ends; accepted tokens beyond that point are neither emitted nor kept.

    `block` holds the accepted tokens and the bonus, in order. The tokens to emit come with the reason to end (`eos`,
    `stop`, `length`) or None.
    """
    tail = written
    for i, token in enumerate(block):
        # `now.tokens` does not count this token yet: the token after the first `least` is the first that may end it.
        if tail.tokens >= ends.least:
            if token in ends.eos:
                return block[: i + 1], "eos"
            if token in ends.stop or _completes_stop(token, tail, ends):
                return block[: i + 1], "stop"
        tail = follow(tail, [token], ends)
        if tail.tokens >= ends.most:
            return block[: i + 1], "length"
    return block, None


def _completes_stop(token: int, written: OutputTail, ends: Limits) -> bool:
    """Whether `token` completes a stop string; a match must end in the text of `token`, not before it."""
    if not ends.strings:
        return False
    text = written.tail + ends.pieces[token]
    length_before = len(written.tail)
    return any(text.find(string, max(0, length_before - len(string) + 1)) >= 0 for string in ends.strings)
