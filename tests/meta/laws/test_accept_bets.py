"""Bets on acceptance: fair under every law in the band, and quick to see a coin that drafts a token and accepts it."""

import numpy as np
import pytest

from specverify.backends.compositions import open_cpu
from specverify.properties.generations import Effort, GenerationEvidence, generation_evidence
from specverify.properties.laws.sampled.draft_faults import ACCEPT, FAULTS, overall
from specverify.properties.laws.sampled.gate import ALPHA_RUN
from specverify.properties.laws.sampled.links import Links, Trial
from specverify.properties.strategies.models import GALLERY
from specverify.properties.streams import sights, streams_of
from specverify.properties.tally import Tally, excess_evidence
from specverify.properties.verdict.finding import Evidence
from specverify.properties.verdict.subject import Subject
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel
from specverify.reference.rules import Rule
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.tree import RankTree
from specverify.reports.pages.sampling import power_rows
from specverify.setup.subjects import subject_of
from tests.corruption import ORACLE, subject_with_fault
from tests.models import LLAMA

MODELS = LLAMA, Seeded(GALLERY[1], 5)
CASE = Case(
    MODELS[0],
    (3, 1, 4),
    LanguageModel(MODELS[1], RankTree((0, 0, 1), (0, 0, 0))),
    sampling=Sampling(2.5, rule=Rule("multi-round"), draws="with-replacement"),
    stops=Stops(8),
)


def test_the_chance_of_acceptance_is_the_mass_that_both_laws_share() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.1, 0.6])
    assert overall(p, q, p, p).p[0] == pytest.approx(0.3 + 0.1 + 0.2)
    assert overall(p, p, p, p).p[0] == pytest.approx(1.0)
    sure = np.array([0.0, 0.0, 1.0])
    assert overall(p, sure, p, p).p[0] == pytest.approx(0.2), "a token proposed for sure, such as an n-gram's"


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_no_bet_on_acceptance_pays_more_than_one_on_average(noise: float) -> None:
    rng = np.random.default_rng(3)
    for _ in range(8):
        p, q = rng.dirichlet(np.ones(4)), rng.dirichlet(np.ones(4))
        engine = p * np.exp(noise * rng.choice([-1.0, 1.0], 4))
        engine /= engine.sum()
        mean = np.zeros(len(FAULTS))
        for token in range(4):
            chance = min(1.0, engine[token] / q[token])
            for accepted, weight in ((True, chance), (False, 1 - chance)):
                links = Links({ACCEPT: len(FAULTS)})
                links.add(Trial(p, q, token, accepted, noise=noise))
                mean += q[token] * weight * np.exp(links.groups[0].log_es)
        assert (mean <= 1 + 1e-9).all()
        if not noise:
            assert mean == pytest.approx(np.ones(len(FAULTS)))


def test_trials_without_a_draw_of_the_draft_place_no_bet() -> None:
    p, links = np.array([0.5, 0.5]), Links({ACCEPT: len(FAULTS)})
    links.add(Trial(p, None, 0, True))
    links.add(Trial(p, replacement=1))
    links.add(Trial(p, np.array([1.0, 0.0]), 1, True))
    assert links.groups == ()


def heard(subject: Subject) -> GenerationEvidence:
    return generation_evidence(CASE, ORACLE, subject, Effort(120, 8))


def evidence(generation: GenerationEvidence) -> Evidence:
    return Evidence("lossless.distribution", generation.log_e, generation.draws, groups=generation.links.groups)


def test_the_drafts_coin_that_accepts_is_red_in_one_case_by_these_bets_alone() -> None:
    wrong = heard(subject_with_fault("acceptance-by-the-drafts-coin"))
    assert wrong.log_e < np.log(100), "links whose bets do not know the coin"
    (stream,) = streams_of([evidence(wrong)]).all
    assert (stream.name, stream.log_e > 20) == (f"lossless.distribution {ACCEPT}", True)
    assert excess_evidence(Tally("x", evidence=[evidence(wrong)])) is not None


def test_a_right_engine_is_quiet_and_its_page_names_what_would_have_shown() -> None:
    right = heard(subject_of(open_cpu()))
    (stream,) = streams_of([evidence(right)]).all
    assert stream.log_e < np.log(100)
    assert stream.group is not None
    sights_by_fault = {sight.fault: sight for sight in sights(stream.group, -np.log(ALPHA_RUN))}
    assert set(sights_by_fault) == set(FAULTS)
    assert sights_by_fault["a coin that drafts and accepts, by order of ids"].shown
    lines = " / ".join(text for _, text in power_rows(Tally("x", evidence=[evidence(right)] * 4)))
    assert f"for lossless.distribution {ACCEPT}, which would have shown with probability .99: " in lines
