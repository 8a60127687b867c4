"""Conditions on cases, and questions to a trace, that invariants in several files share."""

from dataclasses import replace

from specverify.properties.verdict.invariant import NotApplicable, Unobserved
from specverify.properties.verdict.subject import Subject, Tables
from specverify.reference.case import Case
from specverify.reference.trace import Trace


def is_greedy(case: Case) -> bool:
    """Whether the case decodes greedily; sampled cases have invariants on coins and laws instead."""
    return case.sampling.greedy


def is_sampled(case: Case) -> bool:
    """Whether the case samples its tokens."""
    return not case.sampling.greedy


def is_drawn(case: Case) -> bool:
    """Whether coins draw the draft's tokens, so that only the draft's scores can be compared with the oracle's."""
    sampling = case.sampling
    # "top-k" takes the best tokens of each row and tosses no coin.
    return case.draft.has_law and not sampling.greedy and sampling.draws != "top-k"


def plain_decode_of(case: Case, output: tuple[int, ...]) -> Case:
    """Plain decoding of `case`, as far as its `output` can be compared: a limit of steps ends a run early."""
    plain = case.plain_decode()
    if not case.steps or not 0 < len(output) < plain.stops.max_new_tokens:
        return plain
    return replace(plain, stops=replace(plain.stops, max_new_tokens=len(output)))


def check_seeded(case: Case, subject: Subject) -> None:
    """Raise NotApplicable where the engine draws on random numbers that no request decides."""
    if not case.sampling.greedy and subject.abilities is not None and not subject.abilities.seeded:
        raise NotApplicable("what the engine draws does not follow the seed")


def comparable_trace(trace: Trace, subject: Subject) -> Trace:
    """The trace without log-probabilities, where the engine does not promise the same bits again."""
    if subject.abilities is None or subject.abilities.same_bits:
        return trace
    steps = [
        step if step.emitted is None else replace(step, emitted=replace(step.emitted, logprobs=None))
        for step in trace.steps
    ]
    return replace(trace, steps=tuple(steps))


def tables_of(subject: Subject, how: str) -> Tables:
    """The backend's sampling on tables of probabilities; `how` says on what the invariant runs it.

    Raises:
        Unobserved: The backend has no such entry point.
    """
    if subject.tables is None:
        raise Unobserved(f"the backend's sampling cannot be run {how}")
    return subject.tables


def step_of_token(trace: Trace, position: int, beyond: int = 0) -> int:
    """The step that emitted the token at `position`; `beyond` where no step did."""
    steps = emitting_steps(trace)
    return steps[position] if position < len(steps) else beyond


def emitting_steps(trace: Trace) -> list[int]:
    """The step that emitted each output token."""
    return [number for number, step in enumerate(trace.steps) if step.emitted for _ in step.emitted.tokens]


def divergence(
    expected: tuple[int, ...], observed: tuple[int, ...], length: int
) -> tuple[int, int | str, int | str] | None:
    """The first place below `length` where two outputs differ, with the token of each there, or `the end`."""
    for position in range(length):
        tokens = [output[position] if position < len(output) else "the end" for output in (expected, observed)]
        if tokens[0] != tokens[1]:
            return position, tokens[0], tokens[1]
    return None
