"""The law of a step by single runs: exact where the backend has a tape and no tables, and wrong laws show in it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from properties.invariants.laws import law_exact
from properties.laws.one_run_at_a_time import MOST_RUNS, by_run, one_step
from properties.strategies.models import GALLERY
from properties.verdict.finding import Compared, Finding
from properties.verdict.invariant import NotApplicable
from properties.verdict.subject import Subject
from reference.architecture import Seeded
from reference.case import Case
from reference.draft import LanguageModel, Scripted
from reference.oracle.decoder import Oracle
from reference.rules import Rule
from reference.sampling import Sampling, Stops
from reference.tree import RankTree, Tree
from specverify.setup.subjects import open_planted, subject_of

torch.set_num_threads(1)
ORACLE = Oracle()
TARGET = Seeded(GALLERY[8], 0)
"""A vocabulary of 3."""

CHILD = Case(TARGET, (1, 0, 1), Scripted((Tree((0, 0), (1, 0)),)), sampling=Sampling(2.5), stops=Stops(4))
FORK = replace(CHILD, draft=Scripted((Tree((0, 0, 0), (1, 0, 2)),)))
DRAWN = replace(
    CHILD,
    draft=LanguageModel(Seeded(GALLERY[8], 1), RankTree((0, 0), (0, 0))),
    sampling=Sampling(2.5, draws="without-replacement"),
)


def hidden(fault: str | None = None) -> Subject:
    """The engine, its tables out of sight."""
    subject = subject_of(open_planted("cpu-eager", fault))
    subject.tables = None
    return subject


def test_a_correct_engine_has_the_targets_law_to_seven_digits() -> None:
    subject = hidden()
    made = by_run(CHILD, ORACLE, subject)
    assert made.off < 5e-7 < made.allowed < 1e-3
    assert made.found.cells >= 5
    assert subject.runs <= MOST_RUNS + 1
    assert sum(made.found.outcomes.values()) == pytest.approx(1.0, abs=1e-12)


FAULTS = {
    "bonus-from-whole-law": CHILD,
    "acceptance-ignores-coin": CHILD,
    "residual-by-arg-max": CHILD,
    "target-law-under-default-settings": CHILD,
    "acceptance-ratio-reversed": CHILD,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_law_is_found_run_by_run(name: str) -> None:
    facts = [fact for fact in law_exact(FAULTS[name], ORACLE, hidden(name)) if not isinstance(fact, Compared)]
    assert len(facts) == 1
    assert isinstance(facts[0], Finding)
    assert facts[0].invariant == "acceptance.law-exact"
    assert facts[0].measure is not None
    assert facts[0].measure > 50.0


def test_what_is_too_large_or_promises_nothing_is_left_alone() -> None:
    wide = Case(Seeded(GALLERY[7], 0), (3, 1), sampling=Sampling(1.0), stops=Stops(4))
    with pytest.raises(NotApplicable, match="cells"):
        list(law_exact(wide, ORACLE, hidden()))
    lossy = replace(CHILD, sampling=Sampling(2.5, rule=Rule("typical")))
    with pytest.raises(NotApplicable, match="lossless"):
        list(law_exact(lossy, ORACLE, hidden()))
    with pytest.raises(NotApplicable, match="processors"):
        one_step(replace(CHILD, sampling=Sampling(2.5, processors=("no.such:thing",))))


def test_the_step_is_the_cases_own_made_small() -> None:
    large = replace(FORK, draft=Scripted((Tree((0, 2, 0, 1, 2), (1, 0, 2, 1, 1)),)), steps=0)
    step = one_step(large)
    assert isinstance(step.draft, Scripted)
    assert (step.draft.trees[0].parent, step.draft.trees[0].token) == ((0, 2, 0), (1, 0, 2))
    assert (step.steps, step.stops.max_new_tokens, step.sampling.tape) == (1, 3, ())
    drawn = one_step(DRAWN)
    assert isinstance(drawn.draft, LanguageModel)
    assert len(drawn.draft.shape) == 2
    assert np.all(np.array(drawn.draft.shape.rank) == 0)
