"""The measure `search` says when each condition first appears among drawn cases, and predicates see what they name."""

import json
from dataclasses import replace

import pytest

from specverify.campaign.case_stream import stream
from specverify.plan import default_dtypes
from specverify.properties.strategies.conditions import CONDITIONS
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.draft_trees import Dispatch, Expansion
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.tree import RankTree, Tree
from tests.cases import SCRIPTED
from tests.measure import search_coverage
from tests.measure.__main__ import main
from tests.measure.pages import search_table
from tests.measure.search_coverage import measure
from tests.models import LLAMA

PAGES = KvLayout(kind="prefix", page_size=2)
SHAPE = RankTree((0, 0, 0, 1, 2), (0, 1, 0, 0, 0))
DRAFT = LanguageModel(LLAMA, SHAPE)
TOGETHER = (Action("add", (0,)), Action("add", (1,)), Action("step", (1, 0)))


def names(case: Case) -> set[str]:
    return {condition.name for condition in CONDITIONS if condition.is_met(case)}


def session(*actions: Action, prompt: tuple[int, ...] = (3, 1, 4, 1), **fields: object) -> Case:
    mate = Mate(prompt, DRAFT if "draft" in fields else Scripted(), stops=Stops(4))
    return replace(SCRIPTED, session=Session((mate,), actions), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "example", "counterexample"),
    [
        ("more than a page", replace(SCRIPTED, prompt=(3, 1, 1, 4), layout=PAGES), replace(SCRIPTED, layout=PAGES)),
        ("page in part", replace(SCRIPTED, prompt=(1, 4), layout=PAGES), replace(SCRIPTED, layout=PAGES)),
        ("page full", replace(SCRIPTED, layout=PAGES), replace(SCRIPTED, prompt=(1, 4), layout=PAGES)),
        ("batch", session(*TOGETHER), session(*TOGETHER[:2])),
        ("batch", session(*TOGETHER), session(TOGETHER[0], TOGETHER[2])),
        ("ragged trees", session(*TOGETHER), replace(session(*TOGETHER), draft=Scripted())),
        ("ragged prefixes", session(*TOGETHER), session(*TOGETHER, prompt=(2, 2, 2))),
        ("prefix hit", session(*TOGETHER, layout=PAGES), session(*TOGETHER, prompt=(1, 3, 4), layout=PAGES)),
        ("interruption", session(*TOGETHER, Action("evict", (1,))), session(*TOGETHER)),
        ("fork", session(TOGETHER[0], Action("fork", (0, 1))), session(*TOGETHER, Action("fork", (0, 1)))),
        ("model draft", replace(SCRIPTED, draft=DRAFT), SCRIPTED),
        ("model draft, two parents", replace(SCRIPTED, draft=DRAFT), replace(
            SCRIPTED, draft=LanguageModel(LLAMA, RankTree((0, 0, 1), (0, 0, 0))))),
        ("dynamic tree", replace(SCRIPTED, draft=LanguageModel(LLAMA, Expansion(2, 2, 4))),
         replace(SCRIPTED, draft=DRAFT)),
        ("table of trees", replace(SCRIPTED, draft=LanguageModel(LLAMA, Dispatch((1,), (SHAPE,)))), replace(
            SCRIPTED, draft=DRAFT)),
        ("16 bits", replace(SCRIPTED, dtype="bfloat16"), SCRIPTED),
        ("samples, without replacement, siblings",
         replace(SCRIPTED, draft=DRAFT, sampling=Sampling(1.0, draws="without-replacement")),
         replace(SCRIPTED, draft=DRAFT, sampling=Sampling(1.0))),
        ("more than 32 rows", replace(SCRIPTED, draft=Scripted((Tree((0,) * 33, (4, *(2,) * 32)),))), SCRIPTED),
        ("accepts nothing", replace(SCRIPTED, draft=Scripted((Tree((0, 0), (4, 0)),))),
         replace(SCRIPTED, draft=Scripted())),
    ],
)  # fmt: skip
def test_a_condition_holds_where_it_should_and_nowhere_else(name: str, example: Case, counterexample: Case) -> None:
    assert name in names(example)
    assert name not in names(counterexample)


def test_every_condition_has_a_name_of_its_own_and_a_sentence() -> None:
    assert len({condition.name for condition in CONDITIONS}) == len(CONDITIONS)
    assert all(condition.sentence.endswith(".") for condition in CONDITIONS)


@pytest.mark.slow
def test_ordinary_cases_meet_conditions_and_the_figures_are_theirs() -> None:
    figures = measure(12, 0, searches=2)
    assert {row["name"] for row in figures["rows"]} == {condition.name for condition in CONDITIONS}
    dtypes = default_dtypes("cpu-eager")
    drawn = [case for turn in range(2) for _, case in zip(range(12), stream(turn, dtypes), strict=False)]
    for row in figures["rows"]:
        (condition,) = [condition for condition in CONDITIONS if condition.name == row["name"]]
        flags = [condition.is_met(case) for case in drawn]
        assert row["share"] == sum(flags) / 24
        earliest = sorted(part.index(True) + 1 if any(part) else 99 for part in (flags[:12], flags[12:]))[0]
        assert row["first"] == (None if earliest == 99 else earliest)
    page = search_table(figures)
    assert max(map(len, page.splitlines())) <= 80


def test_the_command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_coverage, "SEARCHES", 1)
    monkeypatch.setattr(search_coverage, "measure", lambda cases, seed: measure(cases, seed, 1))
    with pytest.raises(SystemExit) as end:
        main(["search", "--cases", "6", "--json", "-"])
    out, err = capfd.readouterr()
    assert end.value.code == 0
    content = json.loads(out)
    assert (content["cases"], content["searches"]) == (6, 1)
    assert "search: 1 search of 6 cases" in err
