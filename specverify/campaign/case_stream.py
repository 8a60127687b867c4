"""Streams: the cases of one seed in the order in which a search judges them."""

from collections.abc import Iterator
from functools import cache

from specverify.campaign.aim import swarm_of_round
from specverify.campaign.novelty import Novelty
from specverify.campaign.search import BARREN, ROUND, round_seed
from specverify.properties.strategies import cases
from specverify.properties.strategies.settings import explore
from specverify.reference.abilities import Abilities
from specverify.reference.case import Case


class Stream:
    """Cases of one seed without repetition, in the order in which `Search.run` judges them while nothing differs.

    `variant_interval` is that of the backend (`specverify.backends.base.Declaration`): slow backends get shorter
    prompts. Cases lie `within` its abilities, or are of any kind if None, may name the `processors`, and have the KV
    layout `layout`, if it is given.
    """

    def __init__(
        self,
        number: int,
        dtypes: tuple[str, ...],
        variant_interval: int = 1,
        within: Abilities | None = None,
        *,
        processors: tuple[str, ...] = (),
        layout: str | None = None,
    ) -> None:
        self._number = number
        self._dtypes = dtypes
        self._variant_interval = variant_interval
        self._within = within
        self._processors = processors
        self._layout = layout
        self._drawn: dict[Case, None] = {}
        self._cases: list[Case] = []
        self._rounds = 0
        self._novelty = Novelty()

    def __iter__(self) -> Iterator[Case]:
        """Yield cases, drawing new ones when needed; stop after BARREN successive rounds without a new case."""
        index = 0
        while True:
            while index < len(self._cases):
                yield self._cases[index]
                index += 1
            for _ in range(BARREN):
                self._round()
                if index < len(self._cases):
                    break
            else:
                return

    def _round(self) -> None:
        def collect(case: Case) -> None:
            # A dict keeps the order, and finds repeated cases quickly.
            if case not in self._drawn and self._novelty.takes(case):
                self._drawn[case] = None
                self._cases.append(case)

        number = round_seed(self._number, self._rounds)
        swarm = swarm_of_round(number, self._within, self._variant_interval > 1, self._novelty)
        drawn = cases(self._dtypes, self._processors, self._layout, self._variant_interval, self._within, swarm=swarm)
        explore(number, ROUND, drawn, collect)
        self._rounds += 1


@cache
def stream(number: int, dtypes: tuple[str, ...], variant_interval: int = 1) -> Stream:
    """The stream of seed `number`, which is kept as long as the process lives."""
    return Stream(number, dtypes, variant_interval)
