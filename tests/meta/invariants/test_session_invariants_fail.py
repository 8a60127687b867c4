"""Faults of batches, of shared state and of the draft's cache in step: each is named at its stage by one invariant."""

from dataclasses import replace
from functools import cache

import pytest

from specverify.backends.compositions import open_cpu
from specverify.backends.faults.drafting import draft_cache
from specverify.backends.faults.fault import Fault, faults_in
from specverify.backends.faults.serving import batches, leaked_state, target_calls
from specverify.properties.invariants import ALL
from specverify.properties.strategies.acceptance import continuation
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Crash, Refusal, Subject
from specverify.reference.case import Case
from specverify.reference.draft import Draft, LanguageModel, Scripted
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Stage, Trace
from specverify.reference.tree import RankTree, Tree
from specverify.setup.subjects import subject_of
from tests.corruption import BY_NAME, ORACLE, subject_with_fault
from tests.models import LLAMA

FAULTS = (*faults_in(batches), *faults_in(leaked_state), *faults_in(draft_cache), *faults_in(target_calls))

PROMPT, OTHER_PROMPT = (3, 14, 15, 9, 6), (7, 8, 2)

PAGED, PREFIX = KvLayout(kind="paged", page_size=2), KvLayout(kind="prefix", page_size=1)
HEAD = Eagle1(RankTree((0, 0, 0), (0, 0, 1)), HiddenStates((), "normed", 1), HeadLayer(1, 1, 4, 8))

TOGETHER = "add 0, add 1, step 0 1"
RESTARTED = "add 0, step 0, evict 0, restore 0, step 0"


def session(
    draft: Draft,
    mate: Draft,
    actions: str,
    layout: KvLayout = KvLayout(),
    stops: Stops = Stops(6),
    sampling: Sampling = Sampling(),
    mate_prompt: tuple[int, ...] = OTHER_PROMPT,
) -> Case:
    """Two requests, and what happens to them in words: `kind number number, ...`."""
    happened = [phrase.split() for phrase in actions.split(", ")]
    session_actions = tuple(Action(kind, tuple(map(int, numbers))) for kind, *numbers in happened)
    company = Session((Mate(mate_prompt, mate, stops=Stops(6)),), session_actions)
    return Case(LLAMA, PROMPT, draft, layout, sampling, stops, session=company)


def own_draft(*parent: int, vocabulary: tuple[int, ...] = ()) -> LanguageModel:
    """The target as its own draft: under each node its best tokens, the best first."""
    rank = tuple(parent[1:node].count(parent[node]) if node else 0 for node in range(len(parent)))
    return LanguageModel(LLAMA, RankTree(parent, rank), vocabulary)


def best_last(*parent: int) -> LanguageModel:
    """The same with the best token last among siblings, so that what is accepted is not in place."""
    draft = own_draft(*parent)
    most = [parent[1:].count(up) for up in parent]
    assert isinstance(draft.shape, RankTree)
    rank = tuple(most[node] - 1 - place if node else 0 for node, place in enumerate(draft.shape.rank))
    return replace(draft, shape=RankTree(parent, rank))


