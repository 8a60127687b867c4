"""Streams: the tests of a run as bodies of evidence.

A stream holds all tests that put one question to the engine at one setting. The bets of a test go on from case to case,
so that a fault which each case shows a little adds up over the run, and the price of not knowing which bet is the right
one is paid once.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.special import logsumexp

from specverify.properties.bet_group import BetGroup
from specverify.properties.laws.sampled.draft_faults import ACCEPT, BETS, FAULTS
from specverify.properties.laws.sampled.gate import log_evidence, stream_bar
from specverify.properties.resolution import Resolution
from specverify.properties.verdict.finding import Evidence
from specverify.reference.case import Case


@dataclass(frozen=True)
class Sight:
    """One fault at one place of the texts.

    Attributes:
        fault: The fault in words.
        tokens: Number of tokens at the beginning of each text that the fault reaches; 0 for all.
        shown: Whether the bets would have shown it with probability .99.
        share: Share of the draws at these places that the weakest fault moves that would have shown; of the strongest
            that is bet on where none would have.
    """

    fault: str
    tokens: int
    shown: bool
    share: float


def sights(group: BetGroup, bar: float) -> tuple[Sight, ...]:
    """The faults of a group, each at each of its places, with whether a bet would have reached e^`bar`."""
    return tuple(_sights(group, bar))


def _sights(group: BetGroup, bar: float) -> Iterator[Sight]:
    bets = [(bet.fault, bet.tokens) for bet in BETS if bet.group == group.name]
    if group.name == ACCEPT:
        bets = [(fault, 0) for fault in FAULTS]
    for fault, tokens in dict.fromkeys(bets):
        numbers = [number for number, bet in enumerate(bets) if bet == (fault, tokens)]
        shares = [group.mean_shift(number) for number in numbers if group.sees(number, bar)]
        yield Sight(fault, tokens, bool(shares), min(shares) if shares else max(map(group.mean_shift, numbers)))


def stream_of(invariant: str, case: Case) -> str:
    """The stream of a sampled case: its invariant, and the temperature, at which a fault has one direction."""
    return f"{invariant} at temperature {case.sampling.temperature:g}"


@dataclass(frozen=True)
class SamplingPlan:
    """The shifts that the sampling of a run was to see, told before its first case.

    Attributes:
        draws: About as many draws as the run was to make.
        smallest: The smallest shift per draw that so many draws show with probability .99 where the likeliest token has
            half of the mass.
    """

    draws: int
    smallest: float


@dataclass(frozen=True)
class ExpectedDraws:
    """The draws that a drawn case adds to the sampling of a run.

    Attributes:
        draws: About as many draws as a case makes on average.
        bet: The resolution of one draw where the likeliest token has half of the mass.
        bar: The logarithm that a bet's wealth must reach.
    """

    draws: float
    bet: Resolution
    bar: float

    def over(self, cases: int) -> SamplingPlan | None:
        """The shifts that so many cases are to show; None where they make no draws."""
        count = round(cases * self.draws)
        return SamplingPlan(count, self.bet.times(count).smallest(self.bar)) if count else None


@dataclass
class Stream:
    """The evidence on one question.

    Attributes:
        name: The question.
        tests: Cases that were asked it.
        draws: Draws of these cases.
        parts: Natural logs of the e-values of the bets, each over all cases.
        resolution: What the bets would have seen.
        group: The bets, where they are those of one group on the engine's draft; None elsewhere.
    """

    name: str
    tests: int = 0
    draws: int = 0
    parts: tuple[float, ...] = ()
    resolution: Resolution = field(default_factory=Resolution)
    group: BetGroup | None = None

    def add(self, test: Evidence) -> None:
        """Take the test of one more case.

        The tests have coins of their own and each stops by a rule that looks at the past alone, so that the product of
        their e-values, bet by bet, is an e-value.
        """
        self.tests += 1
        self.draws += test.rounds
        self.parts = test.parts if not self.parts else tuple((np.array(self.parts) + np.array(test.parts)).tolist())
        self.resolution = self.resolution + (test.resolution or Resolution())

    def add_group(self, group: BetGroup) -> None:
        """Take a group's bets on the draws of one more case."""
        self.tests += 1
        self.draws += group.draws
        self.group = group if self.group is None else self.group + group
        self.parts = self.group.log_es

    @property
    def log_e(self) -> float:
        """Natural log of the e-value: the mean over the bets; 0 without a test."""
        return float(logsumexp(self.parts)) - math.log(len(self.parts)) if self.parts else 0.0


@dataclass(frozen=True)
class Streams:
    """All streams of a run.

    Attributes:
        settings: The streams, by question and setting.
        over_settings: For each invariant with several settings, one stream over all of them: a fault may have one
            direction at every setting. Each group of bets on faults of the draft is one stream too, over all settings.
    """

    settings: tuple[Stream, ...] = ()
    over_settings: tuple[Stream, ...] = ()

    @property
    def all(self) -> tuple[Stream, ...]:
        """Every stream among which the run spreads its money."""
        return (*self.over_settings, *self.settings)

    @property
    def log_es(self) -> list[float]:
        """Natural logs of the e-values of `all`."""
        return [stream.log_e for stream in self.all]

    def smallest(self, stream: Stream) -> float:
        """The smallest shift per draw that `stream` would have shown with probability .99, 0 to 1."""
        return stream.resolution.smallest(stream_bar(max(1, len(stream.parts)), max(1, len(self.all))))

    def sights(self, stream: Stream) -> tuple[Sight, ...]:
        """The faults of the draft that a stream is about, each with whether it would have shown."""
        if stream.group is None:
            return ()
        return sights(stream.group, stream_bar(len(stream.parts), len(self.all)))

    @property
    def strongest(self) -> Stream | None:
        """The stream with the most evidence, or None."""
        return max(self.all, key=lambda stream: stream.log_e, default=None)


def streams_of(tests: Iterable[Evidence]) -> Streams:
    """The streams of a run's tests, in the order in which the questions came."""
    settings: dict[str, Stream] = {}
    by_invariant: dict[str, Stream] = {}
    grouped: dict[str, Stream] = {}
    for test in tests:
        if test.stream:
            settings.setdefault(test.stream, Stream(test.stream)).add(test)
            by_invariant.setdefault(test.invariant, Stream(test.invariant)).add(test)
        for group in test.groups:
            name = f"{test.invariant} {group.name}"
            grouped.setdefault(name, Stream(name)).add_group(group)
    pooled = (
        stream
        for stream in by_invariant.values()
        if sum(name.startswith(f"{stream.name} at ") for name in settings) > 1
    )
    return Streams(tuple(settings.values()), (*pooled, *grouped.values()))


def run_evidence(tests: Sequence[Evidence]) -> float:
    """Natural log of the e-value of a run: its tests and its streams together."""
    return log_evidence(np.array([test.log_e for test in tests]), streams=streams_of(tests).log_es)
