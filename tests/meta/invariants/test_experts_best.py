"""Choices of experts: shown by engines, judged by their scores, and followed by the oracle in all other numbers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specverify.backends import faults
from specverify.backends.compositions import open_cpu
from specverify.properties.invariants import ALL
from specverify.properties.run_statistics import excess_choices
from specverify.properties.strategies.models import small_draft
from specverify.properties.tally import Tally
from specverify.properties.verdict.finding import RoutingCounts
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.files.json_types import build, encode
from specverify.reference.layout import KvLayout
from specverify.reference.oracle.choices import EXPERTS, Choices, RowChoices
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.formulas.routers import UNKNOWN, Router
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Array, Stage, Step, Trace
from specverify.reference.tree import RankTree, Tree
from specverify.reports import bundle
from specverify.setup.subjects import subject_of
from tests.cases import CORPUS
from tests.checkpoints import save_checkpoint
from tests.drawn_families import listed_architectures
from tests.meta.oracle.test_against_transformers import case_of

MIXING = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "llama4_text",
          "qwen3_next")  # fmt: skip
"""Families whose layers may have experts."""

TREE = RankTree((0, 0, 0, 1, 2, 1), (0, 0, 1, 0, 0, 1))


def invariants(*names: str) -> tuple[object, ...]:
    return tuple(invariant for invariant in ALL if invariant.name in names)


CHOICE, NUMBERS = ("attention.experts-best",), ("attention.context-exact", "cache.commit-equivalence")


def with_experts(family: str) -> Architecture:
    """A listed architecture of `family`, with experts where the family has any."""
    listed = listed_architectures(family)
    return next(arch for arch in listed if family == "llama" or getattr(arch.settings, "experts", False))


def case_on(family: str, dtype: str = "float64", **changes: object) -> Case:
    arch = with_experts(family)
    prompt = tuple(token % arch.vocab_size for token in (1, 2, 3, 4, 9, 8, 7, 1))
    case = Case(
        Seeded(arch, 1), prompt, LanguageModel(small_draft(arch.vocab_size, 0), TREE), stops=Stops(5), dtype=dtype
    )
    return replace(case, **changes)  # type: ignore[arg-type]


def routed_of(step: Step) -> Array:
    assert step.scored is not None
    assert step.scored.routed is not None
    return step.scored.routed


def with_other_experts(trace: Trace, change: Callable[[Array], Array | None]) -> Trace:
    """`trace` with other experts in each step."""
    steps = [replace(step, scored=replace(step.scored, routed=change(routed_of(step)))) for step in trace.steps]  # type: ignore[type-var]
    return replace(trace, steps=tuple(steps))


def recorded_subject(run: Callable[[Case], Trace]) -> Subject:
    return Subject("recorded", run, frozenset(Stage))


HANDED_OVER = bundle.load(CORPUS / "clean/expert-behind-a-tie-of-a-prompt-handed-over.json").case
"""A request whose prompt another server filled in: nothing shows the experts of its rows, two of which are ties."""


def own_experts_shown(routed: Array) -> Array:
    """`routed` with the experts that the oracle takes in the rows of the prompt."""
    request = HANDED_OVER.alone(0)
    context, tree = request.prompt[:-1], Tree((0,), (request.prompt[-1],))
    scored = Oracle().scored_choices(EXPERTS, request, context, tree)
    assert scored is not None
    shown: Array = np.where(routed == UNKNOWN, scored.chosen, routed)
    return shown


def other_expert(routed: Array) -> Array:
    """`routed` with the third of three experts at the root, in the last layer."""
    changed: Array = routed.copy()
    changed[-1, -1] = 0
    return changed


@pytest.mark.parametrize(
    ("change", "is_found"),
    [(lambda routed: routed, False), (own_experts_shown, True), (other_expert, True)],
    ids=["behind rows that are not shown", "behind rows that are shown", "further off than ties move it"],
)
def test_a_choice_behind_ties_that_are_not_shown_is_granted_what_they_move_it(
    change: Callable[[Array], Array], is_found: bool
) -> None:
    def run(case: Case) -> Trace:
        trace = open_cpu().run(case)
        assert trace.shared is not None
        changed = with_other_experts(trace, change)
        requests = tuple(changed if request is not None else None for request in trace.shared.requests)
        return replace(changed, shared=replace(trace.shared, requests=requests))

    verdict = judge(HANDED_OVER, invariants(*CHOICE), Oracle(), Subject("handed over", run, frozenset(Stage)))  # type: ignore[arg-type]
    assert bool(verdict.findings) is is_found
    assert bool(verdict.routing_ties) is not is_found


@pytest.mark.parametrize("family", MIXING)
def test_an_engine_shows_the_experts_that_the_oracle_takes(family: str) -> None:
    """In float64 they are the oracle's, in every row of context and tree."""
    case, oracle = case_on(family), Oracle()
    for step in open_cpu().run(case).steps:
        assert step.drafted is not None
        routed, routing = routed_of(step), oracle.scored_choices(EXPERTS, case, step.context, step.drafted.tree)
        assert routing is not None
        assert np.array_equal(np.sort(routed, axis=-1), np.sort(routing.chosen, axis=-1))
        dense = [layer for layer, router in enumerate(routing.scorers) if router is None]
        assert (routed[dense] == UNKNOWN).all()
    assert oracle.follows(case)


