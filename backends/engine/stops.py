"""Where a request's output ends, looked for token by token as blocks arrive, with no more text held than is needed."""

from dataclasses import dataclass

from reference.case import Case


@dataclass(frozen=True)
class Limits:
    """The limits at which one request ends.

    Attributes:
        most: Tokens that the output may hold.
        least: Tokens among which nothing else ends it.
        eos: Token ids that end the text.
        stop: Token ids of the request's own that end it likewise.
        strings: Texts that end it once they are complete.
        pieces: The text of every token id, where there are strings.
    """

    most: int
    least: int = 0
    eos: frozenset[int] = frozenset()
    stop: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    pieces: tuple[str, ...] = ()

    @property
    def reach(self) -> int:
        """Characters before a piece in which a string that it completes may begin."""
        return max(map(len, self.strings), default=1) - 1


@dataclass(frozen=True)
class Written:
    """The part of the output that decides where it ends: the number of its tokens, and the end of its text."""

    tokens: int = 0
    tail: str = ""


def limits(case: Case) -> Limits:
    """The limits of `case`: the context leaves what the prompt has not taken."""
    stops = case.stops
    most = stops.max_new_tokens
    if stops.max_length:
        most = min(most, stops.max_length - len(case.prompt))
    least = case.sampling.min_tokens
    return Limits(most, least, frozenset(stops.eos), frozenset(stops.stop_tokens), stops.stop_strings, stops.pieces)


def follow(written: Written, kept: list[int], ends: Limits) -> Written:
    """The output after `kept` was emitted too; of its text, only the part stays that can begin a stop string."""
    if not ends.strings:
        return Written(written.tokens + len(kept))
    text = written.tail + "".join(ends.pieces[token] for token in kept)
    return Written(written.tokens + len(kept), text[len(text) - min(ends.reach, len(text)) :])


def clip(block: list[int], written: Written, ends: Limits) -> tuple[list[int], str | None]:
    """Cut an accepted block where the output ends; what was accepted beyond is neither emitted nor kept.

    Args:
        block: Accepted tokens and the bonus, in order.
        written: The output before this block.
        ends: The request's limits.

    Returns:
        The tokens to emit, and the reason to end (`eos`, `stop`, `length`) or None.
    """
    now = written
    for at, token in enumerate(block):
        if now.tokens >= ends.least:
            if token in ends.eos:
                return block[: at + 1], "eos"
            if token in ends.stop or _completes(token, now, ends):
                return block[: at + 1], "stop"
        now = follow(now, [token], ends)
        if now.tokens >= ends.most:
            return block[: at + 1], "length"
    return block, None


def _completes(token: int, written: Written, ends: Limits) -> bool:
    """Whether `token` completes a stop string: each is looked for only where its last character would be new."""
    if not ends.strings:
        return False
    text, old = written.tail + ends.pieces[token], len(written.tail)
    return any(text.find(one, max(0, old - len(one) + 1)) >= 0 for one in ends.strings)
