"""`acceptance.rate`: a draft that is degraded, and counts that are more than can be, where every token is right."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from specverify.adapt import Chains, Generated, blackbox
from specverify.backends.adapt.generated import WrongCount, block_of
from specverify.backends.admission.declared import check_declaration
from specverify.backends.admission.misshapen import Misshapen
from specverify.cli import main
from specverify.properties.invariants import ALL
from specverify.properties.strategies.draft.language_model import CHAIN
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Speculated, Stage
from specverify.setup.subjects import subject_of
from tests.inprocess import in_this_process
from tests.models import LLAMA
from tests.strangers import counted_boxes

NAME = "acceptance.rate"
RATE = tuple(
    invariant for invariant in ALL if invariant.name in (NAME, "lossless.distribution", "lossless.greedy-match")
)
GREEDY = Case(LLAMA, (3, 1, 4), LanguageModel(replace(LLAMA, noise=0.1), CHAIN), stops=Stops(24))
SAMPLED = replace(GREEDY, sampling=Sampling(0.5, seed=3))
ORACLE = Oracle()


def verdict_of(
    case: Case, choice: str = "best", rule: str = "rejection", fault: str = "", ends: dict[str, bool] | None = None
) -> Verdict:
    return judge(case, RATE, ORACLE, subject_of(counted_boxes.counted(choice, rule, fault, **(ends or {}))()))


@pytest.mark.parametrize(
    ("choice", "rule", "ends"),
    [
        ("best", "rejection", {}),
        ("best", "rejection", {"trims": True}),
        ("tempered", "rejection", {"first_drafted": False}),
        ("law", "match", {"first_drafted": False, "trims": True}),
    ],
)
def test_a_right_draft_accepts_what_the_laws_give(choice: str, rule: str, ends: dict[str, bool]) -> None:
    for case in (GREEDY, SAMPLED):
        verdict = verdict_of(case, choice, rule, ends=ends)
        assert verdict.agreed, verdict.first
        assert verdict.outcomes[NAME] == "checked"
        assert verdict.speculated is not None
        assert verdict.speculated.accepted > 0


SIDES = {
    "stale": "the draft is degraded at position 1",
    "forgetful": "the draft is degraded at position 2",
    "untempered": "the draft is degraded at position 1",
    "bonus counted": "more is accepted than can be",
}


@pytest.mark.parametrize(
    ("fault", "temperature"),
    [*product(("stale", "forgetful", "bonus counted"), (0.0, 1.0)), ("untempered", 4.0)],
)
def test_a_degraded_draft_is_found_by_its_counts_alone(fault: str, temperature: float) -> None:
    case = replace(GREEDY, prompt=(4, 1, 4), sampling=Sampling(temperature, seed=3) if temperature else Sampling())
    verdict = verdict_of(case, "tempered", fault=fault)
    (finding,) = verdict.findings
    assert (finding.invariant, finding.stage, finding.where["side"]) == (NAME, Stage.ACCEPTED, SIDES[fault])


def test_engines_that_say_nothing_of_their_chains_or_round_to_16_bits_are_not_asked() -> None:
    silent = blackbox(counted_boxes.speculating(Chains(3)), name="silent")
    assert judge(GREEDY, RATE, ORACLE, subject_of(silent())).outcomes[NAME] == "not_applicable"
    rounded = verdict_of(replace(GREEDY, dtype="bfloat16"))
    assert rounded.outcomes[NAME] == "not_applicable"
    assert verdict_of(GREEDY.plain_decode()).outcomes[NAME] == "not_applicable"


def test_an_engine_without_counts_is_unobserved() -> None:
    tell_nothing = counted_boxes.speculating(Chains(3))

    def generate(prompt_ids, max_new_tokens, model, draft_model, temperature, seed):  # type: ignore[no-untyped-def]
        return tell_nothing(prompt_ids, max_new_tokens, model, draft_model, temperature, seed).tokens

    quiet = blackbox(generate, name="quiet", chains=Chains(3))
    assert judge(GREEDY, RATE, ORACLE, subject_of(quiet())).outcomes[NAME] == "unobserved"


@pytest.mark.parametrize("by_position", [(3, 2), (1, 2, 2), (6, -1)])
def test_counts_by_position_fall_and_add_up(by_position: tuple[int, ...]) -> None:
    assert block_of(Generated([3], proposed=9, accepted=5, by_position=[3, 2])).speculated == Speculated(9, 5, (3, 2))
    if by_position != (3, 2):
        with pytest.raises(WrongCount, match="expected falling counts that add up to the 5 accepted"):
            block_of(Generated([3], proposed=9, accepted=5, by_position=by_position))


@pytest.mark.parametrize(
    ("chains", "line"),
    [(3, "declaration.chains: 3"), (Chains(0), "declaration.chains.tokens: 0"), (Chains(2, "any"), "chains.choice")],
)
def test_chains_that_are_none_are_refused_when_the_backend_opens(chains: object, line: str) -> None:
    factory = blackbox(counted_boxes.speculating(Chains(3)), chains=chains)  # type: ignore[arg-type]
    with pytest.raises(Misshapen, match=re.escape(line)):
        check_declaration(factory().declaration)


def test_the_page_says_that_the_draft_is_degraded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["diff", "--backend", "tests.strangers.counted_boxes:open_stale", "--cases", "30", "--jobs", "1"])
    page = " ".join(capfd.readouterr().out.split())
    assert ended.value.code == 1
    assert "On these texts the draft is degraded" in page, page
    assert NAME in page
