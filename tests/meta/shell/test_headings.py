"""Headings: a failure of a black box is told under the statement that says most about it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from specverify.adapt import Chains, Generated, Request, blackbox
from specverify.backends.base import Backend
from specverify.campaign.search import AlwaysBroken, Search
from specverify.cli import main
from specverify.plan import Plan
from specverify.properties.generations import GenerationEvidence, Neighbours
from specverify.properties.invariants import ALL
from specverify.properties.laws.sampled.links import Trial
from specverify.properties.refused_settings import SETTINGS
from specverify.properties.strategies.draft.language_model import CHAIN
from specverify.properties.tally import Failure
from specverify.properties.verdict.finding import ASKED_BY, COMPLETES, Verdict
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.tree import RankTree
from specverify.reports.hints import HINTS
from specverify.reports.vocabulary import account
from specverify.setup.subjects import subject_of
from tests.inprocess import in_this_process
from tests.models import LLAMA, OTHER_LLAMA
from tests.strangers.batching_engine import draw

GREEDY = Case(LLAMA, (3, 1, 4), Scripted(()), stops=Stops(6))
SAMPLED = replace(GREEDY, sampling=Sampling(1.0, seed=5), stops=Stops(12))


def text(prompt: list[int], count: int, model: Any, temperature: float = 0.0, coins: Any = None) -> list[int]:
    """A text from scratch, greedy at temperature 0."""
    tokens = list(prompt)
    for _ in range(count):
        row = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(draw(row, Request(prompt, count, temperature), coins))
    return tokens[len(prompt) :]


def search_of(
    function: Callable[..., Any], case: Case, names: tuple[str, ...] = (), shrink_s: float = 5.0, **facts: Any
) -> Search:
    """A search that has judged `case` by the invariants `names`, or by all, and has found a difference."""
    backend: Backend = blackbox(function, **facts)()
    chosen = tuple(invariant for invariant in ALL if not names or invariant.name in names)
    plan = Plan("box", dtypes=("float32",), shrink_s=shrink_s)
    search = Search(plan, ALL, Oracle(), subject_of(backend), lambda _: None, lambda: False)
    search.run_given([(case, chosen)])
    return search


def failure_of(function: Callable[..., Any], case: Case, **facts: Any) -> Failure:
    """The failure that a search tells of `case`, judged by all invariants."""
    failure = search_of(function, case, **facts).failure(search_nearest=False)
    assert failure is not None
    return failure


def without_numbers(prompt_ids: list[int], max_new_tokens: int, model: Any) -> tuple[list[int], list[float]]:
    return text(prompt_ids, max_new_tokens, model), [float("nan")] * max_new_tokens


def test_what_is_no_number_is_no_state_that_survives() -> None:
    verdict = judge(GREEDY, ALL, Oracle(), subject_of(blackbox(without_numbers)()))
    assert {finding.invariant for finding in verdict.findings} == {"lossless.logprobs"}
    assert verdict.outcomes["lossless.state-isolated"] == "checked"
    assert verdict.outcomes["lossless.deterministic"] == "checked"


def test_a_break_of_a_further_run_is_told_as_a_break() -> None:
    calls: list[int] = []

    def breaks_every_second_time(prompt_ids: list[int], max_new_tokens: int, model: Any) -> list[int]:
        calls.append(1)
        if len(calls) % 2 == 0:
            raise RuntimeError("a kernel failed")
        return text(prompt_ids, max_new_tokens, model)

    verdict = judge(GREEDY, ALL, Oracle(), subject_of(blackbox(breaks_every_second_time)()))
    assert verdict.first is not None
    assert verdict.first.invariant == COMPLETES
    assert verdict.outcomes[COMPLETES] == "failed"
    assert verdict.first.where[ASKED_BY] == "lossless.state-isolated"
    assert account(verdict.first) == (
        "A run that lossless.state-isolated asks for did not finish: RuntimeError: a kernel failed (a stage that is "
        "not known, step 1)."
    )
    alone = tuple(invariant for invariant in ALL if invariant.name == "lossless.state-isolated")
    calls.clear()
    first = judge(GREEDY, alone, Oracle(), subject_of(blackbox(breaks_every_second_time)())).first
    assert first is not None
    assert first.invariant == "lossless.state-isolated", "of the invariants that were asked for, no other can tell it"


def test_a_further_run_that_breaks_by_itself_becomes_the_case() -> None:
    def wants_a_draft(prompt_ids: list[int], max_new_tokens: int, model: Any, draft_model: Any) -> list[int]:
        if draft_model is None:
            raise RuntimeError("no draft")
        return text(prompt_ids, max_new_tokens, model)

    draft = LanguageModel(OTHER_LLAMA, RankTree((0, 0), (0, 0)))
    failure = failure_of(wants_a_draft, replace(GREEDY, draft=draft))
    assert failure.finding.invariant == COMPLETES
    assert ASKED_BY not in failure.finding.where
    assert failure.verdict.case.draft.model is None
    assert "RuntimeError: no draft" in str(failure.finding.observed)


def blamed_invariants(scale: float) -> set[str]:
    """The invariants that a search blames where no seed decides, and the temperature is `scale` times too high."""
    coins = torch.Generator()

    def seedless(prompt_ids: list[int], max_new_tokens: int, model: Any, temperature: float, seed: int) -> list[int]:
        return text(prompt_ids, max_new_tokens, model, scale * temperature, coins)

    search = search_of(seedless, SAMPLED, ("lossless.deterministic",))
    assert search.blamed is not None
    return {invariant for invariant, _ in search.blamed}


def test_a_wrong_law_is_told_before_a_seed_that_decides_nothing() -> None:
    assert "lossless.distribution" in blamed_invariants(4.0)


def test_a_wrong_law_is_told_before_the_counts_that_it_moves() -> None:
    coins = torch.Generator()

    def skewed(
        prompt_ids: list[int], max_new_tokens: int, model: Any, draft_model: Any, temperature: float, seed: int
    ) -> Generated:
        tokens = text(prompt_ids, max_new_tokens, model, 4.0 * temperature, coins)
        return Generated(tokens, proposed=3 * len(tokens), accepted=0)

    case = replace(SAMPLED, draft=LanguageModel(LLAMA, CHAIN), stops=Stops(16))
    search = search_of(skewed, case, ("acceptance.rate",), chains=Chains(3))
    assert search.blamed is not None
    assert "lossless.distribution" in {invariant for invariant, _ in search.blamed}


@pytest.mark.slow
def test_a_right_law_leaves_the_seed_that_decides_nothing() -> None:
    assert blamed_invariants(1.0) == {"lossless.deterministic"}


def test_a_law_that_condemns_by_itself_is_told_before_the_neighbour() -> None:
    evidence = GenerationEvidence(neighbours=Neighbours())
    law = torch.full((4,), 0.25).numpy()
    assert evidence.neighbours is not None
    for _ in range(60):
        evidence.links.add(Trial(law, replacement=0))
        evidence.neighbours.add(0.01, agrees=True)
    assert evidence.neighbours.log_e > evidence.links.log_e > 30
    assert evidence.worst == "token"
    assert GenerationEvidence(neighbours=evidence.neighbours).worst == "neighbour"


REFUSALS: dict[str, tuple[Callable[[Any], bool], str, Case]] = {
    "refused-temperature": (
        lambda arguments: arguments["temperature"] > 2, "temperature must be in [0, 2]",
        replace(SAMPLED, sampling=Sampling(8.0)),
    ),
    "refused-top-p": (
        lambda arguments: arguments["top_p"] < 1, "top_p is not supported here",
        replace(SAMPLED, sampling=Sampling(1.0, top_p=0.5)),
    ),
    "refused-length": (
        lambda arguments: len(arguments["prompt_ids"]) + arguments["max_new_tokens"] > 8, "maximum context length is 8",
        replace(GREEDY, stops=Stops(12)),
    ),
    "refused-stops": (lambda arguments: bool(arguments["stops"]), "no stop ids", replace(GREEDY, stops=Stops(6, (2,)))),
}  # fmt: skip


@pytest.mark.parametrize("hint", REFUSALS)
def test_a_refused_setting_names_the_field_of_the_declaration(hint: str) -> None:
    refuses, message, case = REFUSALS[hint]

    def generate(
        prompt_ids: list[int], max_new_tokens: int, model: Any, temperature: float, top_p: float, stops: Any, seed: int
    ) -> list[int]:  # fmt: skip
        if refuses(locals()):
            raise ValueError(message)
        return text(prompt_ids, max_new_tokens, model, temperature, torch.Generator().manual_seed(seed))

    failure = failure_of(generate, case)
    assert failure.finding.invariant == COMPLETES
    assert failure.mistake == hint


def test_a_break_that_names_no_setting_has_no_such_hint() -> None:
    def generate(prompt_ids: list[int], max_new_tokens: int, model: Any, temperature: float) -> list[int]:
        raise RuntimeError("temperature of the die is 90 C")

    assert failure_of(generate, replace(SAMPLED, sampling=Sampling(8.0))).mistake is None
    assert {setting.hint for setting in SETTINGS} <= set(HINTS)


def as_words(prompt_ids: list[int], max_new_tokens: int) -> str:
    return "not token ids"


def as_words_once(prompt_ids: list[int], max_new_tokens: int, model: Any) -> Any:
    return "not token ids" if prompt_ids == [3, 1, 4] else text(prompt_ids, max_new_tokens, model)


open_words = blackbox(as_words)


def test_a_contract_that_is_broken_on_every_case_ends_at_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["diff", "--backend", f"{__name__}:open_words", "--cases", "20", "--jobs", "1"])
    assert ended.value.code == 2
    printed = capfd.readouterr()
    (line,) = [line for line in printed.err.splitlines() if line.startswith("specverify:")]
    assert "generate returned str, expected the generated token ids, such as [3, 1]" in line
    assert line.endswith("on every case")
    assert printed.out == ""


def test_a_contract_that_is_broken_on_some_cases_is_a_finding() -> None:
    failure = failure_of(as_words_once, GREEDY)
    assert failure.finding.invariant == COMPLETES
    with pytest.raises(AlwaysBroken, match="generate returned str"):
        failure_of(as_words, GREEDY)


def hot_with_few_accepted(
    prompt_ids: list[int], max_new_tokens: int, model: Any, draft_model: Any, temperature: float = 0.0, seed: int = 0
) -> Generated:
    """A text of three times the temperature, with counts in which no drafted token was accepted."""
    coins = torch.Generator().manual_seed(seed)
    tokens = text(prompt_ids, max_new_tokens, model, 3 * temperature, coins)
    drafted = 0 if draft_model is None else DEPTH * len(tokens)
    return Generated(tokens, None, drafted, 0, [0] * DEPTH)


DEPTH = 2
"""Tokens of a drafted chain."""


def test_a_wrong_law_heads_the_page_where_accepted_counts_are_wrong_too() -> None:
    shape = RankTree((0, 0, 1), (0, 0, 0))
    case = replace(SAMPLED, draft=LanguageModel(replace(LLAMA, noise=0.05), shape))
    search = search_of(hot_with_few_accepted, case, ("acceptance.rate",), shrink_s=0.0, chains=Chains(DEPTH))
    assert search.blamed is not None
    failure = search.failure(search_nearest=False)
    assert failure is not None
    assert failure.finding.invariant == "lossless.distribution"
    assert "acceptance.rate" in {finding.invariant for finding in failure.verdict.findings}


def test_the_law_has_its_first_turn_in_the_first_sampled_case_of_a_black_box() -> None:
    def drawn(
        prompt_ids: list[int], max_new_tokens: int, model: Any, temperature: float = 0.0, seed: int = 0
    ) -> list[int]:
        return text(prompt_ids, max_new_tokens, model, temperature, torch.Generator().manual_seed(seed))

    for number in (1, 2):
        verdicts: list[Verdict] = []

        def note(verdict: Verdict, verdicts: list[Verdict] = verdicts) -> None:
            verdicts.append(verdict)

        plan = Plan("box", dtypes=("float32",), cases=8, seed=number)
        Search(plan, ALL, Oracle(), subject_of(blackbox(drawn)()), note, lambda: False).run()
        sampled = [verdict for verdict in verdicts if not verdict.case.sampling.greedy]
        assert sampled[0].outcomes["lossless.distribution"] == "checked"
