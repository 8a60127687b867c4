"""Every invariant is shown to fail before it is believed: on greedy cases, by a planted fault or a corrupted trace."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from specverify.backends.compositions import open_cpu
from specverify.properties.invariants import ALL
from specverify.properties.run_statistics import INFLATION, excess_ties, undecided_comparison
from specverify.properties.strategies.acceptance import continuation
from specverify.properties.strategies.models import GALLERY, small_draft
from specverify.properties.tally import Tally
from specverify.properties.tolerance.closeness import Noise, noise, rms, rows_beyond
from specverify.properties.tolerance.ties import TIE_SIGMA, gaps, is_decided, judge_tokens, near_and_predicted
from specverify.properties.verdict.finding import Finding, Positions, Tie
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Crash
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Ngram, Scripted
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Stops
from specverify.reference.trace import Attended, Kv, Scored, Stage, Trace
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
    where,
    wrong,
)


@cache
def fixed_cases() -> dict[str, Case]:
    """A handful by hand: between them they trigger every fault, and every invariant speaks about one of them."""
    wide, windowed, middle, tiny = (Seeded(GALLERY[index], 0) for index in (7, 3, 9, 0))
    prompt = (3, 14, 15, 92, 6)
    a, b, c, d, e, *_ = continuation(wide, prompt)
    fork = Tree((0, 0, 0, 2, 2, 3), (6, (a + 1) % 101, a, b, (b + 1) % 101, (c + 1) % 101))
    late = Tree((0, 0, 3, 0, 0), (c, (d + 1) % 101, e, d, d))
    hopeless = Tree((0, 0, 0, 1, 2), (6, (a + 1) % 101, (a + 2) % 101, 5, 5))
    line = Tree((0, 0, 1, 2), (6, a, b, c))
    short = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    f, g, *_ = continuation(windowed, short)
    through = Tree((0, 0, 0, 2, 3, 1), (9, (f + 1) % 13, f, g, 0, 12))
    forks = RankTree((0, 0, 0, 1, 2, 3, 4), (0, 1, 0, 0, 0, 0, 0))
    zero = next(prompt for prompt in product(range(5), repeat=3) if continuation(tiny, prompt)[0] == 0)
    return {
        "fork": Case(wide, prompt, Scripted((fork, late)), stops=Stops(7)),
        "stop inside": Case(wide, prompt, Scripted((line,)), KvLayout("fast"), stops=Stops(7, eos=(b,))),
        "budget inside": Case(wide, prompt, Scripted((line,)), KvLayout("length", 6), stops=Stops(2)),
        "hopeless": Case(wide, prompt, Scripted((hopeless, hopeless)), KvLayout("fast"), stops=Stops(3)),
        "window": Case(windowed, short, Scripted((through,)), KvLayout("path", 9, 2), stops=Stops(4)),
        "own draft": Case(middle, (9, 8, 7), LanguageModel(middle, forks), stops=Stops(8)),
        "reduced": Case(
            middle, (9, 8, 7), LanguageModel(small_draft(64, 0), forks, (0, *range(1, 64, 2))), stops=Stops(4)
        ),
        "echo": Case(wide, (5, 6, 7) * 3, Ngram(RankTree((0, 0, 0, 1), (0, 1, 0, 0))), stops=Stops(4)),
        "zero": Case(tiny, zero, Scripted((Tree((0, 0, 0), (zero[-1], 1, 0)),)), stops=Stops(3), dtype="float64"),
    }


def lowered_entry(field: str, index: Any, change: Callable[[Any], Any]) -> Corruption:
    def change_stage(stage: Any) -> Any:
        array = getattr(stage, field)
        return replace(stage, **{field: entry(array, index, change(array[index]))})

    return in_stage("lowered", change_stage)


def nudge_cache(kv: Kv | None, slot: int, amount: float = 1e-3, kind: str = "keys") -> Kv | None:
    if kv is None or kv.length == 0:
        return kv
    array = getattr(kv, kind)
    changed: dict[str, Any] = {kind: entry(array, (0, 0, slot, 0), array[0, 0, slot, 0] + amount)}
    return replace(kv, **changed)


def value_lost(kv: Kv | None) -> Kv | None:
    """As many keys as before, and one value less."""
    return kv if kv is None else replace(kv, values=kv.values[:, :, 1:])


def mask_cell(column: int) -> Corruption:
    def change_stage(stage: Any) -> Any:
        first = stage.visible[0]
        return replace(stage, visible=(entry(first, (1, column), ~first[1, column]), *stage.visible[1:]))

    return in_stage("lowered", change_stage)


def logits_off(amount: float) -> Corruption:
    return in_stage("scored", lambda stage: Scored(stage.logits + amount))


def logprobs_off(amount: float) -> Corruption:
    def change_stage(stage: Any) -> Any:
        return replace(stage, logprobs=stage.logprobs and tuple(value + amount for value in stage.logprobs))

    return in_stage("emitted", change_stage)


def one_less(accepted: Any) -> Any:
    return replace(accepted, path=accepted.path[:-1]) if len(accepted.path) > 1 else accepted


def to_sibling(accepted: Any) -> Any:
    """The accepted path from the root to node 1 and on to node 2, whose parent node 1 is in none of the cases."""
    return replace(accepted, path=(0, 1, 2))


def accounts(**changes: int) -> Corruption:
    def corruption(case: Case, trace: Trace, time: int) -> Trace:
        assert trace.accounting is not None
        moved = {name: getattr(trace.accounting, name) + by for name, by in changes.items()}
        return replace(trace, accounting=replace(trace.accounting, **moved))

    return corruption


def broken(case: Case, trace: Trace, time: int) -> Any:
    return Crash(Stage.ATTENDED, "IndexError: out of range")


def _larger(case: Case) -> bool:
    """Whether the case is one with nodes hung in: its last node continues another that is no root."""
    return isinstance(case.draft, Scripted) and any(len(tree) in (7, 8) for tree in case.draft.trees)


EVERYTHING: list[tuple[str, str | Corruption]] = [
    ("structure.parent-range", lowered_entry("parent", 1, lambda old: -1)),
    ("structure.parent-range", lowered_entry("parent", 0, lambda old: 1)),
    ("structure.parent-range", lowered_entry("token", 1, lambda old: old + 1)),
    ("structure.depth-consistent", lowered_entry("depth", 1, lambda old: old + 1)),
    ("structure.depth-consistent", lowered_entry("depth", 0, lambda old: 1)),
    ("structure.validity-closed", lowered_entry("valid", 1, lambda old: False)),
    (
        "structure.validity-closed",
        where(lambda case: case.layout.padded_nodes > 6, lowered_entry("valid", -1, lambda old: True)),
    ),
    ("structure.ancestor-table", lowered_entry("ancestor", (1, 0), lambda old: 1)),
    ("structure.ancestor-table", lowered_entry("ancestor", (0, 1), lambda old: 2)),
    ("structure.ancestor-table", lowered_entry("ancestor", (1, 1), lambda old: -1)),
    ("structure.mask-is-ancestry", mask_cell(0)),
    ("structure.mask-is-ancestry", mask_cell(-1)),
    ("structure.mask-is-ancestry", "prefix-entry-hidden"),
    ("structure.mask-is-ancestry", "tree-masked-as-chain"),
    ("structure.mask-is-ancestry", "window-of-deepest-node"),
    ("structure.positions-are-depth", "position-advances-by-one"),
    ("structure.positions-are-depth", lowered_entry("slot", 1, lambda old: old - 1)),
    ("structure.positions-are-depth", lowered_entry("slot", 0, lambda old: 0)),
    ("structure.links-walk-the-tree", lowered_entry("next_token", 0, lambda old: 0)),
    ("structure.links-walk-the-tree", lowered_entry("next_sibling", 1, lambda old: 1)),
    ("structure.links-walk-the-tree", lowered_entry("retrieve_index", 1, lambda old: 0)),
    ("attention.context-exact", "logit-rows-shifted"),
    ("attention.context-exact", "softmax-twice"),
    ("attention.context-exact", "padding-lanes-in-denominator"),
    ("attention.context-exact", "position-advances-by-one"),
    ("attention.context-exact", logits_off(1e-4)),
    ("attention.context-exact", logits_off(float("nan"))),
    ("attention.visibility-exact", "verify-block-sees-itself-only"),
    ("attention.visibility-exact", "tiles-below-diagonal-unmasked"),
    ("attention.visibility-exact", "prefix-entry-hidden"),
    ("attention.visibility-exact", "window-of-deepest-node"),
    ("attention.no-leakage", "tiles-below-diagonal-unmasked"),
    ("attention.no-leakage", "tree-masked-as-chain"),
    ("attention.order-equivariant", "tiles-below-diagonal-unmasked"),
    ("attention.order-equivariant", "logit-rows-shifted"),
    ("attention.tree-equals-chain", "tiles-below-diagonal-unmasked"),
    ("attention.tree-equals-chain", "logit-rows-shifted"),
    ("attention.subtree-removal", "tiles-below-diagonal-unmasked"),
    ("attention.subtree-removal", "logit-rows-shifted"),
    ("attention.padding-inert", "padding-lanes-in-denominator"),
    ("attention.padding-inert", where(lambda case: case.layout.padded_nodes > 0, logits_off(1e-3))),
    ("attention.prefix-split", where(lambda case: case.layout.prefill_chunk > 0, logits_off(1e-3))),
    (
        "attention.prefix-split",
        where(
            lambda case: case.layout.prefill_chunk > 0,
            in_stage("committed", lambda stage: replace(stage, after=nudge_cache(stage.after, 0, kind="values"))),
        ),
    ),
    ("acceptance.greedy-walk", "first-draft-token-unverified"),
    ("acceptance.greedy-walk", "token-zero-taken-for-padding"),
    ("acceptance.greedy-walk", "bonus-from-rejected-row"),
    ("acceptance.support", "first-draft-token-unverified"),
    ("acceptance.support", "rejected-slots-emitted-as-zero"),
    ("acceptance.path-in-tree", where(lambda case: case.layout.commit == "path", in_stage("accepted", to_sibling))),
    ("acceptance.path-in-tree", in_stage("accepted", lambda stage: replace(stage, path=stage.path[:1] * 2))),
    ("acceptance.path-in-tree", in_stage("accepted", lambda stage: replace(stage, path=stage.path[1:] or (1,)))),
    ("acceptance.path-in-tree", "rejected-slots-emitted-as-zero"),
    ("acceptance.superset-accepts-no-less", "first-draft-token-unverified"),
    ("acceptance.superset-accepts-no-less", where(_larger, in_stage("accepted", one_less))),
    (
        "acceptance.chain-degenerate",
        where(lambda case: case.layout.commit == "length", in_stage("accepted", one_less)),
    ),
    (
        "acceptance.chain-degenerate",
        where(
            lambda case: case.layout.commit == "length",
            in_stage("committed", lambda stage: replace(stage, fallback="no")),
        ),
    ),
    ("acceptance.vocabulary-permutation", "token-zero-taken-for-padding"),
    ("acceptance.vocabulary-permutation", "rejected-slots-emitted-as-zero"),
    (
        "cache.isolation",
        in_stage("committed", lambda stage: replace(stage, verified=nudge_cache(stage.verified, 0, 1e-6))),
    ),
    ("cache.isolation", in_stage("committed", lambda stage: replace(stage, verified=value_lost(stage.verified)))),
    ("cache.commit-equivalence", in_stage("committed", lambda stage: replace(stage, after=value_lost(stage.after)))),
    (
        "cache.untouched-slots",
        in_stage("committed", lambda stage: replace(stage, after=nudge_cache(stage.after, 1, 1e-6))),
    ),
    ("cache.commit-equivalence", "kv-truncated-not-gathered"),
    ("cache.commit-equivalence", "overlapping-compaction"),
    ("cache.commit-equivalence", "values-moved-by-other-layout"),
    ("cache.commit-equivalence", "draft-cache-overtrimmed"),
    ("cache.commit-equivalence", "draft-kv-never-written"),
    ("cache.commit-equivalence", in_stage("committed", lambda stage: replace(stage, length=stage.length + 1))),
    (
        "cache.commit-equivalence",
        in_stage("committed", lambda stage: replace(stage, before=nudge_cache(stage.before, 1, 0.5)), step=1),
    ),
    (
        "cache.fast-equals-full",
        where(
            lambda case: case.layout.commit == "fast",
            in_stage("committed", lambda stage: replace(stage, after=nudge_cache(stage.after, -1, 1e-6, "values"))),
        ),
    ),
    ("cache.fast-equals-full", where(lambda case: case.layout.commit == "length", output_of(lambda old: old[:-1]))),
    ("draft.fidelity", "draft-positions-early"),
    ("draft.fidelity", "draft-reads-wrong-parent"),
    ("draft.fidelity", "draft-kv-never-written"),
    (
        "draft.fidelity",
        in_stage("drafted", lambda stage: replace(stage, tree=Tree((0, 0), (stage.tree.token[0], 1)))),
    ),
    ("draft.rollback", "draft-kv-never-written"),
    ("draft.vocabulary-map", "vocabulary-map-skipped"),
    ("lossless.completes", broken),
    ("lossless.completes", "draft-cache-not-popped"),
    ("lossless.greedy-match", "first-draft-token-unverified"),
    ("lossless.greedy-match", "rejected-slots-emitted-as-zero"),
    ("lossless.greedy-match", output_of(lambda old: (*old[:-1], 101))),
    ("lossless.draft-independent", "first-draft-token-unverified"),
    ("lossless.draft-independent", "stop-inside-block-ignored"),
    ("lossless.draft-independent", "block-past-max-new-tokens"),
    ("lossless.stops", "stop-inside-block-ignored"),
    ("lossless.stops", "block-past-max-new-tokens"),
    ("lossless.stops", lambda case, trace, time: replace(trace, finish="eos")),
    ("lossless.stops", output_of(lambda old: old[:-1])),
    ("lossless.state-isolated", second_time(logits_off(1e-6))),
    ("lossless.state-isolated", second_time(output_of(lambda old: old[::-1]))),
    ("lossless.takes-part", lambda case, trace, time: Trace((), (), None)),
    ("lossless.accounting", accounts(accepted=1)),
    ("lossless.accounting", accounts(proposed=-1)),
    ("lossless.accounting", accounts(verify_calls=1)),
    ("lossless.accounting", "rejected-slots-emitted-as-zero"),
    ("lossless.deterministic", second_time(logits_off(1e-6))),
    (
        "lossless.deterministic",
        second_time(in_stage("committed", lambda stage: replace(stage, after=nudge_cache(stage.after, 0, 1e-6)))),
    ),
    ("lossless.deterministic", second_time(lambda case, trace, time: replace(trace, finish=None))),
    ("lossless.logprobs", "logprobs-over-whole-tree"),
    ("lossless.logprobs", logprobs_off(1e-2)),
    ("lossless.logprobs-draft-independent", where(lambda case: bool(case.draft.shapes), logprobs_off(1e-2))),
]
"""Invariant and what must make it fail: a fault of the catalogue by name, or a corruption."""


@pytest.mark.parametrize(
    ("name", "how"), EVERYTHING, ids=[f"{name}-{index}" for index, (name, _) in enumerate(EVERYTHING)]
)
def test_fails_when_it_should(name: str, how: str | Corruption) -> None:
    case_outcomes = outcomes(name, wrong(how), fixed_cases())
    findings = next((findings for _, outcome, findings in case_outcomes if outcome == "failed"), ())
    assert findings
    assert {finding.invariant for finding in findings} == {name}


def test_the_clean_engine_passes_the_same_cases() -> None:
    """And what has something to say about one of them is what is shown to fail above, no more and no less."""
    subject = subject_of(open_cpu(), keep=512)
    checked: set[str] = set()
    for key, case in fixed_cases().items():
        verdict = judge(case, ALL, ORACLE, subject)
        assert verdict.findings == (), key
        assert "unobserved" not in verdict.outcomes.values()
        checked |= {name for name, outcome in verdict.outcomes.items() if outcome == "checked"}
    assert checked == {name for name, _ in EVERYTHING}


# Rule T.


def judge_rows(logits: list[list[float]], output: tuple[int, ...], sigma: float) -> list[object]:
    return list(judge_tokens("i", np.array(logits), output, sigma, [0, 0, 1], 2))


def test_a_token_within_the_noise_is_a_tie() -> None:
    edge = TIE_SIGMA * 0.5
    counts, tie = judge_rows([[9.0, 9.0 - edge, 0.0]], (1,), 0.5)
    assert counts == Positions(1, 1, near_and_predicted(np.array([[9.0, 5.0, 0.0]]), 0.5)[1], 2)
    assert tie == Tie("i", 0, TIE_SIGMA)


def test_a_token_beyond_the_noise_is_a_bug() -> None:
    logits = [[9.0, 0.0, 1.0], [0.0, 9.0, 1.0], [9.0, 4.9, 0.0]]
    counts, bug = judge_rows(logits, (0, 1, 1), 0.5)
    assert isinstance(bug, Finding)
    assert bug.measure == pytest.approx(4.1 / 0.5 / TIE_SIGMA)
    assert replace(bug, measure=None) == Finding("i", Stage.EMITTED, 1, {"position": 2}, 0, 1)
    assert isinstance(counts, Positions)
    assert (counts.judged, counts.near, counts.control_ties) == (3, 0, 2)
    assert judge_rows(logits, (0, 1, 0), 0.5)[1:] == []


def test_without_noise_nothing_is_a_tie() -> None:
    _, bug = judge_rows([[1.0, 1.0 - 1e-12]], (1,), 1e-14)
    assert isinstance(bug, Finding)
    assert near_and_predicted(np.array([[1.0, 1.0]]), 0.0) == (0, 0.0)


def test_near_ties_are_predicted_by_the_normal_tail() -> None:
    near, predicted = near_and_predicted(np.array([[1.0, 1.0 - np.sqrt(2), -50.0], [9.0, 0.0, 0.0]]), 1.0)
    assert near == 1
    assert predicted == pytest.approx(0.158655, abs=1e-5)  # the chance that a normal exceeds one sigma
    assert is_decided(np.array([9.0, 0.0]), 1.0)
    assert not is_decided(np.array([8.0, 0.0]), 1.0)
    assert is_decided(np.array([1.0]), 1.0)
    assert gaps(np.array([[1.0, 3.0], [4.0, 0.0]]), (0, 0)).tolist() == [2.0, 0.0]


def tally(judged_positions: int, near: int, predicted: float, ties: int) -> Tally:
    run_tally = Tally("b", positions=Positions(judged_positions, near, predicted, 0))
    run_tally.ties = [Tie("i", position, 1.0) for position in range(ties)]
    run_tally.predicted_ties = {"i": predicted}
    return run_tally


def test_more_ties_than_the_noise_predicts_are_no_chance() -> None:
    assert excess_ties(tally(1000, 0, 5.0, 0)) is None
    assert excess_ties(tally(1000, 0, 5.0, 12)) is None
    assert excess_ties(tally(1000, 0, 5.0, 60)) is not None
    assert excess_ties(tally(1000, 0, 0.0, 1)) is not None
    # The border lies where the Poisson tail of 1.3 times the prediction falls below one in 10**9.
    least = next(count for count in range(60) if excess_ties(tally(1000, 0, 5.0, count)))
    rate, tail, term = INFLATION * 5.0, 1.0, float(np.exp(-INFLATION * 5.0))
    for count in range(least):
        tail, term = tail - term, term * rate / (count + 1)
    assert tail < 1e-9 < tail + term * least / rate


def test_ties_of_drafted_nodes_are_counted_by_their_own_control() -> None:
    """Not by that of greedy positions, of which a run of `draft.*` alone has none."""
    run_tally = Tally("b")
    run_tally.ties = [Tie("draft.fidelity", position, 1.0) for position in range(10)]
    run_tally.predicted_ties = {"draft.fidelity": 9.0}
    assert excess_ties(run_tally) is None
    run_tally.predicted_ties = {"draft.fidelity": 0.2, "lossless.greedy-match": 900.0}
    assert str(excess_ties(run_tally)) == "10 ties of draft.fidelity where the noise of its control predicts 0.2"
    run_tally.ties = [Tie("pair.greedy-match", 0, 0.0)] * 10
    assert excess_ties(run_tally) is None, "no control predicts ties of two engines that show tokens alone"


def test_a_run_of_near_ties_decides_nothing() -> None:
    assert undecided_comparison(tally(0, 0, 0.0, 0)) is None
    assert undecided_comparison(tally(100, 25, 0.0, 0)) is None
    assert "26 of 100" in str(undecided_comparison(tally(100, 26, 0.0, 0)))


# Rule N.


def test_what_is_not_a_number_is_as_far_off_as_can_be() -> None:
    assert rms(np.array([[3.0, 4.0], [np.nan, 0.0], [0.0, -np.inf]])).tolist() == [np.sqrt(12.5), np.inf, np.inf]
    worst = list(rows_beyond(np.array([[0.0, 2.0], [np.nan, 0.0], [0.0, 0.0]]), np.zeros((3, 2)), 1.0))
    assert worst == [((1,), np.inf), ((0,), np.sqrt(2.0))]
    assert list(rows_beyond(np.full((2, 2), 0.99), np.zeros((2, 2)), 0.99)) == []
    assert list(rows_beyond(np.zeros((0, 2)), np.zeros((0, 2)), 1.0)) == []


def test_other_shapes_are_not_compared() -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        list(rows_beyond(np.zeros((2, 2)), np.zeros((1, 2)), 1.0))
    changes: dict[str, Callable[[Any], Any]] = {
        "scored": lambda scored: Scored(scored.logits[:, :-1]),
        "attended": lambda attended: Attended(attended.output[..., :-1]),
    }
    for stage, change in changes.items():
        subject = corrupted_subject(in_stage(stage, change))
        judged = outcomes("attention.context-exact", subject, fixed_cases())
        all_findings = [finding for _, _, findings in judged for finding in findings]
        assert {finding.where.get("side") for finding in all_findings} >= {"shape"}
    narrow = corrupted_subject(
        in_stage(
            "committed", lambda committed: replace(committed, after=committed.after and cut_width(committed.after))
        )
    )
    cache_findings = [
        finding
        for _, _, findings in outcomes("cache.commit-equivalence", narrow, fixed_cases())
        for finding in findings
    ]
    assert {finding.where.get("side") for finding in cache_findings} == {"shape"}


def cut_width(kv: Kv) -> Kv:
    return Kv(kv.keys[..., :-1], kv.values[..., :-1])


def test_the_control_is_bounded_itself() -> None:
    """A fault common to tree and plain decode is found, and does not widen the limits by which it is judged."""
    case = fixed_cases()["fork"]
    clean = noise(case, ORACLE, subject_of(open_cpu()))
    assert 0 < clean.measured <= clean.ceiling

    def scale_logits(case: Case, trace: Trace, time: int) -> Trace:
        steps = [replace(step, scored=step.scored and Scored(step.scored.logits * 1.01)) for step in trace.steps]
        return replace(trace, steps=tuple(steps))

    subject = corrupted_subject(scale_logits)
    error = noise(case, ORACLE, subject)
    assert error.measured > 100 * error.ceiling
    assert error.logits <= error.ceiling
    assert judge(case, (BY_NAME["attention.context-exact"],), ORACLE, subject).findings

    only_plain = corrupted_subject(where(lambda drawn_case: drawn_case.draft == Scripted(), scale_logits))
    (finding,) = judge(case, (BY_NAME["attention.context-exact"],), ORACLE, only_plain).findings
    assert finding.where == {"side": "control"}


def test_limits_by_dtype() -> None:
    layers = np.array([1.0, 2.0])
    usual = noise(fixed_cases()["fork"], ORACLE, subject_of(open_cpu())).amplification
    single = Noise("float32", False, 0.5, 0.1, 1.0, 3.0, layers, layers, layers, layers, (1.0, 5.0, 0.5), 0, usual)
    assert single.logits_limit() == pytest.approx(6 * 0.5)
    assert single.inner_limit("keys", 1) == pytest.approx(30 * 2.0)
    double = replace(single, dtype="float64")
    assert double.logits_limit() == pytest.approx(3e-9)
    assert double.inner_limit("keys", 0) == pytest.approx(5e-9)
    assert double.inner_limit("values", 0) == pytest.approx(1e-9)
