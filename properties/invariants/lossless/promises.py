"""Invariants of promises that only some engines make.

A field of `Abilities` declares each. An engine that promises that a draft changes no draw is compared token by token,
and one that can be interrupted is interrupted.
"""

from collections.abc import Iterator
from dataclasses import replace

from specverify.properties.generations import outputs_of, with_seeds
from specverify.properties.invariants.applies import divergence, is_sampled
from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.invariant import TURNS, Fact, Invariant, NotApplicable, Oracle, needing
from specverify.properties.verdict.subject import Subject
from specverify.properties.verdict.variants import dice
from specverify.reference.case import Case
from specverify.reference.trace import Stage

FURTHER = 24
"""Further seeds among which a second divergence is looked for."""

CLOSED = 3
"""The number of the run (`Subject.run_again`) that is interrupted, and of the one after it; others have 1 and 2."""


def same_seed(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """The tokens are those of the same request and seed without a draft.

    A draw lies within the rounding of float32 from another token about once in 1e6 draws. A divergence counts there if
    a second one is found under FURTHER other seeds; in float64 the first one counts.

    Raises:
        NotApplicable: The case is plain decoding, or its dtype has 16 bits, in which rounding moves many draws.
    """
    if case.plain_decode() == case or case.dtype not in ("float32", "float64"):
        raise NotApplicable("plain decoding, or 16 bits")
    parting = _divergence(case, subject)
    yield Comparisons(len(subject(case).output))
    if parting is None:
        return
    if case.dtype == "float32":
        seeds = dice(case, "same seed").integers(0, 2**31, size=FURTHER).tolist()
        seeded_cases = [replace(case, sampling=replace(case.sampling, tape=(), seed=seed)) for seed in seeds]
        plain_outputs = outputs_of([seeded_case.plain_decode() for seeded_case in seeded_cases], subject)
        if plain_outputs == outputs_of(seeded_cases, subject):
            return
    position, expected, observed = parting
    yield Finding("lossless.same-seed", Stage.EMITTED, 0, {"position": position}, expected, observed)


def _divergence(case: Case, subject: Subject) -> tuple[int, int | str, int | str] | None:
    """The first place where draft and no draft differ, with the token of each; None where they do not."""
    plain, drafted = subject(case.plain_decode()).output, subject(case).output
    return divergence(plain, drafted, max(len(plain), len(drafted)))


def own_seed(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Each sampled request of a session has the tokens that it has alone; of a cancelled one, the first of them.

    In float32 a divergence counts if the session on one of FURTHER other seeds has one too, as in `same_seed`.

    Raises:
        NotApplicable: The dtype has 16 bits, in which rounding moves many draws.
    """
    if case.dtype not in ("float32", "float64"):
        raise NotApplicable("16 bits")
    assert case.session is not None
    sampled = [number for number in range(1 + len(case.session.mates)) if is_sampled(case.alone(number))]
    parting, compared = _divergence_from_alone(case, sampled, subject)
    yield Comparisons(compared)
    if parting is None:
        return
    if case.dtype == "float32":
        seeds = dice(case, "own seed").integers(0, 2**31, size=(FURTHER, 1 + len(case.session.mates))).tolist()
        sessions = (with_seeds(case, session_seeds) for session_seeds in seeds)
        if all(_divergence_from_alone(session, sampled, subject)[0] is None for session in sessions):
            return
    number, (position, expected, observed) = parting
    where: dict[str, int | str] = {"request": number, "position": position}
    yield Finding("lossless.own-seed", Stage.EMITTED, 0, where, expected, observed)


def _divergence_from_alone(
    case: Case, numbers: list[int], subject: Subject
) -> tuple[tuple[int, tuple[int, int | str, int | str]] | None, int]:
    """The first of the requests that differs from itself alone, with its `divergence`; and the number of tokens."""
    assert case.session is not None
    shared = subject(case).shared
    cancelled = {number for action in case.session.actions if action.kind == "cancel" for number in action.requests}
    compared = 0
    for number in numbers:
        run = None if shared is None else shared.requests[number]
        if run is None:
            continue
        alone = subject(case.alone(number)).output
        length = len(run.output) if number in cancelled else max(len(alone), len(run.output))
        compared += length
        parting = divergence(alone, run.output, length)
        if parting is not None:
            return (number, parting), compared
    return None, compared


def _is_continuous(case: Case) -> bool:
    return case.session is not None and case.session.continuous


def interruption(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """A run that is ended after some of its steps gave the first tokens of the whole run, and the next run is whole.

    Raises:
        NotApplicable: The run has one step, so that nothing can interrupt it.
    """
    full_run = subject(case)
    name = "lossless.interrupted"
    if len(full_run.steps) < 2:
        raise NotApplicable("a run of one step has no middle")
    steps = int(dice(case, "interrupted").integers(1, len(full_run.steps)))
    part = subject.run_again(replace(case, steps=steps), CLOSED)
    after = subject.run_again(case, CLOSED)
    yield Comparisons(len(part.output) + len(after.output))
    if len(part.steps) != steps:
        yield Finding(name, Stage.EMITTED, 0, {"side": "steps"}, f"{steps} steps", f"{len(part.steps)} steps")
    elif part.output != full_run.output[: len(part.output)] or not part.output:
        place: dict[str, int | str] = {"side": "the interrupted run"}
        yield Finding(name, Stage.EMITTED, steps - 1, place, full_run.output[: len(part.output)], part.output)
    if (after.output, after.finish) != (full_run.output, full_run.finish):
        yield Finding(name, Stage.COMMITTED, steps - 1, {"side": "the next run"}, full_run.output, after.output)


INVARIANTS = (
    Invariant(
        "lossless.same-seed",
        "Where the engine promises it, the same seed gives the same tokens with and without a draft.",
        needing(Stage.EMITTED),
        same_seed,
        is_sampled,
        promise="same_seed",
    ),
    Invariant(
        "lossless.own-seed",
        "Where the engine promises it, a sampled request has the tokens of its own seed, whatever runs beside it.",
        needing(Stage.EMITTED),
        own_seed,
        _is_continuous,
        speaks_of="session",
        promise="own_seed",
    ),
    Invariant(
        "lossless.interrupted",
        "A run that is ended early gave the first tokens of the whole run, and leaves nothing behind.",
        needing(Stage.EMITTED),
        interruption,
        every=TURNS,
        promise="interruptible",
    ),
)
