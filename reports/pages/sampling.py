"""The lines of a page on sampling: its evidence, what it could see, and what it could not.

The shift is told as it was planned before the run, and as it is after it.
"""

from collections.abc import Iterable

from specverify.properties.resolution import ACCEPTANCE, LIKELIEST
from specverify.properties.streams import SamplingPlan, Sight, Stream, Streams, streams_of
from specverify.properties.tally import Tally
from specverify.reports.format import clean, number, plural
from specverify.reports.record import sampling_tests

GROSS = 0.2
"""A shift above which a sample is called too small: it shows gross faults alone."""


def evidence_rows(tally: Tally) -> list[tuple[str, str]]:
    """The result of the tests of laws by sampling: their number, their evidence and their power."""
    if tally.excess_evidence is not None:
        return [("SAMPLING", clean(tally.excess_evidence)), *power_rows(tally)]
    tests = sampling_tests(tally)
    if not tests["tests"]:
        return power_rows(tally)
    smallest_tv = tests["smallest_tv"]
    blocks = ""
    if smallest_tv is not None:
        blocks = (
            f"; half of those on tables see total variation {number(smallest_tv['median'])} or more with probability "
            f".99, the weakest (given something rare) {number(smallest_tv['worst'])}"
        )
    total = f"evidence against the laws {number(tests['evidence'])}, red at {number(tests['red_at'])}"
    return [("sampling", f"{plural(tests['tests'], 'test')} of laws by sampling; {total}{blocks}"), *power_rows(tally)]


def power_rows(tally: Tally) -> list[tuple[str, str]]:
    """The shift of whole generations that was to be seen, the faults that would have been seen, and those that not."""
    facts = []
    if tally.planned is not None:
        facts.append(("power", f"before the run: {planned_line(tally.planned)}"))
    streams = streams_of(tally.evidence)
    grouped_streams = [stream for stream in streams.all if stream.group is not None]
    for stream in [stream for stream in streams.over_settings if stream.group is None] or streams.settings:
        parts = [part for part in streams.settings if part is not stream and part.name.startswith(f"{stream.name} at ")]
        shifts = [f"{part.name.rsplit(' ', 1)[1]}: {percent(streams.smallest(part))}" for part in parts]
        shift_words = f"; at one temperature alone {', '.join(shifts)}" if shifts else ""
        facts.append(("power", f"afterwards: {_line(stream, streams.smallest(stream))}{shift_words}"))
    facts += [("power", line) for stream in grouped_streams for line in _fault_lines(streams, stream)]
    if streams.all:
        facts.append(("power", NOT_ABOUT if grouped_streams else f"{NOT_ABOUT}; {OF_A_DRAFT}"))
    if tally.planned is not None and not streams.all:
        facts.append(("power", "afterwards: no draw was compared, so that no shift would have shown"))
    return facts


NOT_ABOUT = (
    "whole generations do not cover shifts among other tokens, shifts to the likeliest token after one text and from "
    "it after another, or one vector of noise that decides two races"
)
"""Faults that no statement of power is about."""

OF_A_DRAFT = "nor faults of a draft whose law is not known (a coin that drafts and accepts, a lean along p - q)"
"""Faults on which bets need the law of the draft."""


def _fault_lines(streams: Streams, stream: Stream) -> list[str]:
    """The faults of a draft that a stream would have shown, and those that it would not; a line for each kind."""
    sights = streams.sights(stream)
    draws = f"{plural(stream.draws, 'draw')} for {clean(stream.name)}"
    shown_sights = _weakest([sight for sight in sights if sight.shown])
    absent_sights = [
        sight for sight in sights if not any(candidate.shown and candidate.fault == sight.fault for candidate in sights)
    ]
    lines = [
        (shown_sights, "would have shown with probability .99"),
        (_strongest(absent_sights), "would not have shown"),
    ]
    return [
        f"afterwards: {draws}, which {verb}: {'; '.join(map(_sight, kind_sights))}"
        for kind_sights, verb in lines
        if kind_sights
    ]


def _weakest(sights: Iterable[Sight]) -> list[Sight]:
    """For each fault, the one that reaches the fewest tokens of a text."""
    fewest: dict[str, Sight] = {}
    for sight in sorted(sights, key=lambda sight: sight.tokens or float("inf")):
        fewest.setdefault(sight.fault, sight)
    return list(fewest.values())


def _strongest(sights: Iterable[Sight]) -> list[Sight]:
    """For each fault, the one that reaches the most tokens of a text."""
    return [sight for sight in sights if not sight.tokens]


def _sight(sight: Sight) -> str:
    """One fault in words."""
    where = f"the first {plural(sight.tokens, 'token')} of each text" if sight.tokens else "all draws"
    return f"{sight.fault}, moving {percent(sight.share)} of {where}"


def planned_line(planned: SamplingPlan) -> str:
    """The shifts that the sampling of a run is to see, in one sentence."""
    return (
        f"about {plural(planned.draws, 'draw')} of whole generations, in which a shift of about "
        f"{percent(planned.smallest)} of the draws to or from the likeliest token would show"
    )


def _line(stream: Stream, smallest: float) -> str:
    """The shifts that one stream would have seen."""
    events = {
        LIKELIEST: "of the draws to or from the likeliest token",
        ACCEPTANCE: "of the acceptances of drafted tokens",
    }
    about = " or ".join(events[event] for event in stream.resolution.about)
    draws = f"{plural(stream.draws, 'draw')} for {clean(stream.name)}, in which a shift of {percent(smallest)} {about}"
    weakness = "; that is weak: it would show gross faults alone" if smallest > GROSS else ""
    return f"{draws} would have shown with probability .99{weakness}"


def percent(share: float) -> str:
    """A share in per cent, with two digits."""
    return f"{number(float(f'{100 * share:.2g}'))} %"