def test_a_model_without_experts_shows_none() -> None:
    (step, *_) = open_cpu().run(case_on("llama")).steps
    assert step.scored is not None
    assert step.scored.routed is None


@pytest.mark.parametrize("kind", ["branch", "paged", "prefix"])
def test_committed_rows_have_the_experts_of_the_forward_that_wrote_them(kind: str) -> None:
    """After prefills in pieces, evictions, forks and pages that other requests wrote, every row is known."""
    layout = KvLayout(kind=kind, page_size=2 if kind != "branch" else 0, prefill_chunk=3)
    actions = (
        Action("add", (0,)), Action("step", (0,)), Action("fork", (0, 1)), Action("step", (0, 1)),
        Action("evict", (0,)), Action("step", (1,)), Action("restore", (0,)), Action("step", (0, 1)),
        Action("add", (2,)), Action("step", (2,)),
    )  # fmt: skip
    case = case_on("mixtral", layout=layout, stops=Stops(12))
    mates = (Mate(prompt=(4,)), Mate(prompt=case.prompt))
    case = replace(case, session=Session(mates, actions))
    oracle, shared = Oracle(), open_cpu().run(case).shared
    assert shared is not None
    num_steps = 0
    for request in shared.requests:
        for step in () if request is None else request.steps:
            assert step.drafted is not None
            routing = oracle.scored_choices(EXPERTS, case, step.context, step.drafted.tree)
            assert routing is not None
            assert np.array_equal(np.sort(routed_of(step), -1), np.sort(routing.chosen, -1))
            num_steps += 1
    assert num_steps >= 6


def test_the_experts_of_a_trace_are_in_its_record() -> None:
    trace = open_cpu().run(case_on("mixtral"))
    content = json.loads(json.dumps(encode(trace.steps[0])))
    assert content["scored"]["routed"] == routed_of(trace.steps[0]).tolist()
    assert build(Step, content).scored.routed == routed_of(trace.steps[0]).tolist()


def worse(oracle: Oracle, case: Case) -> Callable[[Case], Trace]:
    """Runs of an engine whose root row takes its worst experts in layer 0; all else follows from that choice."""

    def run(asked_case: Case) -> Trace:
        first = oracle(asked_case).steps[0]
        assert first.drafted is not None
        routing = oracle.scored_choices(EXPERTS, asked_case, first.context, first.drafted.tree)
        assert routing is not None
        router = routing.scorers[0]
        assert isinstance(router, Router)
        chosen, root = routing.chosen.copy(), len(first.context)
        chosen[0, root] = np.argsort(router.scores[root])[: router.experts_per_row]
        return following(oracle, asked_case, first.context, first.drafted.tree, chosen)

    return run


def following(oracle: Oracle, case: Case, context: tuple[int, ...], tree: Tree, chosen: Array) -> Trace:
    """The oracle's run of `case` with the experts `chosen`, which it shows."""
    choices = Choices(len(chosen))
    choices.add(context, tree, RowChoices(chosen))
    follower = oracle.following(case, choices)
    steps = []
    for step in follower(case).steps:
        assert step.drafted is not None
        routing = follower.scored_choices(EXPERTS, case, step.context, step.drafted.tree)
        assert routing is not None
        steps.append(replace(step, scored=replace(step.scored, routed=routing.chosen)))  # type: ignore[type-var]
    return replace(follower(case), steps=tuple(steps))


