"""Every invariant is shown to fail before it is believed: on sampled cases, by a planted fault or a corrupted trace."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from specverify.backends.compositions import open_cpu
from specverify.backends.faults.fault import faults_in
from specverify.backends.faults.sampling import coins as coin_faults
from specverify.backends.faults.sampling import logits_processing, rejection
from specverify.properties.invariants import ALL
from specverify.properties.invariants.acceptance import coins, streams
from specverify.properties.invariants.acceptance import law as laws
from specverify.properties.invariants.lossless import distribution, processing
from specverify.properties.strategies.models import GALLERY, small_draft
from specverify.properties.verdict.finding import Finding
from specverify.properties.verdict.judge import judge
from specverify.reference import tape
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Ngram, Scripted
from specverify.reference.layout import KvLayout
from specverify.reference.rules import Rule
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Accepted, Drafted, Scored, Stage, Trace
from specverify.reference.tree import RankTree, Tree
from specverify.setup.subjects import subject_of
from tests.corruption import (
    BY_NAME,
    ORACLE,
    Corruption,
    corrupted_subject,
    entry,
    in_stage,
    outcomes,
    output_of,
    second_time,
    subject_with_fault,
    where,
    wrong,
)

SPEAKING = {
    invariant.name
    for group in (coins, distribution, laws, processing, streams)
    for invariant in group.INVARIANTS
    if invariant.name != "lossless.logprobs-draft-independent"  # speaks of greedy requests
}
"""Invariants written for sampled cases."""


@cache
def sampled_cases() -> dict[str, Case]:
    """A handful by hand: between them they trigger every fault of sampling, and every invariant of it speaks."""
    five, seventeen, eleven, thirteen, three, seven = (Seeded(GALLERY[index], 0) for index in (0, 1, 2, 3, 8, 15))
    fork = Tree((0, 0, 0, 1, 1, 2), (2, 3, 1, 4, 0, 0))
    chain = Tree((0, 0, 1), (3, 5, 7))
    pair, deep = RankTree((0, 0, 0), (0, 0, 1)), RankTree((0, 0, 0, 1, 1), (0, 0, 1, 0, 1))
    line = RankTree((0, 0, 1), (0, 0, 0))
    multi_round = Sampling(1.6, seed=3)
    leviathan = Sampling(1.0, rule=Rule("chain"), seed=5)
    penalties = Sampling(
        0.7, repetition_penalty=1.3, presence_penalty=0.6, frequency_penalty=0.4, rule=Rule("eagle"), seed=1
    )
    without = Sampling(1.6, draws="without-replacement", top_k=5, seed=2)
    replaced = Sampling(1.3, draws="with-replacement", top_p=0.7206, rule=Rule("specinfer"), seed=4)
    ranked = Sampling(0.7, min_p=0.05, rule=Rule("target-only"), seed=6)
    block = Sampling(1.6, draws="with-replacement", rule=Rule("block"), seed=7)
    words = Sampling(1.6, bad_words=((1, 6), (4,)), min_tokens=2, tape=(0.0,) * 4 + (0.999,) * 3, seed=8)
    # Between .614 and what bfloat16 makes of it (.6133) the most probable tokens after the prompt become enough.
    nucleus = Sampling(1.6, top_p=0.614, seed=9)
    bushy = Tree((0, 0, 0, 1), (2, 7, 11, 4))
    ngrams = Ngram(RankTree((0, 0, 0, 1), (0, 0, 1, 0)))
    return {
        "fork": Case(five, (1, 2), Scripted((fork,)), sampling=multi_round, stops=Stops(4), dtype="float64"),
        "chain": Case(thirteen, (1, 2, 3), Scripted((chain,)), KvLayout("length"), leviathan, Stops(3)),
        "penalties": Case(seven, (1, 2, 1, 2, 1), ngrams, sampling=penalties, stops=Stops(5), dtype="float64"),
        "without": Case(eleven, (4, 5), LanguageModel(small_draft(11, 0), pair), sampling=without, stops=Stops(4)),
        "with": Case(three, (1, 2), LanguageModel(three, deep), sampling=replaced, stops=Stops(4), dtype="float64"),
        "ranked": Case(five, (0, 3), LanguageModel(small_draft(5, 1), deep), sampling=ranked, stops=Stops(4)),
        "block": Case(
            seven, (3, 2), LanguageModel(small_draft(7, 0), line), sampling=block, stops=Stops(4), dtype="float64"
        ),
        "words": Case(
            eleven, (3, 2), Scripted((Tree((0, 0, 0, 1), (2, 1, 4, 6)),)), sampling=words, stops=Stops(5, eos=(9,))
        ),
        "nucleus": Case(seventeen, (5, 2), Scripted((bushy,)), sampling=nucleus, stops=Stops(3), dtype="float64"),
    }


def in_accepted(change: Callable[[Accepted], Accepted], step: int = 0) -> Corruption:
    return in_stage("accepted", change, step)


def used(*places: int) -> Corruption:
    """Coins that decided, besides those that did."""
    return in_accepted(lambda stage: replace(stage, coins=(*(stage.coins or ()), *places)))


def law_off(amount: float, node: int = 0) -> Corruption:
    """One probability of the target's law at `node`, moved."""

    def change_stage(stage: Scored) -> Scored:
        assert stage.law is not None
        return replace(stage, law=entry(stage.law, (node, 1), stage.law[node, 1] + amount))

    return in_stage("scored", change_stage)


