"""The texts of a finding: the prompt, the output that must be, and the output that is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from specverify.properties.verdict.finding import Finding, Verdict
from specverify.properties.verdict.invariant import NotApplicable, Oracle
from specverify.properties.verdict.subject import NoTrace
from specverify.reference.case import Case
from specverify.reference.malformed import Malformed
from specverify.reference.trace import Trace


@dataclass(frozen=True)
class Texts:
    """One request in tokens.

    Attributes:
        prompt: Token ids of the prompt.
        must_be: The output that the reference gives; None where it is not known, as for tokens drawn by coins that are
            the backend's own.
        observed: The output of the backend.
        words: The three rows as text, where the model has a tokenizer; else empty. A row that is not known is empty.
    """

    prompt: tuple[int, ...]
    must_be: tuple[int, ...] | None
    observed: tuple[int, ...]
    words: tuple[str, ...] = ()

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that differs, counted from 0; None where none does, or none can be told."""
        if self.must_be is None:
            return None
        pairs = zip_longest(self.must_be, self.observed)
        return next((index for index, (due, actual) in enumerate(pairs) if due != actual), None)


def texts_of(verdict: Verdict, finding: Finding, oracle: Oracle) -> Texts | None:
    """The texts of the request that `finding` is about; None where the trace does not show its output."""
    request = request_run(verdict, finding)
    if request is None:
        return None
    case, trace = request
    if "variant" in finding.where:
        return None  # the difference lies in another run than the one whose output the trace shows
    observed = tuple(trace.output)
    return Texts(case.prompt, greedy_text(case, observed, finding.where.get("position"), oracle), observed)


def request_run(verdict: Verdict, finding: Finding) -> tuple[Case, Trace] | None:
    """The request of `finding` as a case of its own, and its run; None where the trace does not hold it."""
    case, trace = verdict.case, verdict.trace
    number = finding.where.get("request", 0)
    if trace is None or not isinstance(number, int):
        return None
    if case.session is None or trace.shared is None:
        return (case.alone(), trace) if number == 0 else None
    if not 0 <= number < len(trace.shared.requests):
        return None
    run = trace.shared.requests[number]
    return None if run is None else (case.alone(number), run)


def greedy_text(case: Case, observed: Sequence[int], position: object, oracle: Oracle) -> tuple[int, ...] | None:
    """The output that a greedy `case` must have; None where the case draws, or the reference has no answer.

    Where `observed` leaves it before the finding's `position`, it does so at a near tie that rule T excuses: the text
    that must be then follows the observed one up to `position`.
    """
    if not case.sampling.greedy:
        return None
    # A limit of steps ends the output where the drafted trees do; otherwise plain decoding says the same sooner.
    reference_case = case if case.steps else case.plain_decode()
    try:
        due = tuple(oracle(reference_case).output)
        shared = next(
            (index for index, pair in enumerate(zip(due, observed, strict=False)) if pair[0] != pair[1]), len(due)
        )
        if not isinstance(position, int) or not shared < position < len(observed):
            return due
        context = (*case.prompt, *observed[:position])
        room = replace(case.stops, max_new_tokens=max(1, case.stops.max_new_tokens - position))
        layout = replace(case.layout, pages=())
        continued_case = replace(case.plain_decode(), prompt=context, stops=room, layout=layout)
        return (*observed[:position], *oracle(continued_case).output)
    except (Malformed, NotApplicable, NoTrace):
        return None
