"""Comparison of two runs: of a request in two sessions, and of a case with a variant of its layout.

The invariants of batches, sessions and prefix reuse call `compare_request`, those of layouts `same_bits`; the other
functions read a session's accounts.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from specverify.properties.invariants.own_laws import are_decided, node_scores, stretched
from specverify.properties.invariants.rows import compare_rows, rows_of, with_place
from specverify.properties.tolerance.closeness import Noise, noise
from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.invariant import Fact, Oracle
from specverify.properties.verdict.session_members import Member
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.draft import Draft, most_rows, step_columns
from specverify.reference.layout import KvLayout
from specverify.reference.session import Account
from specverify.reference.trace import Array, Stage, Step, Trace


def compare_request(
    name: str, member: Member, twin_trace: Trace, oracle: Oracle, subject: Subject, variant: str
) -> Iterator[Fact]:
    """Findings where the trace of request `member` differs from `twin_trace` by more than the noise of a pair of runs.

    Steps are compared as long as both runs have the same context and tree. The texts may part, without a finding,
    where the top two logits are nearly equal.
    """
    error = noise(member.alone, oracle, subject)
    for number, (step, twin) in enumerate(zip(member.trace.steps, twin_trace.steps, strict=False)):
        if step.drafted is None or twin.drafted is None or step.scored is None or twin.scored is None:
            continue
        # The judge calls a check unobserved that never yields `Comparisons`; a count of 0 says that it could look.
        yield Comparisons(0)
        if step.context != twin.context or step.drafted.tree != twin.drafted.tree:
            return
        rows = list(range(len(step.drafted.tree)))
        for fact in compare_rows(name, twin, step, rows, rows, error, variant):
            yield with_place(fact, number, request=member.number)
            if isinstance(fact, Finding):
                return
        if step.emitted is not None and twin.emitted is not None and step.emitted.tokens != twin.emitted.tokens:
            # No finding if sampled or nearly tied: noise may move a threshold past its coin, or swap the top two.
            if member.alone.sampling.greedy and _is_settled(member.alone, twin, step, rows, error):
                where: dict[str, int | str] = {"request": member.number, "variant": variant}
                yield Finding(name, Stage.EMITTED, number, where, twin.emitted.tokens, step.emitted.tokens)
            return


def _is_settled(case: Case, twin: Step, step: Step, rows: list[int], error: Noise) -> bool:
    """Whether greedy choices at all `rows` of `twin` are clear, and must be those of `step`."""
    scores_of, sigma = node_scores(case, twin), stretched(case, error.logits)
    return are_decided(case, twin, rows, error.logits) and error.chooses_alike(twin, step, rows, rows, scores_of, sigma)


def accounts_of(trace: Trace) -> tuple[Account, ...]:
    """The accounts of a session, one after each action; empty if the trace holds no session."""
    return trace.shared.accounts if trace.shared is not None else ()


def largest_block(case: Case) -> int:
    """Columns of the largest block that a request of the session may have open: its rows, and one for the bonus."""
    return max(case.layout.padded_nodes, *map(most_rows, _drafts(case))) + 1


def largest_reserve(case: Case) -> int:
    """Columns beyond its committed ones that a request may have room for.

    A step has its block, and the root that is not committed yet. A step that is launched ahead of its host has what
    SGLang gives it (`kv_allocated_len`): two times ALLOC = max(top-k x steps, draft tokens) columns behind those that
    the host knows to be committed. One ALLOC is for the step in flight, which commits a path of its tree at most,
    height + 1 columns; the other is for the step that is launched, whose draft opens 1 + top-k x (steps - 1) columns at
    most, or the slots of its block, and whose verification opens the nodes of its tree. Draft tokens count the root,
    and the rows that pad a tree.

    Reserves do not add up: each is counted from the columns committed then, never more than those committed now, and
    the pages of a table stay until its request leaves. So the largest reserve bounds the table, rounded up to a page.
    """
    assert case.session is not None
    block = 1 + largest_block(case)
    if not case.session.overlapped:
        return block
    step = max(case.layout.padded_nodes, *map(step_columns, _drafts(case)))
    return max(block, 2 * step)


def _drafts(case: Case) -> list[Draft]:
    """The drafts of all requests of the session, those of switches included."""
    assert case.session is not None
    plans = [case.alone(number).draft for number in range(1 + len(case.session.mates))]
    return [*plans, *(action.draft for action in case.session.actions if action.draft is not None)]


def present_requests(accounts: tuple[Account, ...], action: int) -> set[int]:
    """Requests that could take a step when action `action` began, read from the account after the action before it."""
    return set(accounts[action - 1].committed) if 0 < action <= len(accounts) else set()


def has_session(case: Case) -> bool:
    """Whether the case serves several requests."""
    return case.session is not None


def requests(trace: Trace) -> list[tuple[dict[str, int | str], Trace]]:
    """Every request of a run, each with the coordinates that name it in a finding."""
    if trace.shared is None:
        return [({}, trace)]
    return [({"request": number}, run) for number, run in enumerate(trace.shared.requests) if run is not None]


def same_bits(
    name: str, case: Case, subject: Subject, layout: KvLayout, variant: str
) -> Iterator[Finding | Comparisons]:
    """Findings where attention, logits, caches or output of the variant differ in a bit from those of the case."""
    base = subject(case)
    variant_trace = subject(replace(case, layout=layout))
    # Not strict: runs of different lengths are a finding about the output, below.
    for (place, base_request), (_, twin) in zip(requests(base), requests(variant_trace), strict=False):
        has_finding = False
        for fact in unlike_bits(name, base_request, twin, {**place, "variant": variant}):
            has_finding = has_finding or isinstance(fact, Finding)
            yield fact
        if has_finding:
            return


def unlike_bits(name: str, base: Trace, twin: Trace, where: dict[str, int | str]) -> Iterator[Finding | Comparisons]:
    """A finding where attention, logits, caches or output of request `twin` differ in a bit from those of `base`."""
    for number, (step, twin_step) in enumerate(zip(base.steps, twin.steps, strict=False)):
        for stage, observed, true in _arrays(twin_step, step):
            yield Comparisons(rows_of(true))
            if observed.shape != true.shape or not np.array_equal(observed, true, equal_nan=True):
                values = ("the same bits", _first_unlike(observed, true))
                yield Finding(name, stage, number, where, *values)
                return
    if base.output != twin.output:
        yield Finding(name, Stage.EMITTED, max(len(base.steps) - 1, 0), where, base.output, twin.output)


def _arrays(observed: Step, true: Step) -> Iterator[tuple[Stage, Array, Array]]:
    if observed.attended is not None and true.attended is not None:
        yield Stage.ATTENDED, observed.attended.output, true.attended.output
    if observed.scored is not None and true.scored is not None:
        yield Stage.SCORED, observed.scored.logits, true.scored.logits
    for kind in ("before", "after", "draft"):
        caches = [getattr(step.committed, kind) for step in (observed, true) if step.committed is not None]
        if len(caches) == 2 and None not in caches:
            yield Stage.COMMITTED, caches[0].keys, caches[1].keys
            yield Stage.COMMITTED, caches[0].values, caches[1].values


def _first_unlike(observed: Array, true: Array) -> str:
    # NaN marks columns that a layer has let go: NaN in both arrays is no difference.
    if observed.shape != true.shape:
        return f"shape {observed.shape}, not {true.shape}"
    index = tuple(int(part) for part in np.argwhere((observed != true) & ~(np.isnan(observed) & np.isnan(true)))[0])
    return f"{float(observed[index])!r} at {list(index)}, not {float(true[index])!r}"