def proposal_off(amount: float) -> Corruption:
    """One probability that the verifier is told of node 1, moved."""

    def change_stage(stage: Drafted) -> Drafted:
        if stage.proposal is None or len(stage.tree) < 2:
            return stage
        return replace(stage, proposal=entry(stage.proposal, (1, 0), stage.proposal[1, 0] + amount))

    return in_stage("drafted", change_stage)


def one_row_less(field: str) -> Corruption:
    """What the draft says of its last node, left out."""

    def change_stage(stage: Drafted) -> Drafted:
        rows = getattr(stage, field)
        return stage if rows is None else replace(stage, **{field: rows[:-1]})

    return in_stage("drafted", change_stage)


def another_token(stage: Drafted) -> Drafted:
    """Node 1 with a token that its proposal admits and its coin did not draw."""
    assert stage.proposal is not None
    other_tokens = [token for token in np.flatnonzero(stage.proposal[1] > 0) if token != stage.tree.token[1]]
    if not other_tokens:
        return stage
    token = (stage.tree.token[0], int(other_tokens[0]), *stage.tree.token[2:])
    return replace(stage, tree=Tree(stage.tree.parent, token))


def logprobs(change: Callable[[tuple[float, ...]], tuple[float, ...]]) -> Corruption:
    def change_stage(stage: Any) -> Any:
        return replace(stage, logprobs=stage.logprobs and change(stage.logprobs))

    return in_stage("emitted", change_stage)


def with_tape(corruption: Corruption) -> Corruption:
    """What happens under a tape alone: of the cases here to their variants, which agree on every coin in use."""
    return where(lambda case: len(case.sampling.tape) > tape.stride(case.most_nodes), corruption)


def impossible(case: Case, trace: Trace, time: int) -> Trace:
    """A banned token at the end of the first block, as if it had been sampled."""
    if not case.sampling.bad_words:
        return trace
    banned = case.sampling.bad_words[-1][0]
    chosen = in_stage("accepted", lambda stage: replace(stage, bonus=banned))(case, trace, time)
    return in_stage("emitted", lambda stage: replace(stage, tokens=(*stage.tokens[:-1], banned)))(case, chosen, time)


