"""Numbers: what the decisions of a run tell about each random number, and which numbers are one.

A uniform number has a place (`specverify.backends.randomness`). Draws that read one place get one number, so that a
second decision is made under what the first has told.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from specverify.backends.interception.errors import DecidesTooOften
from specverify.backends.interception.forking import Fork
from specverify.backends.interception.races import Bound, Race, probability
from specverify.backends.randomness.places import Draw, Place, Site, stack_here

SINGLE = "24 bits of a word"
"""How torch on a CPU makes a float32: of the low 24 bits of a word."""

DOUBLE = "53 bits of two words"
"""How torch on a CPU makes a float64, and every exponential number: of the low 53 bits of two words.

A float32 and a float64 that begin at one word share 21 bits: 8 times the first, without its whole part, is the second.
"""

EIGHTH = 8


@dataclass(frozen=True)
class Use:
    """Decision that a number took part in.

    Attributes:
        draw: The draw that the number came from; None where its generator has no place.
        site: The line of code of the decision.
        race: The number of the race in this run, or None for a comparison with a limit.
    """

    draw: Draw | None
    site: Site
    race: int | None


@dataclass(frozen=True)
class SharedNumber:
    """Random numbers of one place that decided twice."""

    first: Use
    second: Use

    def __str__(self) -> str:
        if self.first.draw is self.second.draw or self.first.draw is None or self.second.draw is None:
            draw = self.first.draw or self.second.draw
            name = "one number" if draw is None else f"the numbers of {draw.call} at {draw.site}"
            return f"{name} decide twice, at {self.first.site} and at {self.second.site}"
        first, second = self.first.draw, self.second.draw
        sources = "; ".join(dict.fromkeys((first.source, second.source)))
        return f"{first.call} at {first.site} and {second.call} at {second.site} read the same numbers ({sources})"


class Number:
    """A uniform number U of [0, 1), known as far as decisions told: low <= U < high, and the races it ran in.

    Attributes:
        kind: How it is made of words.
        place: The words that it is made of, where they are known.
        low: The least it can be.
        high: The least that it cannot be.
        is_flipped: Whether it runs in races as -log(1 - U) and not as -log(U); None before its first race.
        cells: For a number of kind SINGLE: which eighths of [0, 1) it may lie in, once they are told apart.
        spent: Whether it decided in a way after which its law is not known.
        uses: The decisions that it took part in.
    """

    def __init__(self, kind: str, place: Place | None) -> None:
        self.kind = kind
        self.place = place
        self.low, self.high = Fraction(0), Fraction(1)
        self.is_flipped: bool | None = None
        self.cells: tuple[int, int] | None = None
        self.spent = False
        self.uses: list[Use] = []

    @property
    def free(self) -> bool:
        """Whether nothing is known of it."""
        return not self.uses and self.low == 0 and self.high == 1

    def bound(self) -> tuple[float, float]:
        """Its interval as an exponential number."""
        ends = (self.low, self.high) if self.is_flipped else (1 - self.high, 1 - self.low)
        low, high = (math.inf if end >= 1 else -math.log1p(-float(end)) for end in ends)
        return low, high


class Numbers:
    """The numbers of one run."""

    def __init__(self, fork: Fork) -> None:
        self.fork = fork
        self.shared_by_text: dict[str, SharedNumber] = {}
        self._number_by_key: dict[tuple[str, int, int, str], Number] = {}
        self._by_word: dict[tuple[str, int], list[Number]] = {}
        self._races: list[dict[Number, Fraction]] = []
        self._winners: list[Number] = []

    def number(self, kind: str, place: Place | None) -> Number:
        """The number of that kind at a place; one of its own where the place is not known."""
        if place is None:
            return Number(kind, None)
        key = (place.stream, place.offset, place.size, kind)
        if key not in self._number_by_key:
            self._number_by_key[key] = Number(kind, place)
            for word in range(place.offset, place.offset + max(place.size, 1)):
                self._by_word.setdefault((place.stream, word), []).append(self._number_by_key[key])
        return self._number_by_key[key]

    def _numbers_of_its_words(self, number: Number) -> list[Number]:
        """Other numbers that are made of a word of this one."""
        if number.place is None:
            return []
        words = range(number.place.offset, number.place.offset + max(number.place.size, 1))
        numbers = [shared_number for word in words for shared_number in self._by_word[number.place.stream, word]]
        return [shared_number for shared_number in dict.fromkeys(numbers) if shared_number is not number]

    def below(self, number: Number, draw: Draw | None, limit: Fraction, decision: str) -> bool:
        """Decide whether the number is below `limit`."""
        if not 0 < limit < 1:
            return limit >= 1
        self._use(number, Use(draw, stack_here(1)[0], None))
        if number.cells is not None:
            return self._below_by_cells(number, limit, decision)
        return self._below(number, limit, decision)

    def _below(self, number: Number, limit: Fraction, decision: str) -> bool:
        limit = min(max(limit, number.low), number.high)
        if number.is_flipped is None:
            weights = [limit - number.low, number.high - limit]
        else:
            before = number.low, number.high
            parts = []
            for number.low, number.high in ((before[0], limit), (limit, before[1])):
                parts.append(Fraction(0) if number.low >= number.high else self._now(number))
            number.low, number.high = before
            weights = _without_noise(parts)
        if self.fork.branch(weights, decision) == 0:
            number.high = limit
            return True
        number.low = limit
        return False

    def race(self, runners: Sequence[tuple[Number, Fraction]], flipped: bool, draw: Draw | None, decision: str) -> int:
        """Decide which runner has the smallest exponential number over its weight; of equal runners the first.

        Raises:
            DecidesTooOften: The joint law with what the numbers decided before is not known.
        """
        best: dict[Number, int] = {}
        for runner, (number, weight) in enumerate(runners):
            # Of the runners with one number, the heaviest is before the others whatever the number.
            if weight > 0 and (number not in best or weight > runners[best[number]][1]):
                best[number] = runner
        if not best:
            return 0
        use = Use(draw, stack_here(1)[0], len(self._races))
        fresh = all(number.free for number in best)
        if len(best) > 1:
            for number in best:
                self._use(number, use)
                if number.is_flipped not in (None, flipped):
                    raise DecidesTooOften("a number u decides as u in one race and as 1 - u in another")
        if len(best) == 1:
            return next(iter(best.values()))
        self._races.append({number: runners[runner][1] for number, runner in best.items()})
        for number in best:
            number.is_flipped = flipped
        numbers = list(best)
        if fresh:
            weights = list(self._races[-1].values())
        else:
            parts = []
            for winner in numbers:
                self._winners.append(winner)
                parts.append(self._now(winner))
                self._winners.pop()
            weights = _without_noise(parts)
        winner = numbers[self.fork.branch(weights, decision)]
        self._winners.append(winner)
        return best[winner]

    def ranking(
        self, runners: Sequence[tuple[Number, Fraction]], count: int, flipped: bool, draw: Draw | None, decision: str
    ) -> list[int]:
        """Decide the first `count` of a race, in order."""
        remaining_runners = list(runners)
        order: list[int] = []
        # Behind the winner of a race whose numbers are free, the others run anew.
        fresh = all(number.free for number, weight in runners if weight > 0)
        distinct = len({number for number, weight in runners if weight > 0})
        for _ in range(count):
            if fresh and order and distinct == sum(weight > 0 for _, weight in runners):
                order.append(self._next_in_ranking(remaining_runners, decision))
            else:
                order.append(self.race(remaining_runners, flipped, draw, decision))
            number, _ = remaining_runners[order[-1]]
            remaining_runners[order[-1]] = (number, Fraction(0))
        return order

    def _next_in_ranking(self, remaining_runners: list[tuple[Number, Fraction]], decision: str) -> int:
        places = [place for place, (_, weight) in enumerate(remaining_runners) if weight > 0]
        winner_place = places[self.fork.branch([remaining_runners[place][1] for place in places], decision)]
        if len(places) > 1:
            self._races.append({remaining_runners[place][0]: remaining_runners[place][1] for place in places})
            self._winners.append(remaining_runners[winner_place][0])
        return winner_place

    def choose(self, number: Number, draw: Draw | None, weights: Sequence[Fraction], decision: str) -> int:
        """The outcome in whose part of [0, 1) the number lies, the parts being as long as their weights."""
        total = sum(weights)
        if number.free and not self._shares_used_words(number):
            possible = [place for place, weight in enumerate(weights) if weight > 0]
            outcome = self.fork.branch(weights, decision)
            below = sum(weights[:outcome], Fraction(0))
            if len(possible) > 1:
                self._use(number, Use(draw, stack_here(1)[0], None))
            number.low, number.high = below / total, (below + weights[outcome]) / total
            return outcome
        below = Fraction(0)
        for place, weight in enumerate(weights):
            below += weight
            if weight > 0 and (below == total or self.below(number, draw, below / total, decision)):
                return place
        raise ValueError(f"{decision}: nothing has a positive weight")

    def spend(
        self, numbers: Sequence[Number], draw: Draw | None, law: Callable[[], Sequence[Fraction]], decision: str
    ) -> int:
        """Decide by a law of numbers of which nothing is known, after which they may decide nothing more."""
        if len({id(number) for number in numbers}) < len(numbers):
            raise DecidesTooOften(f"one number has several parts in {decision}")
        use = Use(draw, stack_here(1)[0], len(self._races))
        for number in numbers:
            self._use(number, use)
        if any(len(number.uses) > 1 for number in numbers):
            raise DecidesTooOften(f"{decision} of numbers that decided before")
        for number in numbers:
            number.spent = True
        return self.fork.branch(law(), decision)

    def _shares_used_words(self, number: Number) -> bool:
        return any(shared_number.uses for shared_number in self._numbers_of_its_words(number))

    def _use(self, number: Number, use: Use) -> None:
        """Note a decision, and whether a decision of another draw or race was made with these words before."""
        self._meet_others(number, use)
        for earlier in number.uses:
            same_draw = earlier.draw is use.draw
            if not (same_draw and earlier.race == use.race):
                self.tell_shared(earlier, use)
        if number.spent:
            raise DecidesTooOften("numbers decide once more after a decision that leaves no law")
        number.uses.append(use)

    def tell_shared(self, earlier: Use, use: Use) -> None:
        """Note that one place decided twice."""
        shared_number = SharedNumber(earlier, use)
        self.shared_by_text.setdefault(str(shared_number), shared_number)

    def _meet_others(self, number: Number, use: Use) -> None:
        for shared_number in self._numbers_of_its_words(number):
            if not shared_number.uses:
                continue
            kinds = {number.kind, shared_number.kind}
            if kinds != {SINGLE, DOUBLE}:
                self.tell_shared(shared_number.uses[0], use)
                raise DecidesTooOften("draws make different numbers of the same words")
            single, double = (number, shared_number) if number.kind == SINGLE else (shared_number, number)
            assert single.place is not None
            assert double.place is not None
            # The second word of a float64 holds its low 32 bits, of which a decision tells next to nothing.
            if single.place.offset != double.place.offset:
                continue
            self.tell_shared(shared_number.uses[0], use)
            if single.cells is None:
                self._tell_cells_apart(single, double)

    def _tell_cells_apart(self, single: Number, double: Number) -> None:
        """Link a float32 with the float64 of the same word, which is 8 times the first without its whole part."""
        low, high = EIGHTH * single.low, EIGHTH * single.high
        first, last = math.floor(low), math.ceil(high) - 1
        if first == last:
            single.cells = (first, first + 1)
            double.low, double.high = low - first, high - first
            return
        inside = (math.ceil(low), math.floor(high))
        pieces = [(first, first + 1), inside, (last, last + 1)]
        weights = [Fraction(inside[0]) - low, Fraction(inside[1] - inside[0]), high - inside[1]]
        piece = self.fork.branch(weights, "which eighths a coin may lie in")
        single.cells = pieces[piece]
        if piece == 0:
            double.low = low - first
        elif piece == 2:
            double.high = high - last
        single.low, single.high = Fraction(0), Fraction(1)

    def _below_by_cells(self, single: Number, limit: Fraction, decision: str) -> bool:
        assert single.cells is not None
        assert single.place is not None
        begin, end = single.cells
        scaled_limit = EIGHTH * limit
        cell = math.floor(scaled_limit)
        pieces = [(begin, min(cell, end)), (max(cell, begin), min(cell + 1, end)), (max(cell + 1, begin), end)]
        counts = [Fraction(max(high - low, 0)) for low, high in pieces]
        piece = self.fork.branch(counts, decision)
        single.cells = pieces[piece]
        if piece != 1:
            return piece == 0
        place = Place(single.place.stream, single.place.offset, 2)
        double = self.number(DOUBLE, place)
        if not 0 < scaled_limit - cell < 1:
            return False
        double.uses.append(single.uses[-1])
        return self._below(double, scaled_limit - cell, decision)

    def _now(self, number: Number) -> Fraction:
        """The probability of all that was decided by the numbers that races bind to this one."""
        members = {number: 0}
        waiting = [number]
        while waiting:
            current = waiting.pop()
            for race, _ in zip(self._races, self._winners, strict=False):
                if current in race:
                    for member_of_race in race:
                        if member_of_race not in members:
                            members[member_of_race] = len(members)
                            waiting.append(member_of_race)
        races: list[Race] = []
        for race, winner in zip(self._races, self._winners, strict=False):
            if winner in members:
                races.append((tuple((members[runner], weight) for runner, weight in race.items()), members[winner]))
        bounds: list[Bound] = []
        for member, place in members.items():
            if member.low > 0 or member.high < 1:
                bounds.append((place, *member.bound()))
        return probability(tuple(races), tuple(bounds))


def _without_noise(parts: Sequence[Fraction]) -> list[Fraction]:
    """The probabilities, with 0 for each that is nothing but the rounding of an integral."""
    total = sum(parts)
    return [part if part > total * Fraction(1, 10**13) else Fraction(0) for part in parts]
