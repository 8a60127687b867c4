"""The invariant of a server's matchers: each stands where the emitted tokens end."""

from collections.abc import Iterator

from specverify.properties.invariants.lossless.guided import has_grammar
from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.invariant import Fact, Invariant, Oracle, Unobserved, needing
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.oracle.language import legal_after
from specverify.reference.trace import Stage


def matcher_in_step(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """After each step the matcher has read the emitted tokens once, up to the first that is not legal.

    A request that was preempted, evicted, restored or forked from shows it in its next step.
    """
    assert case.sampling.grammar is not None
    output: tuple[int, ...] = ()
    read = 0
    for number, step in enumerate(subject(case).steps):
        if step.emitted is None or step.committed is None or step.committed.matched is None:
            raise Unobserved("the backend does not reveal how far its matcher has read")
        for token in step.emitted.tokens:
            output += (token,)
            read += not legal_after(case.sampling.grammar, case.stops.eos, output).refused
        yield Comparisons()
        if step.committed.matched != read:
            where: dict[str, int | str] = {"side": "matcher"}
            name = "serving.matcher-in-step"
            yield Finding(name, Stage.COMMITTED, number, where, read, step.committed.matched)
            return


INVARIANTS = (
    Invariant(
        "serving.matcher-in-step",
        "After every step the grammar's matcher has read each emitted token once, and nothing that was only drafted.",
        needing(Stage.EMITTED, Stage.COMMITTED),
        matcher_in_step,
        has_grammar,
    ),
)
