"""The lines of a page on sampling: its evidence, and the shift that it could see.

The shift is told as it was planned before the run, and as it is after it.
"""

from properties.streams import Planned, Stream, streams_of
from properties.tally import Tally
from reports.format import clean, number, plural
from reports.record import sampling_tests

GROSS = 0.2
"""A shift above which a sample is called too small: it shows gross faults alone."""


def evidence(tally: Tally) -> list[tuple[str, str]]:
    """The result of the tests of laws by sampling: their number, their evidence and their power."""
    if tally.excess_evidence is not None:
        return [("SAMPLING", clean(tally.excess_evidence)), *power(tally)]
    told = sampling_tests(tally)
    if not told["tests"]:
        return power(tally)
    seen = told["smallest_tv"]
    blocks = ""
    if seen is not None:
        blocks = (
            f"; half of those on tables see total variation {number(seen['median'])} or more with probability .99, "
            f"the weakest (given something rare) {number(seen['worst'])}"
        )
    total = f"evidence against the laws {number(told['evidence'])}, red at {number(told['red_at'])}"
    return [("sampling", f"{plural(told['tests'], 'test')} of laws by sampling; {total}{blocks}"), *power(tally)]


def power(tally: Tally) -> list[tuple[str, str]]:
    """The shift of whole generations that was to be seen, and the one that would have been seen."""
    facts = []
    if tally.planned is not None:
        facts.append(("power", f"before the run: {planned_line(tally.planned)}"))
    streams = streams_of(tally.evidence)
    for stream in streams.whole or streams.settings:
        parts = [one for one in streams.settings if one is not stream and one.name.startswith(f"{stream.name} at ")]
        alone = [f"{one.name.rsplit(' ', 1)[1]}: {percent(streams.smallest(one))}" for one in parts]
        each = f"; at one temperature alone {', '.join(alone)}" if alone else ""
        facts.append(("power", f"afterwards: {_line(stream, streams.smallest(stream))}{each}"))
    if tally.planned is not None and not streams.all:
        facts.append(("power", "afterwards: no draw was compared, so that no shift would have shown"))
    return facts


def planned_line(planned: Planned) -> str:
    """The shifts that the sampling of a run is to see, in one sentence."""
    return (
        f"about {plural(planned.draws, 'draw')} of whole generations, in which a shift of about "
        f"{percent(planned.smallest)} of the draws to or from the likeliest token would show"
    )


def _line(stream: Stream, smallest: float) -> str:
    """The shifts that one stream would have seen."""
    told = f"{plural(stream.draws, 'draw')} for {clean(stream.name)}, in which a shift of {percent(smallest)}"
    weak = "; that is weak: it would show gross faults alone" if smallest > GROSS else ""
    return f"{told} would have shown with probability .99{weak}"


def percent(share: float) -> str:
    """A share in per cent, with two digits."""
    return f"{number(float(f'{100 * share:.2g}'))} %"
