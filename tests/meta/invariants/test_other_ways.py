"""Other ways: where a variant is the case itself, or a faster commit fell back, nothing is compared, and it is said."""

import os
from collections import Counter
from dataclasses import replace

import pytest

from specverify.backends.compositions import open_cpu
from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.composition import SEAMS
from specverify.backends.engine.kv.branch import Branch
from specverify.properties.strategies.models import small_draft
from specverify.properties.tally import Counts, Tally
from specverify.properties.verdict.finding import Finding, Verdict
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.session_members import members, view
from specverify.properties.verdict.subject import Subject
from specverify.properties.verdict.variants import with_new_ids
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.layout import FAST_SWITCH, NO_PREFIX, NOT_IN_ORDER, KvLayout
from specverify.reference.sampling import Stops
from specverify.reference.session import Mate, Session
from specverify.reference.tree import Tree
from specverify.reports.pages.summary import summary_page
from specverify.reports.record import summary, verdict_line
from specverify.setup.subjects import subject_of
from tests.corruption import BY_NAME, ORACLE, subject_with_fault
from tests.meta.invariants.test_nothing_judged import CASES, OWN_DRAFT, PROMPT, actions, engine
from tests.models import LLAMA

NAME = "cache.fast-equals-full"


def verdict_on(name: str, case: Case, subject: Subject | None = None) -> Verdict:
    return judge(case, (BY_NAME[name],), ORACLE, subject or engine())


def outcome(name: str, case: Case, subject: Subject | None = None) -> str:
    verdict = verdict_on(name, case, subject)
    assert verdict.findings == ()
    return verdict.outcomes[name]


# --- a variant that is the case itself ------------------------------------------------------------------------------

PLAIN = Case(LLAMA, PROMPT, Scripted(), stops=Stops(3), dtype="float64")
CHAIN = Case(LLAMA, PROMPT, Scripted((Tree((0, 0), (6, 1)),)), KvLayout("length"), stops=Stops(1), dtype="float64")
COMPANY = CASES["company"]
ALONE = Session((Mate(PROMPT),), actions("add 0", "step 0 1", "step 0 1", "cancel 1"))

SELF = {
    "plain decoding": ("lossless.draft-independent", PLAIN),
    "a batch of one": ("lossless.schedule-independent", replace(PLAIN, session=ALONE)),
    "an interruption of nobody": ("lossless.interruption-isolated", replace(PLAIN, session=ALONE)),
    "a prefix that nobody kept": (
        "cache.prefix-reuse",
        replace(COMPANY, layout=replace(COMPANY.layout, kind="prefix", page_size=64)),
    ),
    "a tree of one node": ("acceptance.proposal-consistent", replace(CASES["sampled"], draft=Scripted())),
}


@pytest.mark.parametrize("name", SELF)
def test_a_thing_is_not_compared_with_itself(name: str) -> None:
    invariant, case = SELF[name]
    assert outcome(invariant, case) == "not_applicable"


def test_a_chain_committed_by_length_is_no_variant_of_itself() -> None:
    step = engine()(CHAIN).steps[0]
    assert step.accepted is not None
    tree = Tree((0, 0), (6, step.accepted.bonus))  # what is accepted is all of the tree
    chain = CHAIN.rebased(CHAIN.prefix, tree)
    assert chain.layout.commit == "length"
    assert outcome("acceptance.chain-degenerate", chain) == "not_applicable"
    by_path = replace(chain, layout=KvLayout())
    assert outcome("acceptance.chain-degenerate", by_path) == "checked"


def test_a_script_made_of_a_requests_own_trees_says_nothing_of_them() -> None:
    retold = [member for member in members(COMPANY, engine()(COMPANY)) if member.retold]
    assert [member.number for member in retold] == [0]
    subject = view(engine(), retold[0])
    verdict = judge(retold[0].alone, (BY_NAME["draft.fidelity"],), ORACLE, subject)
    assert verdict.compared == {}
    assert verdict.outcomes["draft.fidelity"] != "checked"


def test_two_tokens_change_their_names() -> None:
    for last in (0, 1):
        for first in range(8):
            case = Case(small_draft(2, first), (0, last), stops=Stops(2))
            assert with_new_ids(case)[1] == (1, 0)


# --- commits that fall back ------------------------------------------------------------------------------------------

TREE = CASES["tree"]


