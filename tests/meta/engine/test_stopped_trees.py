"""Trees whose paths end by the draft's own confidence: against a loop over the draft's laws, and in every layout."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specverify.backends.compositions import open_cpu
from specverify.backends.registry import open_backend
from specverify.properties.invariants import ALL
from specverify.properties.invariants.draft.stopped_trees import breaches
from specverify.properties.shrinking.cases import nearer
from specverify.properties.strategies.draft.head import LAYERS
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json, case_to_json
from specverify.reference.draft import Draft, LanguageModel, Scripted
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.medusa import Medusa
from specverify.reference.draft.mtp import Mtp
from specverify.reference.draft_trees import Stopped, named_tree
from specverify.reference.layout import KINDS, KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.tree import RankTree, Tree
from specverify.setup.subjects import subject_of
from tests.corruption import ORACLE
from tests.models import LLAMA

SMALL = Seeded(LLAMA.architecture, 7)
WIDE = named_tree("D3-BF2")
NORMED = HiddenStates(place="normed", shift=1)
ENDS = [(when, cumulated) for when in ("before", "after") for cumulated in (False, True)]
STOP = Stopped(WIDE, 0.25)
CASE = Case(LLAMA, (3, 1, 4, 1, 5), LanguageModel(SMALL, STOP), stops=Stops(8), dtype="float64")
KINDS_OF_DRAFT: tuple[Draft, ...] = (
    CASE.draft,
    Eagle1(STOP, NORMED, LAYERS[0], seed=1),
    Eagle3(Stopped(WIDE, 0.15, "before"), HiddenStates((-1, 0), shift=1), LAYERS[1], (2, 3, 5, 8, 9)),
    Medusa(Stopped(WIDE, 0.2, "after", True), HiddenStates(place="normed"), 3),
    Mtp(Stopped(WIDE, 0.2, "before", True), NORMED, LAYERS[0], 2),
)


def law_behind(text: tuple[int, ...]) -> np.ndarray:
    """The law of the draft model behind `text`, by the oracle alone."""
    scored = ORACLE(Case(SMALL, text, Scripted(), stops=Stops(1), dtype="float64", steps=1)).steps[0].scored
    assert scored is not None
    row = np.exp(scored.logits[0] - scored.logits[0].max())
    law: np.ndarray = row / row.sum()
    return law


def paths_by_loop(text: tuple[int, ...], stop: Stopped) -> set[tuple[int, ...]]:
    """The paths of tokens of the tree that `stop` leaves behind `text`: a node and then its children, one by one."""
    paths: set[tuple[int, ...]] = set()

    def visit(node: int, path: tuple[int, ...], own: float, above: float) -> None:
        paths.add(path)
        law = law_behind(text + path)
        likelihood = own if stop.when == "after" else float(law.max())
        product = likelihood * (above if stop.when == "after" else above * own) if stop.cumulated else likelihood
        if (node or stop.when == "before") and product < stop.stop_below:
            return
        for child in stop.tree.children[node]:
            token = int(np.argsort(-law, kind="stable")[stop.tree.rank[child]])
            visit(child, (*path, token), float(law[token]), above * own)

    visit(0, (), 1.0, 1.0)
    return paths


@pytest.mark.parametrize(("when", "cumulated"), ENDS)
def test_engine_and_oracle_end_where_a_loop_over_the_laws_does(when: str, cumulated: bool) -> None:
    sizes = set()
    for bound in (0.1, 0.25, 0.4):
        stop = Stopped(WIDE, bound, when, cumulated)
        case = replace(CASE, draft=LanguageModel(SMALL, stop))
        runs = (open_backend("cpu-eager").run(case), ORACLE(case))
        for steps in zip(*(run.steps for run in runs), strict=True):
            for step in steps:
                assert step.drafted is not None
                tree = step.drafted.tree
                expected = paths_by_loop((*step.context, tree.token[0]), stop)
                assert {tree.tokens_to(node)[1:] for node in range(len(tree))} == expected
                assert len(tree) == len(expected)
                sizes.add(len(tree))
    assert len(sizes) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_keeps_the_rows_of_paths_that_ended(kind: str) -> None:
    traits = KINDS[kind]
    fields: dict[str, Any] = {"page_size": 2} if traits.pages else {}
    case = replace(CASE, layout=KvLayout(kind=kind, commit=traits.commits[0], **fields))
    verdict = judge(case, ALL, ORACLE, subject_of(open_cpu()))
    assert verdict.agreed, verdict.first
    assert verdict.outcomes["draft.stops"] == "checked"


@pytest.mark.parametrize("draft", KINDS_OF_DRAFT, ids=lambda draft: draft.TAG)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, draws="with-replacement", seed=3)], ids=["", "drawn"])
def test_sessions_of_drafts_that_end_early_are_right(draft: Draft, sampling: Sampling) -> None:
    mate = Mate((2, 7), LanguageModel(LLAMA, Stopped(named_tree("D4"), 0.3, "before")), Sampling(), Stops(6))
    words = ("add 0", "add 1", "step 0 1", "evict 0", "step 1", "restore 0", "step 1 0")
    actions = tuple(Action(kind, tuple(map(int, numbers))) for kind, *numbers in map(str.split, words))
    case = replace(CASE, draft=draft, sampling=sampling, session=Session((mate,), actions))
    verdict = judge(case, ALL, ORACLE, subject_of(open_cpu()))
    assert verdict.agreed, verdict.first
    assert verdict.outcomes["draft.stops"] == "checked"


def test_a_tree_ends_within_the_noise_either_way_and_nowhere_else() -> None:
    stop = Stopped(named_tree("D2"), 0.5)
    law = np.array([0.5, 0.3, 0.2])
    chain, single = Tree((0, 0, 1), (9, 0, 1)), Tree((0, 0), (9, 0))
    for tree in (chain, single):
        ids = (0, *tree.token[1:])
        found = [*breaches(stop, tree, ids, np.log(np.tile(law, (len(tree), 1))), 2)]
        assert [abs(breach.away) < 1e-12 for breach in found] == [True]
    surer = replace(stop, stop_below=0.6)
    rows = np.log(np.tile(law, (3, 1)))
    (too_long,) = breaches(surer, chain, (0, 0, 1), rows, 2)
    (right,) = breaches(surer, single, (0, 0), rows[:2], 2)
    assert too_long.away > 0.1
    assert right.away < -0.1


def test_a_tree_with_part_of_its_siblings_is_no_part_of_the_widest() -> None:
    stop = Stopped(WIDE, 0.5)
    assert stop.rows_in_tree(Tree((0, 0, 0), (0, 1, 2)).children) is not None
    assert stop.rows_in_tree(Tree((0, 0), (0, 1)).children) is None
    assert stop.rows_in_tree(Tree((0, 0, 0, 2, 2), (0, 1, 2, 3, 4)).children) == (0, 1, 2, 5, 6)


def test_its_words_are_kept_in_a_file_and_shrink_to_a_static_tree() -> None:
    case = replace(CASE, draft=LanguageModel(SMALL, Stopped(RankTree((0, 0), (0, 0)), 0.25, "before", True)))
    assert case_from_json(case_to_json(case)) == case
    drafts = [simpler.draft for simpler in nearer(case)]
    assert any(draft.tree_kind == "static" and draft.model == SMALL for draft in drafts)
    assert any(draft.stopped is not None and not draft.stopped.cumulated for draft in drafts)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((1.0, "after"), "stop_below: 1.0 does not lie between 0 and 1"),
        ((0.0, "after"), "stop_below: 0.0 does not lie between 0 and 1"),
        ((0.4, "drop"), "when: 'drop' is none of before, after, head"),
    ],
)
def test_what_is_no_bound_is_refused(fields: tuple[float, str], words: str) -> None:
    with pytest.raises(Malformed, match=words):
        Stopped(WIDE, *fields)
