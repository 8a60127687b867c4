"""Futures: tokens that the device has and the host does not know yet.

The host writes a placeholder for the tokens of a launched step. When the next step is launched, the device reads its
own tokens in the place of each placeholder (the future map of SGLang's overlapped scheduler).
"""

from specverify.backends.engine.overlap.frame import Place


class Futures:
    """The tokens of each row that was launched and is not resolved yet, by their owner and not by their row."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], list[int]] = {}

    def put(self, place: Place, tokens: list[int]) -> None:
        """Keep the accepted tokens of a launched row."""
        self.blocks[place.number, place.placeholder] = list(tokens)

    def fill(self, number: int, tokens: list[int]) -> list[int]:
        """The tokens of request `number` with each placeholder replaced by the tokens for which it stands."""
        resolved: list[int] = []
        for token in tokens:
            resolved += [token] if token >= 0 else self.blocks[number, token]
        return resolved

    def drop(self, place: Place) -> None:
        """Forget the tokens of a row, which the host has taken or skipped."""
        self.blocks.pop((place.number, place.placeholder), None)