EVERYTHING: list[tuple[str, str | Corruption]] = [
    ("acceptance.sampled-walk", "coin-reused-for-residual"),
    ("acceptance.sampled-walk", "residual-by-arg-max"),
    ("acceptance.sampled-walk", "resampled-from-row-after"),
    ("acceptance.sampled-walk", "residual-through-softmax"),
    ("acceptance.sampled-walk", "acceptance-ignores-coin"),
    ("acceptance.sampled-walk", "bonus-row-unprocessed"),
    ("acceptance.sampled-walk", in_accepted(lambda stage: replace(stage, bonus=(stage.bonus + 1) % 3))),
    ("acceptance.sampled-walk", in_accepted(lambda stage: replace(stage, path=stage.path[:1]))),
    ("acceptance.sampled-walk", in_accepted(lambda stage: replace(stage, path=(0, 1)), 1)),
    ("acceptance.coins-once", "coin-reused-for-residual"),
    ("acceptance.coins-once", used(0, 0)),
    ("acceptance.coins-once", with_tape(output_of(lambda old: old[::-1]))),
    ("acceptance.streams-disjoint", "acceptance-by-the-drafts-coin"),
    ("acceptance.streams-disjoint", "recovery-on-the-drafts-stream"),
    ("acceptance.streams-disjoint", "noise-of-the-rejected-token-again"),
    ("acceptance.streams-disjoint", "coin-reused-for-residual"),
    ("acceptance.streams-disjoint", used(0, 0)),
    ("acceptance.proposal-consistent", "soft-law-for-ranked-tokens"),
    ("acceptance.proposal-consistent", "proposal-before-truncation"),
    ("acceptance.proposal-consistent", "proposal-without-temperature"),
    ("acceptance.proposal-consistent", proposal_off(1e-4)),
    ("acceptance.proposal-consistent", proposal_off(float("nan"))),
    ("acceptance.proposal-consistent", in_stage("drafted", another_token)),
    ("acceptance.proposal-consistent", one_row_less("proposal")),
    ("draft.fidelity", one_row_less("logits")),
    ("acceptance.law-exact", "stale-residual-for-bonus"),
    ("acceptance.law-exact", "residual-zeroes-token-only"),
    ("acceptance.law-exact", "shared-node-tested-per-leaf"),
    ("acceptance.law-exact", "coin-reused-for-residual"),
    ("acceptance.law-exact", "residual-from-row-zero"),
    ("acceptance.law-exact", "bonus-from-whole-law"),
    ("acceptance.law-exact", "accepted-only-if-likelier"),
    ("acceptance.law-exact", "acceptance-ratio-reversed"),
    ("acceptance.law-exact", "neighbours-seed"),
    ("acceptance.law-joint", "sibling-not-removed-from-q"),
    ("acceptance.law-joint", "shared-node-tested-per-leaf"),
    ("acceptance.law-joint", "proposal-without-temperature"),
    ("acceptance.law-joint", "bonus-without-temperature"),
    ("acceptance.law-joint", "target-law-under-default-settings"),
    ("acceptance.law-joint", "processors-see-path-one-late"),
    ("acceptance.law-joint", "every-second-request-shares-coins"),
    ("acceptance.support-at-edges", "coin-at-threshold-accepts"),
    ("acceptance.renamed-law", "last-vocabulary-entry-lost"),
    ("acceptance.renamed-law", "coin-reused-for-residual"),
    ("acceptance.support", "target-law-under-default-settings"),
    ("acceptance.support", impossible),
    ("lossless.processors-per-node", "target-law-under-default-settings"),
    ("lossless.processors-per-node", "top-p-in-bfloat16"),
    ("lossless.processors-per-node", "min-p-for-bonus-only"),
    ("lossless.processors-per-node", "processors-see-path-one-late"),
    ("lossless.processors-per-node", "last-vocabulary-entry-lost"),
    ("lossless.processors-per-node", law_off(1e-4)),
    ("lossless.processors-per-node", law_off(float("nan"), 1)),
    ("lossless.logprobs", "logprobs-over-whole-tree"),
    ("lossless.logprobs", logprobs(lambda old: tuple(value + 1e-3 for value in old))),
    ("lossless.logprobs", logprobs(lambda old: old[:-1])),
    ("lossless.logprobs", logprobs(lambda old: (float("nan"), *old[1:]))),
    ("lossless.support", output_of(lambda old: tuple(0 for _ in old))),
    ("lossless.distribution", "stale-residual-for-bonus"),
    ("lossless.distribution", "sibling-not-removed-from-q"),
    ("lossless.distribution", "bonus-without-temperature"),
    ("lossless.distribution", "min-p-for-bonus-only"),
    ("lossless.seeded", "neighbours-seed"),
    ("lossless.seeded", "every-second-request-shares-coins"),
    ("lossless.stops", output_of(lambda old: old[:-1])),
    ("lossless.state-isolated", second_time(law_off(1e-6))),
    ("lossless.state-isolated", second_time(in_accepted(lambda stage: replace(stage, bonus=stage.bonus + 1)))),
    ("lossless.deterministic", second_time(law_off(1e-12))),
    ("lossless.deterministic", second_time(proposal_off(1e-12))),
    ("lossless.deterministic", second_time(used(0))),
    ("lossless.deterministic", second_time(logprobs(lambda old: tuple(value - 1e-12 for value in old)))),
    ("lossless.deterministic", second_time(output_of(lambda old: old[::-1]))),
]
"""Invariant and what must make it fail on one of the cases: a fault of the catalogue by name, or a corruption."""


@pytest.mark.parametrize(
    ("name", "how"), EVERYTHING, ids=[f"{name}-{index}" for index, (name, _) in enumerate(EVERYTHING)]
)
def test_fails_when_it_should(name: str, how: str | Corruption) -> None:
    case_outcomes = outcomes(name, wrong(how), sampled_cases())
    findings = next((findings for _, outcome, findings in case_outcomes if outcome == "failed"), ())
    assert findings
    assert {finding.invariant for finding in findings} == {name}


