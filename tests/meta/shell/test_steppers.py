"""Steppers and tables: an engine that shows some of its stages, and a sampler of rounds on given laws."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from specverify.adapt import stepper
from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Stage
from specverify.reference.tree import RankTree, Tree
from tests.judging import verdict_of
from tests.strangers.components import rounds

ORACLE = Oracle(keep=256)
PLAIN = Case(Seeded(GALLERY[1], 6), (3, 1, 4), stops=Stops(6))
AHEAD = ORACLE(PLAIN).output
TREE = Tree((0, 0, 0, 2, 2), (4, (AHEAD[0] + 1) % 17, AHEAD[0], (AHEAD[1] + 1) % 17, AHEAD[1]))
GREEDY = Case(PLAIN.model, PLAIN.prompt, Scripted((TREE,)), stops=PLAIN.stops)
SAMPLED = Case(
    PLAIN.model,
    PLAIN.prompt,
    LanguageModel(Seeded(GALLERY[1], 3), RankTree((0, 0, 1), (0, 0, 0))),
    sampling=Sampling(2.5),
    stops=Stops(6),
)


def test_a_stepper_is_judged_at_each_stage_of_which_it_shows_a_part() -> None:
    verdict = verdict_of(rounds.open_steps(), GREEDY)
    assert verdict.findings == ()
    for name in ("structure.mask-is-ancestry", "attention.context-exact", "acceptance.greedy-walk", "draft.fidelity",
                 "lossless.greedy-match"):  # fmt: skip
        assert verdict.outcomes[name] == "checked", name
    for name in ("structure.positions-are-depth", "structure.links-walk-the-tree", "cache.commit-equivalence"):
        assert verdict.outcomes[name] == "unobserved", name


@pytest.mark.parametrize(
    ("opened", "invariant", "stage"),
    [
        (rounds.open_mask, "structure.mask-is-ancestry", Stage.LOWERED),
        (rounds.open_path, "acceptance.greedy-walk", Stage.ACCEPTED),
    ],
)
def test_a_wrong_part_is_found_at_its_stage(opened: Any, invariant: str, stage: Stage) -> None:
    first = verdict_of(opened(), GREEDY).first
    assert first is not None
    assert (first.invariant, first.stage) == (invariant, stage)


def test_a_stepper_with_a_draft_of_its_own_shows_its_trees_and_no_script_is_asked_of_it() -> None:
    def steps(prompt_ids: list[int], max_new_tokens: int, model: Any) -> Iterator[dict[str, Any]]:
        guess = [([0, 0], [prompt_ids[-1], AHEAD[0]])]
        yield from rounds.walked()(prompt_ids, max_new_tokens, model, guess)

    verdict = verdict_of(stepper(steps, shows=rounds.SHOWN_STAGES)(), PLAIN)
    assert verdict.findings == ()
    assert verdict.outcomes["draft.fidelity"] == "checked"
    assert verdict.outcomes["structure.mask-is-ancestry"] == "checked"
    assert verdict.accept_lengths[0] == 1


def some(prompt_ids: list[int], max_new_tokens: int) -> Iterator[Any]:
    yield {"tokens": [1], "position": [3]}


@pytest.mark.parametrize(
    ("shown_parts", "line"),
    [(("masks",), "shows 'masks', which is none of tokens, tree"), (("path",), "shows path without bonus")],
)
def test_parts_that_mean_nothing_are_refused(shown_parts: tuple[str, ...], line: str) -> None:
    with pytest.raises(TypeError, match=line):
        stepper(some, shows=shown_parts)


def test_a_step_with_other_parts_than_it_shows_is_a_finding_in_one_line() -> None:
    first = verdict_of(stepper(some, shows=("mask",))(), PLAIN).first
    assert first is not None
    assert first.invariant == "lossless.completes"
    assert "step 0 holds position beside what the adapter shows, and lacks mask" in str(first.observed)


LAWS = ("lossless.completes", "acceptance.law-joint", "acceptance.law-exact", "lossless.stops")


def test_the_exact_law_of_a_sampler_of_rounds_is_the_targets() -> None:
    verdict = verdict_of(rounds.open_tables(), SAMPLED, *LAWS)
    assert verdict.findings == ()


@pytest.mark.slow
def test_a_wrong_residual_of_a_sampler_of_rounds_is_found_exactly() -> None:
    invariant_name, backend = "acceptance.law-joint", rounds.open_residual()
    # Each case has a world of its own; where the draft's law is the target's, nothing is ever rejected.
    several = (replace(SAMPLED, sampling=replace(SAMPLED.sampling, seed=seed)) for seed in range(8))
    verdicts = (verdict_of(backend, case, invariant_name) for case in several)
    first = next(finding for verdict in verdicts for finding in verdict.findings)
    assert (first.invariant, first.stage) == (invariant_name, Stage.ACCEPTED)
