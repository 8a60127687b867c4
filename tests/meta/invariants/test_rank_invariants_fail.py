"""Faults of models on several ranks, and of sampling that is split over them: each is named at its stage."""

from dataclasses import replace
from functools import cache

import pytest

from specverify.backends.faults.fault import Fault, faults_in
from specverify.backends.faults.serving import ranks, ranks_by_requests
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.tree import Tree
from specverify.reports import bundle
from specverify.setup.subjects import open_planted, subject_of
from tests.cases import CORPUS
from tests.corruption import BY_NAME, ORACLE
from tests.meta.engine.test_ranks_by_requests import batch
from tests.models import LLAMA

FAULTS = (*faults_in(ranks), *faults_in(ranks_by_requests))

FORK = Scripted((Tree((0, 0, 0), (6, 1, 2)),))
BIASED = Seeded(next(architecture for architecture in GALLERY if architecture.output_bias), 0)


@cache
def fixed_cases() -> dict[str, tuple[Case, str]]:
    """For each fault a case that triggers it, and the invariant that names it."""
    greedy = Case(LLAMA, (3, 14, 15, 9, 6), FORK, stops=Stops(4), ranks=2)
    sampled = replace(greedy, sampling=Sampling(1.0, seed=1))
    biased = replace(greedy, model=BIASED, prompt=(1, 2, 0), draft=Scripted((Tree((0, 0), (0, 1)),)))
    # The second request lives on the second rank and emits more tokens than the first.
    mate = Mate((7, 8, 2), Scripted(), stops=Stops(3))
    steps = tuple(Action(kind, numbers) for kind, numbers in (("add", (0,)), ("add", (1,)), ("step", (0, 1))))
    replace(greedy, draft=Scripted(), stops=Stops(1), session=Session((mate,), steps), spread=True)
    return {
        "rank-shard-sized-draws": (sampled, "acceptance.sampled-walk"),
        "rank-draws-by-own-seed": (sampled, "acceptance.sampled-walk"),
        "rank-draws-once-more": (sampled, "acceptance.sampled-walk"),
        "rank-takes-its-own-argmax": (greedy, "acceptance.greedy-walk"),
        # Two logits so near that the rounding of ranks decides are not found by hand.
        "rank-greedy-not-broadcast": (_smallest("rank-greedy-not-broadcast"), "lossless.ranks-agree"),
        "rank-sum-forgotten-on-trees": (greedy, "attention.context-exact"),
        "rank-bias-added-by-all": (biased, "attention.context-exact"),
        "rank-embeds-ids-of-others": (greedy, "attention.context-exact"),
        "rank-idle-skips-step": (replace(greedy, spread=True), "lossless.takes-part"),
        "rank-lengths-of-another": (_smallest("rank-lengths-of-another"), "cache.commit-equivalence"),
        # A batch of a run is itself padded to two requests, which fill both ranks; a law is read from one at a time.
        "rank-of-padding-skips-gather": (sampled, "acceptance.law-exact"),
        "rank-slice-ends-with-batch": (batch(3, 2), "acceptance.sampled-walk"),
        "rank-draws-sized-to-slice": (batch(4, 2), "acceptance.sampled-walk"),
        "rank-keeps-answers-of-padding": (batch(3, 2), "acceptance.sampled-walk"),
    }


def _smallest(fault: str) -> Case:
    """The smallest case of a fault, which the corpus keeps."""
    return bundle.load(CORPUS / f"{fault}.json").case


def test_every_fault_has_its_case() -> None:
    assert set(fixed_cases()) == {fault.name for fault in FAULTS}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_named_where_it_was_planted(fault: Fault) -> None:
    case, name = fixed_cases()[fault.name]
    invariants = (BY_NAME[name],)
    clean = judge(case, invariants, ORACLE, subject_of(open_planted(fault.on, None)))
    assert clean.agreed, clean.findings[:1]
    assert clean.outcomes[name] == "checked"
    verdict = judge(case, invariants, ORACLE, subject_of(open_planted(fault.on, fault.name)))
    assert verdict.first is not None
    assert verdict.first.stage is fault.stage
    assert name in {finding.invariant for finding in verdict.findings if finding.stage is fault.stage}