def test_no_invariant_and_no_fault_is_believed_unseen() -> None:
    assert {name for name, _ in EVERYTHING} >= SPEAKING
    drawn = {how for _, how in EVERYTHING if isinstance(how, str)}
    groups = (rejection, coin_faults, logits_processing)
    assert drawn == {fault.name for group in groups for fault in faults_in(group)}


@pytest.mark.slow
def test_the_clean_engine_passes_the_same_cases() -> None:
    """And every invariant shown to fail above has something to say about one of them."""
    subject = subject_of(open_cpu(), keep=512)
    checked: set[str] = set()
    for key, case in sampled_cases().items():
        verdict = judge(case, ALL, ORACLE, subject)
        assert verdict.findings == (), key
        assert "unobserved" not in verdict.outcomes.values()
        checked |= {name for name, outcome in verdict.outcomes.items() if outcome == "checked"}
    assert checked >= {name for name, _ in EVERYTHING}


def findings_of(name: str, case: Case, how: str | Corruption) -> tuple[Finding, ...]:
    return judge(case, (BY_NAME[name],), ORACLE, wrong(how)).findings


LOSSY = Rule("target-only", 0.9, 0.5)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("acceptance.law-joint", Rule("typical")),
        ("acceptance.law-joint", LOSSY),
        ("lossless.distribution", LOSSY),
    ],
)
def test_a_lossy_rule_is_held_to_the_law_it_has(name: str, rule: Rule) -> None:
    """It passes though it is not the target's law, and a fault that makes it another one does not."""
    fork = sampled_cases()["fork"]
    lossy = replace(fork, sampling=replace(fork.sampling, rule=rule))
    assert judge(lossy, (BY_NAME[name],), ORACLE, subject_of(open_cpu())).outcomes == {name: "checked"}
    assert findings_of(name, lossy, "bonus-row-unprocessed")


def test_a_law_that_follows_the_neighbours_is_said_to() -> None:
    for name in ("acceptance.law-exact", "acceptance.law-joint"):
        (finding,) = findings_of(name, sampled_cases()["fork"], "neighbours-seed")
        assert finding.where == {"variant": "other requests in its batch"}


def test_a_law_that_is_no_number_is_one_finding() -> None:
    """The invariant of processing has it; those that would compute with it say nothing."""
    subject = corrupted_subject(law_off(float("nan")))
    case = sampled_cases()["fork"]
    names = ("lossless.processors-per-node", "acceptance.sampled-walk", "acceptance.law-exact")
    verdict = judge(case, tuple(BY_NAME[name] for name in names), ORACLE, subject)
    assert verdict.outcomes == dict(zip(names, ("failed", "not_applicable", "not_applicable"), strict=True))


@pytest.mark.parametrize(
    ("name", "how", "expected"),
    [
        (
            "acceptance.sampled-walk",
            in_accepted(lambda stage: replace(stage, path=stage.path[:1])),
            {"side": "path", "node": 1},
        ),
        ("acceptance.proposal-consistent", in_stage("drafted", another_token), {"side": "token", "node": 1}),
        ("acceptance.proposal-consistent", one_row_less("proposal"), {"side": "shape"}),
        ("draft.fidelity", one_row_less("logits"), {"side": "shape"}),
        ("acceptance.coins-once", used(0, 0), {"coin": 0}),
        ("acceptance.coins-once", with_tape(output_of(lambda old: ())), {"coin": "unused", "side": "output"}),
    ],
)
def test_a_finding_says_where(name: str, how: Corruption, expected: dict[str, object]) -> None:
    all_findings = (
        finding for _, _, findings in outcomes(name, corrupted_subject(how), sampled_cases()) for finding in findings
    )
    assert next(all_findings).where == expected


@pytest.mark.parametrize("name", ["law-joint", "support-at-edges", "renamed-law"])
def test_without_tables_a_law_is_unobserved(name: str) -> None:
    subject = subject_with_fault("bonus-from-whole-law")
    subject.tables = None
    case = sampled_cases()["fork"]
    assert judge(case, (BY_NAME[f"acceptance.{name}"],), ORACLE, subject).outcomes == {
        f"acceptance.{name}": "unobserved"
    }


def test_the_first_finding_is_where_the_fault_was_planted() -> None:
    case = sampled_cases()["fork"]
    for name, stage in (("bonus-from-whole-law", Stage.ACCEPTED), ("last-vocabulary-entry-lost", Stage.SCORED)):
        first = judge(case, ALL, ORACLE, subject_with_fault(name)).first
        assert first is not None
        assert first.stage is stage
