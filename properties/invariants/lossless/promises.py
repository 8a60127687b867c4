"""Invariants of promises that only some engines make.

A field of `Abilities` declares each. An engine that promises that a draft changes no draw is compared token by token,
and one that can be interrupted is interrupted.
"""

from collections.abc import Iterator
from dataclasses import replace

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
        other_cases = (replace(case, sampling=replace(case.sampling, tape=(), seed=seed)) for seed in seeds)
        if all(_divergence(other_case, subject) is None for other_case in other_cases):
            return
    position, expected, observed = parting
    yield Finding("lossless.same-seed", Stage.EMITTED, 0, {"position": position}, expected, observed)


def _divergence(case: Case, subject: Subject) -> tuple[int, int | str, int | str] | None:
    """The first place where draft and no draft differ, with the token of each; None where they do not."""
    plain, drafted = subject(case.plain_decode()).output, subject(case).output
    return divergence(plain, drafted, max(len(plain), len(drafted)))


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
        "lossless.interrupted",
        "A run that is ended early gave the first tokens of the whole run, and leaves nothing behind.",
        needing(Stage.EMITTED),
        interruption,
        every=TURNS,
        promise="interruptible",
    ),
)
