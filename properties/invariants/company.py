"""One request of a session beside the same request in another run: its numbers and tokens must be the same."""

from collections.abc import Iterator

from properties.invariants.rows import compared, placed
from properties.tolerance.closeness import noise
from properties.tolerance.ties import TIE_SIGMA
from properties.verdict.finding import Compared, Finding
from properties.verdict.invariant import Fact, Oracle
from properties.verdict.session_members import Member
from properties.verdict.subject import Subject
from reference.case import Case
from reference.session import Account
from reference.trace import Stage, Trace


def alike(name: str, member: Member, other: Trace, oracle: Oracle, subject: Subject, variant: str) -> Iterator[Fact]:
    """Findings where request `member` is not, within a pair's noise, what `other` shows of it.

    Steps are compared while both have the same context and tree; texts may part where the top two logits tie.
    """
    error = noise(member.alone, oracle, subject)
    for number, (one, twin) in enumerate(zip(member.trace.steps, other.steps, strict=False)):
        if one.drafted is None or twin.drafted is None or one.scored is None or twin.scored is None:
            continue
        yield Compared(0)
        if one.context != twin.context or one.drafted.tree != twin.drafted.tree:
            return
        rows = list(range(len(one.drafted.tree)))
        for fact in compared(name, twin, one, rows, rows, error, variant):
            yield placed(fact, number, request=member.number)
            if isinstance(fact, Finding):
                return
        if one.emitted is not None and twin.emitted is not None and one.emitted.tokens != twin.emitted.tokens:
            ranked = twin.scored.logits.copy()
            ranked.partition(ranked.shape[1] - 2, axis=1)
            # Sampled or nearly tied: a coin beside its threshold falls on either side of the noise.
            margin = float((ranked[:, -1] - ranked[:, -2]).min()) if ranked.shape[1] > 1 else float("inf")
            if member.alone.sampling.greedy and margin > TIE_SIGMA * error.logits:
                where: dict[str, int | str] = {"request": member.number, "variant": variant}
                yield Finding(name, Stage.EMITTED, number, where, twin.emitted.tokens, one.emitted.tokens)
            return


def accounts_of(trace: Trace) -> tuple[Account, ...]:
    """The accounts of a session, one after each action; none where the trace holds none."""
    return trace.shared.accounts if trace.shared is not None else ()


def present(accounts: tuple[Account, ...], at: int) -> set[int]:
    """Requests that could take a step when action `at` began, by the account after the action before."""
    return set(accounts[at - 1].committed) if 0 < at <= len(accounts) else set()


def in_session(case: Case) -> bool:
    """Whether the case serves several requests."""
    return case.session is not None