def test_a_choice_that_is_not_the_best_is_refused_though_all_numbers_follow_from_it() -> None:
    oracle, case = Oracle(), case_on("mixtral", steps=1)
    verdict = judge(case, invariants(*CHOICE, *NUMBERS), oracle, recorded_subject(worse(oracle, case)))  # type: ignore[arg-type]
    assert {finding.invariant for finding in verdict.findings} == {*CHOICE}
    first = verdict.first
    assert first is not None
    assert (first.where, first.step) == ({"layer": 0, "node": 0}, 0)
    assert verdict.outcomes["attention.context-exact"] == "checked"


@pytest.mark.parametrize(
    ("change", "side"),
    [(lambda routed: np.where(routed == UNKNOWN, UNKNOWN, 0), None), (lambda routed: routed[:, :, :1], "shape")],
)
def test_experts_that_are_no_choice_are_refused(change: Callable[[Array], Array], side: str | None) -> None:
    backend, case = open_cpu(), case_on("mixtral")
    subject = recorded_subject(lambda asked_case: with_other_experts(backend.run(asked_case), change))
    verdict = judge(case, invariants(*CHOICE), Oracle(), subject)  # type: ignore[arg-type]
    assert verdict.outcomes == {"attention.experts-best": "failed"}
    assert verdict.findings[0].where.get("side") == side


def test_a_backend_that_shows_no_experts_is_not_judged_on_them() -> None:
    backend, case = open_cpu(), case_on("mixtral")
    subject = recorded_subject(lambda asked_case: with_other_experts(backend.run(asked_case), lambda routed: None))
    verdict = judge(case, invariants(*CHOICE), Oracle(), subject)  # type: ignore[arg-type]
    assert verdict.outcomes == {"attention.experts-best": "unobserved"}
    unknown = recorded_subject(
        lambda asked_case: with_other_experts(backend.run(asked_case), lambda routed: np.full_like(routed, UNKNOWN))
    )
    verdict = judge(case, invariants(*CHOICE), Oracle(), unknown)  # type: ignore[arg-type]
    assert (verdict.findings, verdict.routed.judged) == ((), 0)


def test_a_public_fault_of_commits_is_found_in_bfloat16(tmp_path: Path) -> None:
    """All rows of this Mixtral tie somewhere in bfloat16; the experts that it shows leave nothing to excuse."""
    plain = replace(case_of(save_checkpoint("mixtral", tmp_path), True, "bfloat16").plain_decode(), stops=Stops(4))
    first, second, third, _ = open_cpu().run(plain).output
    other_token = (first + 1) % plain.model.vocab_size
    # The accepted nodes are not the first rows.
    tree = Tree((0, 0, 0, 2, 3), (plain.prompt[-1], other_token, first, second, third))
    case = replace(plain, draft=Scripted((tree,)))
    backend = open_cpu()
    faults.plant(backend, faults.fault_named("kv-truncated-not-gathered"))
    verdict = judge(case, invariants(*CHOICE, *NUMBERS), Oracle(), subject_of(backend))  # type: ignore[arg-type]
    assert verdict.routing_ties == ()
    assert verdict.first is not None
    assert (verdict.first.invariant, verdict.first.stage) == ("cache.commit-equivalence", Stage.COMMITTED)
    clean = judge(case, invariants(*CHOICE, *NUMBERS), Oracle(), subject_of(open_cpu()))  # type: ignore[arg-type]
    assert (clean.findings, clean.routing_ties) == ((), ())


def test_too_many_other_experts_are_no_chance() -> None:
    tally = Tally("own")
    tally.routed = RoutingCounts(judged=1000, near=100, predicted=10.0, ties=30)
    assert excess_choices(tally) is None
    tally.routed = RoutingCounts(judged=1000, near=100, predicted=10.0, ties=120)
    assert excess_choices(tally) == "120 rows took other experts, where the noise of their scores predicts 10"