@cache
def fixed_cases() -> dict[str, Case]:
    """For each fault a case that triggers it, and what else there is to see in it is right."""
    a, b, c, *_ = continuation(LLAMA, PROMPT)
    d, e, *_ = continuation(LLAMA, OTHER_PROMPT)
    root = Scripted()
    line = Scripted((Tree((0, 0, 1), (6, a, b)),))
    fork = Scripted((Tree((0, 0, 0), (6, (a + 1) % 17, a)),))
    mates = Scripted((Tree((0, 0, 1), (2, d, e)),))
    broad = Scripted((Tree((0, 0, 0, 0, 0), (6, 1, 2, 4, 5)),))
    unlike = Scripted((Tree((0, 0, 1), (6, a, b)), Tree((0, 0, 0), (c, 1, 2))))
    unsure = tuple(token for token in range(17) if token == a or token != b)
    wider = best_last(0, 0, 1, 0, 3)
    return {
        "tree-size-of-first-lane": session(root, mates, TOGETHER),
        "padded-rows-over-neighbours": session(root, mates, TOGETHER),
        "padding-writes-slot-zero": session(line, root, TOGETHER, PAGED),
        "mask-of-first-lane": session(fork, mates, TOGETHER),
        "caches-in-slot-order": session(line, mates, "add 0, add 1, step 1 0", PAGED),
        "filler-of-batch-seen": session(root, root, TOGETHER),
        "padding-rows-of-batch-seen": session(root, mates, TOGETHER),
        "buffer-without-room-for-tree": Case(LLAMA, PROMPT, broad, KvLayout(kind="static"), stops=Stops(1)),
        "step-keyed-by-token-count": Case(LLAMA, PROMPT, unlike, stops=Stops(7)),
        "lowering-reused-for-other-tree": session(
            fork, Scripted((Tree((0, 0, 1), (5, 1, 1)),)), TOGETHER, mate_prompt=(1, 2, 3, 4, 5)
        ),
        "positions-of-first-lane": session(root, root, TOGETHER),
        "penalties-of-first-lane": session(
            line, mates, "add 0, add 1, step 1 0", sampling=Sampling(1.0, repetition_penalty=9.0)
        ),
        "joiner-inherits-accepted-length": session(line, root, "add 0, step 0, cancel 0, add 1, step 1"),
        "accepted-length-of-first-lane": session(root, mates, TOGETHER),
        "one-end-ends-the-batch": session(root, root, TOGETHER, stops=Stops(1)),
        "draft-fed-its-own-guess": Case(LLAMA, PROMPT, own_draft(0, 0, vocabulary=unsure), stops=Stops(8)),
        "unverified-rows-restored": session(best_last(0, 0, 1, 0), root, RESTARTED),
        "draft-pages-shared-one-token-short": session(
            own_draft(0, 0), own_draft(0, 0), "add 0, step 0, add 1, step 1", PREFIX, Stops(1)
        ),
        "draft-in-targets-pool": Case(LLAMA, PROMPT, wider, PAGED, stops=Stops(8)),
        "one-cache-for-target-and-draft": Case(LLAMA, PROMPT, own_draft(0, 0, 1)),
        "root-scores-survive-restart": session(own_draft(0, 0, 1), root, RESTARTED),
        "rejected-rows-rewritten": Case(LLAMA, PROMPT, wider),
        "accepted-leaf-fed-as-bonus": Case(LLAMA, PROMPT, own_draft(0, 0), stops=Stops(8)),
        "fork-marks-draft-complete": session(own_draft(0, 0, 1), own_draft(0, 0, 1), "add 0, fork 0 1, step 1", PAGED),
        "prefix-kept-without-draft": session(
            own_draft(0, 0, 1), own_draft(0, 0, 1), "add 0, cancel 0, add 1, step 1", PREFIX, mate_prompt=PROMPT
        ),
        "retrieve-index-without-offset": session(line, mates, TOGETHER),
        "retrieve-index-counts-nodes": session(line, mates, TOGETHER, KvLayout(padded_nodes=4)),
        "target-called-again-for-next-draft": Case(LLAMA, PROMPT, HEAD),
    }


NAMED = {
    Stage.DRAFTED: "draft.fidelity",
    Stage.LOWERED: "structure.positions-are-depth",
    Stage.ATTENDED: "attention.batch-mate-independent",
    Stage.SCORED: "lossless.processors-per-node",
    Stage.EMITTED: "lossless.stops",
    Stage.COMMITTED: "cache.commit-equivalence",
}
"""What names a fault of a stage."""

OTHERWISE = {
    "buffer-without-room-for-tree": "lossless.completes",
    "step-keyed-by-token-count": "attention.context-exact",
    "lowering-reused-for-other-tree": "structure.parent-range",
    "one-cache-for-target-and-draft": "structure.mask-is-ancestry",
    "retrieve-index-without-offset": "attention.batch-mate-independent",
    "retrieve-index-counts-nodes": "attention.batch-mate-independent",
    "target-called-again-for-next-draft": "lossless.accounting",
}
"""Where another invariant does."""

LOOKING = tuple(invariant for invariant in ALL if invariant.looks_at_run or invariant.name == "lossless.completes")


def test_every_fault_has_its_case() -> None:
    assert set(fixed_cases()) == {fault.name for fault in FAULTS}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_named_where_it_was_planted(fault: Fault) -> None:
    case, name = fixed_cases()[fault.name], OTHERWISE.get(fault.name, NAMED[fault.stage])
    invariants = tuple(dict.fromkeys((BY_NAME[name], *LOOKING)))
    clean = judge(case, invariants, ORACLE, subject_of(open_cpu()))
    assert clean.agreed, clean.findings[:1]
    assert clean.outcomes[name] == "checked"
    verdict = judge(case, invariants, ORACLE, subject_with_fault(fault.name))
    assert verdict.first is not None
    assert verdict.first.stage is fault.stage
    assert name in {finding.invariant for finding in verdict.findings if finding.stage is fault.stage}


def test_a_session_that_breaks_off_is_a_finding() -> None:
    clean = subject_of(open_cpu())

    def run(case: Case) -> Trace | Refusal | Crash:
        broken = case.session is not None and len(case.session.actions) == 3
        return Crash(Stage.ATTENDED, "out of range") if broken else clean(case)

    subject = Subject("broken", run, clean.reveals)
    verdict = judge(fixed_cases()["filler-of-batch-seen"], ALL, ORACLE, subject)
    assert [(finding.invariant, finding.stage) for finding in verdict.findings] == [
        ("lossless.completes", Stage.ATTENDED)
    ]
