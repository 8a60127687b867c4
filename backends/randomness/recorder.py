"""A passive recorder: the place and the lines of code of every draw that an engine makes."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from specverify.backends.randomness.hooks import Call, TorchHooks, hooks
from specverify.backends.randomness.places import Draw, Place, stack_here
from specverify.backends.randomness.positions import Positions, generator_in_words


class Recorder:
    """Records each draw that is made inside `with recorder:`, which changes no number.

    Attributes:
        draws: The draws so far, in order. A draw that reads no word, such as one of size 0, is left out.

    Args:
        is_wanted: Whether a draw is recorded; it is asked before the draw is made.
    """

    def __init__(self, is_wanted: Callable[[Call], bool] = lambda call: True) -> None:
        self.draws: list[Draw] = []
        self._is_wanted = is_wanted
        self._positions = Positions()
        self._open = ExitStack()

    def __enter__(self) -> "Recorder":
        """Set the hooks."""
        self._open.enter_context(hooks(self._record))
        self._open.enter_context(TorchHooks(self._record))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the hooks away."""
        self._open.close()

    def _record(self, call: Call) -> Any:
        if not self._is_wanted(call):
            return call.make()
        try:
            before = self._positions.position(call.generator)
        except TypeError:  # a generator without a state, such as SystemRandom, reads no place
            return call.make()
        result = call.make()
        place = self._positions.place(before, call.generator)
        if place.size or self._positions.position(call.generator).position != before.position:
            self.draws.append(Draw(call.name, generator_in_words(call.generator), place, stack_here()))
        return result


def overlaps(draws: Iterable[Draw]) -> list[tuple[Draw, Draw]]:
    """The pairs of draws that read a common word, the earlier of both first."""
    by_stream: dict[str, list[tuple[int, Draw]]] = defaultdict(list)
    for number, draw in enumerate(draws):
        by_stream[draw.place.stream].append((number, draw))
    pairs: list[tuple[int, int, Draw, Draw]] = []
    for numbered_draws in by_stream.values():
        # In order of offsets, a draw meets only draws that end behind its begin.
        numbered_draws.sort(key=lambda entry: entry[1].place.offset)
        reaching: list[tuple[int, Draw]] = []
        for number, draw in numbered_draws:
            reaching = [entry for entry in reaching if _end(entry[1].place) > draw.place.offset]
            for earlier_number, earlier in reaching:
                first, second = sorted(((earlier_number, earlier), (number, draw)), key=lambda entry: entry[0])
                pairs.append((first[0], second[0], first[1], second[1]))
            reaching.append((number, draw))
    return [(first, second) for _, _, first, second in sorted(pairs, key=lambda pair: pair[:2])]


def _end(place: Place) -> int:
    return place.offset + max(place.size, 1)