def falling_back(why: str | None, way: str = "fast") -> Subject:
    """Our engine, which goes by path wherever it chose `way`, for the reason `why`."""

    class Slow(Branch):
        def way_of(self, path: list[int]) -> tuple[str, str | None]:
            how, reason = super().way_of(path)
            return ("path", why) if how == way else (how, reason)

    return subject_of(EngineBackend("slow", "cpu", replace(SEAMS, kv=replace(SEAMS.kv, branch=Slow))))


UNTRUE = {
    "no reason": (None, "fast"),
    "a prefix is there": (NO_PREFIX, "fast"),
    "the switch is not set": (f"{FAST_SWITCH}=0", "fast"),
    "the path is in order": (NOT_IN_ORDER, "length"),
}


@pytest.mark.parametrize("name", UNTRUE)
def test_a_reason_that_does_not_hold_is_a_finding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FAST_SWITCH, raising=False)
    why, way = UNTRUE[name]
    finding = verdict_on(NAME, replace(TREE, draft=Scripted((Tree((0,), (6,)),))), falling_back(why, way)).first
    assert isinstance(finding, Finding)
    assert finding.where == {"variant": way, "side": "way"}
    assert finding.observed == f"one by path, with {why or 'no reason'}"


def test_the_planted_fault_is_such_a_finding() -> None:
    finding = verdict_on(NAME, TREE, subject_with_fault("fast-reorder-never-taken")).first
    assert finding is not None
    assert finding.where["side"] == "way"


def test_a_reason_of_its_own_is_not_judged_and_counted() -> None:
    subject = falling_back("the moon is full")
    verdict = verdict_on(NAME, TREE, subject)
    assert verdict.commits["fast"] == verdict.commit_fallbacks["fast: the moon is full"] == len(subject(TREE).steps)
    assert verdict_line(verdict)["commit_fallbacks"] == dict(verdict.commit_fallbacks)
    tally = Tally("slow", invariants={NAME: Counts()})
    tally.add(verdict)
    count = verdict.commits["fast"]
    page = " ".join(summary_page(tally, verbose=True).split())
    assert f"fell back {count} of {count} commits by fast: the moon is full; none was committed so" in page
    assert summary(tally)["commits"] == dict(verdict.commits)
    assert summary(tally)["commit_fallbacks"] == {"fast: the moon is full": count, **_by_length(verdict)}


def _by_length(verdict: Verdict) -> dict[str, int]:
    return {why: count for why, count in verdict.commit_fallbacks.items() if why.startswith("length")}


@pytest.mark.parametrize(("value", "ways"), [("0", set()), ("1", {"length"}), (None, {"fast", "length"})])
def test_the_switch_of_the_fast_reorder_leaves_what_it_leaves(
    value: str | None, ways: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FAST_SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(FAST_SWITCH, value)
    counts_by_way: dict[str, int] = {}
    for way in ("fast", "length"):
        subject = _only(way)
        verdict = verdict_on(NAME, TREE, subject)
        assert verdict.findings == ()
        counts_by_way[way] = verdict.compared.get(NAME, 0)
        # An engine that was told not to run fast was not judged, whatever its commits by length show.
        silent = "unobserved" if value == "0" else "not_applicable"
        assert verdict.outcomes[NAME] == ("checked" if counts_by_way[way] else silent)
    assert {way for way, count in counts_by_way.items() if count} == ways
    assert os.environ.get(FAST_SWITCH) == value


def test_nothing_is_checked_where_nothing_ran_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAST_SWITCH, "0")
    verdict = verdict_on(NAME, TREE, subject_of(open_cpu()))
    assert verdict.outcomes[NAME] == "unobserved"
    assert NAME not in verdict.compared
    assert not verdict.judged


def _only(way: str) -> Subject:
    """Our engine, where the other way of the two falls back for a reason of its own."""
    return falling_back("not asked here", {"fast": "length", "length": "fast"}[way])


def test_a_session_counts_each_commit_once() -> None:
    layout = KvLayout("fast")
    case = Case(
        LLAMA, PROMPT, OWN_DRAFT, layout, stops=Stops(3), session=Session((), actions("add 0", "step 0", "step 0"))
    )
    trace = engine()(case)
    assert trace.shared is not None
    assert trace.shared.requests[0] is not None
    verdict = judge(case, (BY_NAME["draft.fidelity"],), ORACLE, subject_of(open_cpu()))
    assert verdict.commits == Counter(fast=len(trace.shared.requests[0].steps))
