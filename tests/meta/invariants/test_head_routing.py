"""Rule T for the experts of a draft head: a tie explains the move that it makes, and nothing beyond."""

from dataclasses import replace

import numpy as np
import pytest

from specverify.properties.invariants.draft.scores import reading_scores, scores_finding
from specverify.properties.strategies.draft.head import LAYERS
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict import head_routing
from specverify.properties.verdict.finding import Finding
from specverify.properties.verdict.head_routing import explain_by_head, tied_rows
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.trace import Array
from specverify.reference.tree import RankTree, Tree

NORMED = HiddenStates(place="normed", shift=1)
HEAD = Eagle1(RankTree((0, 0, 1), (0, 0, 0)), NORMED, LAYERS[1], layers=2, experts=4, seed=2)
CONTEXT = tuple((7 * number + 1) % 5 for number in range(24))
TREE = Tree((0, 0), (3, 1))
NODE = 1
ORACLE = Oracle()


def case(dtype: str, head: Eagle1 = HEAD) -> Case:
    return Case(Seeded(GALLERY[0], 1), (*CONTEXT, 3), head, stops=Stops(2), dtype=dtype)


def finding(head_case: Case, limit: float, distance: float) -> Finding:
    """A finding that scores at NODE lie `distance` off, where `limit` is allowed."""
    vocabulary = head_case.model.vocab_size
    wrong: Array = np.full(vocabulary, distance)
    plain_finding = scores_finding("draft.fidelity", head_case, 0, NODE, np.zeros(vocabulary), wrong, distance / limit)
    return reading_scores(plain_finding, head_case, CONTEXT, TREE, NODE, limit)


def largest_move(head_case: Case) -> float:
    """The largest rms move of the scores when one tie goes the other way."""
    reads = finding(head_case, 1.0, 2.0).reads
    assert reads is not None
    tokens, path = (*CONTEXT, TREE.token[0]), TREE.token[1:]
    base = ORACLE.head_run(head_case, tokens, path)
    assert base is not None
    moves = []
    for _, number in tied_rows(ORACLE, reads, base):
        layer, row, router = base.routers[number]
        for _, experts in router.exchanges(0, np.inf):
            moved = ORACLE.head_run(head_case, tokens, path, {(layer, row): tuple(experts.tolist())})
            assert moved is not None
            moves.append(float(np.sqrt(np.mean(np.square(moved.scores - base.scores)))))
    return max(moves)


def test_the_scores_of_a_run_are_those_of_the_oracle() -> None:
    head_case = case("float64")
    run = ORACLE.head_run(head_case, (*CONTEXT, TREE.token[0]), TREE.token[1:])
    assert run is not None
    fixed = head_case.draft.with_fixed_tree(TREE)
    assert fixed is not None
    drafted = ORACLE(replace(head_case, draft=fixed, steps=1)).steps[0].drafted
    assert drafted is not None
    assert drafted.logits is not None
    assert len(run.routers) == 2 * (len(CONTEXT) + 1)
    assert {layer for layer, _, _ in run.routers} == {0, 1}
    root_run = ORACLE.head_run(head_case, (*CONTEXT, TREE.token[0]), ())
    assert root_run is not None
    np.testing.assert_allclose(root_run.scores, drafted.logits[0], atol=1e-12)


def test_a_tie_explains_its_own_move_and_no_more() -> None:
    head_case = case("bfloat16")
    move = largest_move(head_case)
    assert move > 0
    tie = explain_by_head(finding(head_case, 1e-3, 1e-3 + 0.9 * move), ORACLE)
    assert tie is not None
    assert tie.granted >= tie.needed > 0
    assert explain_by_head(finding(head_case, 1e-3, 1e6), ORACLE) is None
    assert explain_by_head(finding(head_case, 1e-3, np.inf), ORACLE) is None


def test_in_the_last_layer_the_rows_from_the_root_on_count(monkeypatch: pytest.MonkeyPatch) -> None:
    head_case, path = case("float64"), (1, 2, 0)
    tree = Tree((0, 0, 1, 2), (3, *path))
    base = ORACLE.head_run(head_case, (*CONTEXT, 3), path)
    assert base is not None
    reading_rows = set()
    for layer, row, router in base.routers:
        if layer == 1:
            _, experts = router.exchanges(0, np.inf)[0]
            moved = ORACLE.head_run(head_case, (*CONTEXT, 3), path, {(layer, row): tuple(experts.tolist())})
            assert moved is not None
            reading_rows |= {row} if np.abs(moved.scores - base.scores).max() > 1e-9 else set()
    assert len(reading_rows) == 1 + len(path)
    monkeypatch.setattr(head_routing, "TIE_SIGMA", np.inf)
    reads = finding(head_case, 1.0, 2.0).reads
    assert reads is not None
    ties = tied_rows(ORACLE, replace(reads, tree=tree, node=len(path)), base)
    looked_at = [base.routers[number][:2] for _, number in ties]
    assert {row for layer, row in looked_at if layer == 1} == reading_rows
    assert {row for layer, row in looked_at if layer == 0} > reading_rows


@pytest.mark.parametrize(
    ("dtype", "head"),
    [("float64", HEAD), ("bfloat16", replace(HEAD, experts=0))],
    ids=["no-tie-in-float64", "no-experts"],
)
def test_without_a_tie_nothing_is_explained(dtype: str, head: Eagle1) -> None:
    assert explain_by_head(finding(case(dtype, head), 1e-3, 2e-3), ORACLE) is None


def test_a_finding_of_the_target_is_not_explained_by_the_head() -> None:
    head_case = case("bfloat16")
    head_finding = finding(head_case, 1e-3, 2e-3)
    assert head_finding.reads is not None
    assert explain_by_head(replace(head_finding, reads=replace(head_finding.reads, by_head=False)), ORACLE) is None
