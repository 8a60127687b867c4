"""Known failures: signatures of findings that a reviewed ledger holds.

A signature keeps what a fault shows on a case of any size: the invariant, the stage, and the coordinates that name a
kind of thing (side, cache, key or value, variant). It leaves out every number, such as layer, node and slot.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from properties.verdict.finding import FINISHED, Finding, Verdict
from reference.case import Case

KINDS = ("side", "cache", "kind", "variant")
"""The coordinates of `Finding.where` that a signature keeps, with their numbers replaced."""

LONGEST = 160
"""The most characters of a text in a signature."""

NUMBERS = re.compile(r"0x[0-9a-f]+|\d+(?:\.\d+)?(?:, ?\d+(?:\.\d+)?)*", re.IGNORECASE)
"""A number, an address of memory, or a list of numbers."""


@dataclass(frozen=True)
class Signature:
    """The part of a finding that is the same on a case of any size.

    Attributes:
        invariant: The invariant that does not hold.
        stage: The word of the stage at which the difference began.
        where: Coordinates of KINDS, by name, in order; each number is `#`.
        broke: The message of a run that broke, with `#` for numbers; empty for a difference of values.
    """

    invariant: str
    stage: str
    where: tuple[tuple[str, str], ...] = ()
    broke: str = ""

    def __str__(self) -> str:
        """The signature on one line, as `invariant at stage (coordinates): message`."""
        places = f" ({', '.join(f'{name} {value}' for name, value in self.where)})" if self.where else ""
        return f"{self.invariant} at {self.stage}{places}{': ' if self.broke else ''}{self.broke}"


@dataclass(frozen=True)
class Known:
    """A failure that is known.

    Attributes:
        name: The name by which a verdict tells that it met the failure.
        main: The signature of the finding that locates the failure.
        also: Signatures of further findings on the same case, which count as known only beside `main`.
        layout: The only KV layout of cases on which the failure is known, or None for all.
        draft: The only kind of draft, or None for all.
        dtype: The only working dtype, or None for all.
    """

    name: str
    main: Signature
    also: tuple[Signature, ...] = ()
    layout: str | None = None
    draft: str | None = None
    dtype: str | None = None

    def speaks_of(self, case: Case) -> bool:
        """Whether the failure is known on such a case."""
        has = (case.layout.kind, case.draft.TAG, case.dtype)
        return all(only in (None, what) for only, what in zip((self.layout, self.draft, self.dtype), has, strict=True))


def unsized(text: str) -> str:
    """`text` on one line, without its numbers.

    >>> unsized("IndexError: index 7 is out of bounds for size 5, 3"), unsized("rows [1, 2, 3]")
    ('IndexError: index # is out of bounds for size #', 'rows [#]')
    """
    return NUMBERS.sub("#", " ".join(text.split()))[:LONGEST]


def signature(finding: Finding) -> Signature:
    """The signature of `finding`."""
    where = tuple((name, unsized(str(finding.where[name]))) for name in KINDS if name in finding.where)
    broke = unsized(str(finding.observed)) if finding.expected == FINISHED else ""
    return Signature(finding.invariant, finding.stage.word, where, broke)


def recognised(verdict: Verdict, known: Sequence[Known]) -> Verdict:
    """`verdict` without the findings that are known; `verdict.known` then names the failures that it met.

    Another finding counts as new if it lies no later (step, then stage) than the first known one, so that a known
    failure hides no other at its stage. A later one may be a consequence of the known failure: `verdict.behind` tells
    its signature. An invariant all of whose findings are set aside is `checked`, for it compared something.
    """
    told = [(finding, signature(finding)) for finding in verdict.findings] if known else []
    shown = {says for _, says in told}
    met = [one for one in known if one.main in shown and one.speaks_of(verdict.case)]
    if not met:
        return verdict
    signatures = {one for entry in met for one in (entry.main, *entry.also)}
    mains = {entry.main for entry in met}
    first = min((finding.step, finding.stage) for finding, says in told if says in mains)
    fresh, behind = [], []
    for finding, says in told:
        if says in signatures:
            continue
        if (finding.step, finding.stage) <= first:
            fresh.append(finding)
        else:
            behind.append(str(says))
    failing = {finding.invariant for finding in fresh}
    outcomes = {
        name: "checked" if outcome == "failed" and name not in failing else outcome
        for name, outcome in verdict.outcomes.items()
    }
    names = tuple(entry.name for entry in met)
    return replace(verdict, findings=tuple(fresh), outcomes=outcomes, known=names, behind=tuple(dict.fromkeys(behind)))
