"""The ledger of one run: a draw has a place, and the place has the numbers."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from specverify.backends.interception.errors import refuse
from specverify.backends.interception.forking import Fork
from specverify.backends.interception.numbers import Numbers, Use
from specverify.backends.randomness.places import LIBRARIES, Draw, Position, stack_here
from specverify.backends.randomness.positions import Positions, StreamPosition, default_generator, generator_in_words

NEAR = 4
"""How many blocks of MT19937 an unwatched draw is looked for in."""

MOST_OUTCOMES = 1024
"""The most outcomes of one integer that are enumerated."""


class Ledger:
    """The draws of one run.

    Attributes:
        numbers: The random numbers of the run.
    """

    def __init__(self, fork: Fork, positions: Positions) -> None:
        self.fork = fork
        self.numbers = Numbers(fork)
        self._positions = positions
        self._picks: dict[tuple[Any, ...], tuple[int, Draw]] = {}
        self._states: dict[int, tuple[Any, Any]] = {}
        self._last: dict[str, StreamPosition] = {}
        self._passed_positions: set[Position] = set()
        for library in LIBRARIES:
            self._remember(default_generator(library))
            self._last[library] = self._stream_position(default_generator(library))

    def draw(self, call: str, generator: Any, make: Callable[[], Any]) -> tuple[Any, Draw | None]:
        """Return the numbers of `make` and its draw; the draw is None for a generator without a state."""
        try:
            before = self._positions.position(generator)
        except TypeError:
            return make(), None
        self._remember(generator)
        self._check(generator)
        result = make()
        place = self._positions.place(before, generator)
        for library in LIBRARIES:
            if generator is default_generator(library):
                self._last[library] = self._stream_position(generator)
                self._passed_positions |= {before.position, self._last[library].position}
        return result, Draw(call, generator_in_words(generator), place, stack_here(1))

    def pick(self, draw: Draw | None, element: int, count: int, outcomes: int, decision: str) -> int:
        """Choose among equally likely outcomes; the same words and count give the same choice again."""
        if outcomes > MOST_OUTCOMES:
            refuse(f"{decision} of {outcomes} outcomes")
        weights = [Fraction(1)] * outcomes
        if draw is None:
            return self.fork.branch(weights, decision)
        place = draw.place.part(element, count)
        key = (place.stream, place.offset, place.size, outcomes, decision)
        if key in self._picks:
            pick, first = self._picks[key]
            self.numbers.tell_shared(Use(first, first.site, None), Use(draw, stack_here(1)[0], None))
            return pick
        number = self.numbers.number(f"integers below {outcomes}", place)
        pick = self.numbers.spend([number], draw, lambda: weights, decision)
        self._picks[key] = (pick, draw)
        return pick

    def _remember(self, generator: Any) -> None:
        """Keep the state of a generator at its first draw of the run, so that the next run begins alike."""
        if id(generator) not in self._states:
            self._states[id(generator)] = (generator, _state(generator))

    def _stream_position(self, generator: Any) -> StreamPosition:
        standing = self._positions.position(generator)
        standing.most_blocks = NEAR
        return standing

    def _check(self, generator: Any) -> None:
        """Refuse a default generator that went on by itself since its last draw."""
        for library in LIBRARIES:
            if generator is default_generator(library):
                last = self._last[library]
                now = self._positions.position(generator, last).position
                # Seeding and set_state lead elsewhere, or back; a draw leads on.
                on = now.stream == last.position.stream and now.offset > last.position.offset
                if on and now not in self._passed_positions:
                    name = {"numpy": "numpy.random"}.get(library, library)
                    refuse(f"{name} drew a number by a way that is not watched (a name imported from it?)")

    def close(self) -> None:
        """Look for draws that were not watched."""
        for library in LIBRARIES:
            self._check(default_generator(library))

    def restore(self) -> None:
        """Set every generator of the run back to where it first drew."""
        for generator, state in self._states.values():
            _set_state(generator, state)


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state(legacy=False)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)
