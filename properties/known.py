"""Known failures: signatures of findings that a reviewed ledger holds.

A signature keeps what a fault shows on a case of any size: the invariant, the stage, and the coordinates that name a
kind of thing (side, cache, key or value, variant). It leaves out every number, such as layer, node and slot.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specverify.properties.verdict.finding import FINISHED, Finding, Verdict
from specverify.reference.case import Case

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
class KnownFailure:
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
        kinds = (case.layout.kind, case.draft.TAG, case.dtype)
        return all(
            restriction in (None, kind)
            for restriction, kind in zip((self.layout, self.draft, self.dtype), kinds, strict=True)
        )


def without_numbers(text: str) -> str:
    """`text` on one line, without its numbers.

    >>> without_numbers("IndexError: index 7 is out of bounds for size 5, 3"), without_numbers("rows [1, 2, 3]")
    ('IndexError: index # is out of bounds for size #', 'rows [#]')
    """
    return NUMBERS.sub("#", " ".join(text.split()))[:LONGEST]


def signature(finding: Finding) -> Signature:
    """The signature of `finding`."""
    where = tuple((name, without_numbers(str(finding.where[name]))) for name in KINDS if name in finding.where)
    message = without_numbers(str(finding.observed)) if finding.expected == FINISHED else ""
    return Signature(finding.invariant, finding.stage.word, where, message)


def without_known_findings(verdict: Verdict, known_failures: Sequence[KnownFailure]) -> Verdict:
    """`verdict` without the findings that are known; `verdict.known` then names the failures that it met.

    Another finding counts as new if it lies no later (step, then stage) than the first known one, so that a known
    failure hides no other at its stage. A later one may be a consequence of the known failure: `verdict.behind` tells
    its signature. An invariant all of whose findings are set aside is `checked`, for it compared something.
    """
    signed_findings = [(finding, signature(finding)) for finding in verdict.findings] if known_failures else []
    found_signatures = {mark for _, mark in signed_findings}
    met_failures = [
        failure for failure in known_failures if failure.main in found_signatures and failure.speaks_of(verdict.case)
    ]
    if not met_failures:
        return verdict
    known_signatures = {
        known_signature for failure in met_failures for known_signature in (failure.main, *failure.also)
    }
    mains = {failure.main for failure in met_failures}
    first = min((finding.step, finding.stage) for finding, mark in signed_findings if mark in mains)
    fresh_findings, later_signatures = [], []
    for finding, mark in signed_findings:
        if mark in known_signatures:
            continue
        if (finding.step, finding.stage) <= first:
            fresh_findings.append(finding)
        else:
            later_signatures.append(str(mark))
    failing_names = {finding.invariant for finding in fresh_findings}
    outcomes = {
        name: "checked" if outcome == "failed" and name not in failing_names else outcome
        for name, outcome in verdict.outcomes.items()
    }
    names = tuple(failure.name for failure in met_failures)
    return replace(
        verdict,
        findings=tuple(fresh_findings),
        outcomes=outcomes,
        known=names,
        behind=tuple(dict.fromkeys(later_signatures)),
    )
