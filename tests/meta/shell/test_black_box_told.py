"""Black boxes that tell more than tokens: log-probabilities, counts, the promise of a seed, streams."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specverify.adapt import Generated, blackbox
from specverify.backends.adapt.generated import Block, block_of, blocks_of
from specverify.campaign.search import ROUND, round_seed
from specverify.properties.invariants import ALL
from specverify.properties.laws.draw_by_draw import logit_bound, points
from specverify.properties.speculation import Speculation
from specverify.properties.strategies import cases
from specverify.properties.strategies.draft.language_model import CHAIN
from specverify.properties.strategies.settings import explore
from specverify.properties.tolerance.closeness import noise
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Speculated, Stage
from specverify.reports.acceptance import SAME_RUN
from specverify.reports.counts import NEEDS, best_stages
from specverify.reports.gate.comparison import compare_results
from specverify.setup.subjects import subject_of
from tests.meta.shell.test_black_box import diff
from tests.models import LLAMA
from tests.strangers import black_boxes, told_boxes

CASE = Case(LLAMA, (3, 1, 4), LanguageModel(replace(LLAMA, noise=0.3), CHAIN), stops=Stops(6))
DRAWN = replace(CASE, sampling=Sampling(2.5, seed=3))
ORACLE = Oracle()


def verdict_of(factory: Any, case: Case = CASE) -> Verdict:
    return judge(case, ALL, ORACLE, subject_of(factory()))


def failed_invariants(verdict: Verdict) -> set[str]:
    return {finding.invariant for finding in verdict.findings}


@pytest.mark.parametrize(
    ("returned", "block"),
    [
        ([3, 1], Block((3, 1))),
        ((3, 1), Block((3, 1))),
        (([3, 1], [-0.5, -2]), Block((3, 1), (-0.5, -2.0))),
        ((torch.tensor([3, 1]), np.array([-0.5, -2.0])), Block((3, 1), (-0.5, -2.0))),
        (Generated([3], proposed=4, accepted=2), Block((3,), None, Speculated(4, 2))),
    ],
)
def test_the_forms_of_a_result(returned: Any, block: Block) -> None:
    assert block_of(returned) == block


@pytest.mark.parametrize(
    ("returned", "line"),
    [
        (([3, 1], [-0.5]), "generate returned 1 log-probabilities for 2 tokens, expected one for each"),
        (([3], ["x"]), "generate returned log-probability 'x' at place 0, expected a number"),
        (Generated([3], -0.5), "generate returned log-probabilities as float, expected a list of numbers"),
        (Generated([3], proposed=4), "generate returned accepted=None, expected both counts: proposed and accepted"),
        (Generated([3], proposed=1, accepted=2), "generate returned accepted=2, more than the 1 proposed"),
        (Generated(None), "generate returned NoneType, expected the generated token ids, such as [3, 1]"),
    ],
)
def test_a_result_that_makes_no_sense_is_refused_in_one_line(returned: Any, line: str) -> None:
    with pytest.raises((TypeError, ValueError)) as refused:
        block_of(returned)
    assert str(refused.value) == line


def test_a_stream_is_closed_after_the_blocks_that_were_asked_for() -> None:
    ended: list[str] = []

    def stream() -> Iterator[Any]:
        try:
            yield 3
            yield Generated([1, 4], [-1.0, -2.0], 2, 1)
            yield from ([], [5])
        finally:
            ended.append("closed")

    assert list(blocks_of(stream(), 2)) == [Block((3,)), Block((1, 4), (-1.0, -2.0), Speculated(2, 1))]
    assert ended == ["closed"]
    assert [block.tokens for block in blocks_of(stream())] == [(3,), (1, 4), (), (5,)]


def test_log_probabilities_of_the_draft_are_found() -> None:
    right, wrong = verdict_of(told_boxes.telling(of_draft=False)), verdict_of(told_boxes.telling(of_draft=True))
    names = {"lossless.logprobs", "lossless.logprobs-draft-independent"}
    assert (failed_invariants(right), failed_invariants(wrong)) == (set(), names)
    assert {right.outcomes[name] for name in names} == {"checked"}
    assert {verdict_of(black_boxes.right).outcomes[name] for name in names} == {"unobserved"}


@pytest.mark.parametrize(("declared", "wrong"), [("processed", False), ("raw", True)])
def test_log_probabilities_are_judged_by_the_law_that_is_declared(declared: str, wrong: bool) -> None:
    """The function returns those of the law at its temperature."""

    def generate(prompt_ids: list[int], max_new_tokens: int, model: Any, temperature: float, seed: int) -> Any:
        coins, tokens, logprobs = torch.Generator().manual_seed(seed), list(prompt_ids), []
        for _ in range(max_new_tokens):
            law = black_boxes.law(model, tokens, temperature)
            tokens.append(int(torch.multinomial(law, 1, generator=coins)))
            logprobs.append(float(law[tokens[-1]].log()))
        return tokens[len(prompt_ids) :], logprobs

    case = replace(DRAWN, draft=CASE.plain_decode().draft)
    verdict = verdict_of(blackbox(generate, logprobs=declared), case)
    assert failed_invariants(verdict) == ({"lossless.logprobs"} if wrong else set())
    assert verdict.compared["lossless.logprobs"] == 6


@pytest.mark.slow
def test_the_promise_of_a_seed_is_kept_token_by_token_or_found_broken() -> None:
    name = "lossless.same-seed"
    verdict = verdict_of(told_boxes.coupled(shifted=False), DRAWN)
    assert (failed_invariants(verdict), verdict.outcomes[name], verdict.compared[name]) == (set(), "checked", 6)
    cases = [replace(DRAWN, sampling=Sampling(2.5, seed=seed)) for seed in range(4)]
    assert any(name in failed_invariants(verdict_of(told_boxes.coupled(shifted=True), case)) for case in cases)
    silent = [verdict_of(told_boxes.coupled(shifted=True, promised=False), case).outcomes[name] for case in cases]
    assert silent == ["not_applicable"] * 4
    rounded = verdict_of(told_boxes.coupled(shifted=True), replace(DRAWN, dtype="bfloat16"))
    assert rounded.outcomes[name] == "not_applicable"


def test_a_stream_that_is_closed_early_gave_the_beginning_and_leaves_nothing_behind() -> None:
    name, case = "lossless.interrupted", CASE.plain_decode()
    right, wrong = (
        verdict_of(told_boxes.streaming(keeps_state=False), case),
        verdict_of(told_boxes.streaming(keeps_state=True), case),
    )
    assert (right.outcomes[name], failed_invariants(right)) == ("checked", set())
    assert {(finding.invariant, finding.where.get("side")) for finding in wrong.findings} >= {(name, "the next run")}
    assert verdict_of(told_boxes.open_short, case).outcomes[name] == "not_applicable", "it does not stream"


def test_a_token_outside_top_k_is_a_finding_by_itself() -> None:
    case = replace(DRAWN, draft=CASE.plain_decode().draft, sampling=Sampling(1.0, top_k=3))
    inside, outside = verdict_of(told_boxes.top(0), case), verdict_of(told_boxes.top(1), case)
    assert (inside.outcomes["lossless.support"], "lossless.support" in failed_invariants(inside)) == ("checked", False)
    assert "lossless.support" in failed_invariants(outside)


def test_a_near_tie_at_the_last_place_is_inside_or_outside() -> None:
    """In bfloat16 some place has a next token within the tolerance of the last one that top-k keeps."""
    subject, ties = subject_of(told_boxes.top(1)()), 0
    for token in range(LLAMA.vocab_size):
        for k in range(1, LLAMA.vocab_size - 1):
            case = Case(LLAMA, (3, token), sampling=Sampling(1.0, top_k=k), stops=Stops(1), dtype="bfloat16")
            bound = logit_bound(case, noise(case, ORACLE, subject))
            near = (points(case, ORACLE, subject(case), bound)[0].high > 0).sum() > k + 1
            if near:
                ties += 1
                verdict = judge(
                    case, tuple(invariant for invariant in ALL if invariant.name == "lossless.support"), ORACLE, subject
                )
                assert verdict.agreed
        if ties > 2:
            return
    assert ties


def test_an_output_that_ends_too_soon_is_found() -> None:
    assert "lossless.stops" in failed_invariants(verdict_of(told_boxes.open_short, CASE.plain_decode()))


@pytest.mark.slow
def test_drafts_of_a_black_box_are_accepted_often_but_not_always() -> None:
    box, some = black_boxes.open_assisted(), list[Case]()
    for number in range(96 // ROUND):
        drawn = cases(box.declaration.dtypes, within=box.declaration)
        explore(round_seed(3, number), ROUND, drawn, lambda case: some.append(case))
    speculations = [box.run(case).speculated for case in some]
    proposed, accepted = (
        sum(getattr(speculation, name) for speculation in speculations if speculation)
        for name in ("proposed", "accepted")
    )
    assert 0.3 <= accepted / proposed <= 0.8
    assert all(case.draft.shapes == (CHAIN,) and not case.draft.vocabulary for case in some)


@pytest.mark.slow
def test_a_run_without_an_accepted_token_is_no_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.meta.shell.test_black_box.BOXES", "told_boxes")
    code, result = diff(monkeypatch, tmp_path, "never", 2, "--cases", "12")
    line = f"none of {result['speculation']['proposed']} drafted tokens was accepted in 12 cases"
    assert (code, result["outcome"]) == (3, "unjudged")
    assert line in result["speculation"]["untested"]
    assert "error         speculation was not tested" in capfd.readouterr().out
    never = result
    code, result = diff(monkeypatch, tmp_path, "often", 2, "--cases", "12")
    assert (code, result["speculation"]["untested"]) == (0, None)
    page = " ".join(capfd.readouterr().out.split())
    assert f"{result['speculation']['share']:.0%} of" in page
    assert "on text alone" not in page
    assert "12 of 12 cases agree" in page
    # The counts of both runs stand by case, so that two engines that tell nothing else can be compared.
    assert all(counts["accepted"] == [0] for counts in never["acceptance"].values())
    assert sum(counts["offered"] for counts in result["acceptance"].values()) == result["speculation"]["proposed"]
    assert SAME_RUN in compare_results(never, result, 0.05).acceptance[0]
    assert compare_results(result, result, 0.05).acceptance == []


@pytest.mark.slow
def test_the_page_says_in_a_few_lines_what_further_stages_would_buy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, result = diff(monkeypatch, tmp_path, "right", 2, "--cases", "12", "--verbose")
    page = " ".join(capfd.readouterr().out.split())
    unseen = [needs for name, needs in NEEDS.items() if not needs <= {Stage.EMITTED}]
    assert f"{len(unseen)} invariants unobserved: chain reveals emitted" in page
    steps = best_stages(unseen, frozenset({Stage.EMITTED}))
    assert sum(count for _, count in steps) == len(unseen)
    assert f"revealing {steps[0][0].word} adds {steps[0][1]}, then {steps[1][0].word} adds" in page
    assert "structure.parent-range" not in page
    assert result["invariants"]["structure.parent-range"]["unobserved"] == 12


def test_counts_of_speculation_say_what_was_not_tested() -> None:
    assert Speculation(4, 0, 0, 0).why_untested() is None, "nothing is told"
    assert "none of 9 drafted tokens" in str(Speculation(4, 4, 9, 0).why_untested())
    assert "no token was drafted" in str(Speculation(4, 4, 0, 0).why_untested())
    assert Speculation(4, 4, 9, 1).why_untested() is None
