"""Scores of experts, the choices that they admit, and the oracle under the choices of another."""

import numpy as np
import pytest

from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.oracle.choices import EXPERTS, Choices, RowChoices
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.formulas.routers import UNKNOWN, Router
from specverify.reference.oracle.model import PathByPath
from specverify.reference.oracle.parameters import load
from specverify.reference.oracle.scored_choices import scored_choices, with_choices
from specverify.reference.oracle.shared_prefix import SharedPrefix
from specverify.reference.trace import Array
from specverify.reference.tree import Tree
from tests.drawn_families import listed_architectures

MIXING = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "llama4_text")
CONTEXT, TREE = (1, 2, 3, 4, 9), Tree((0, 0, 0, 1, 2), (2, 5, 7, 3, 1))


def router(*rows: tuple[float, ...], num_taken: int = 2, **groups: int) -> Router:
    scores = np.array(rows)
    return Router(scores, scores, num_taken, **groups)


def test_a_gap_is_what_scores_must_change_before_a_choice_is_the_best() -> None:
    plain = router((4.0, 3.0, 2.9, 0.0))
    size = plain.size
    assert plain.chosen.tolist() == [[0, 1]]
    for other_experts, gap in (
        ((1, 0), 0.0),
        ((0, 2), 0.1),
        ((0, 3), 3.0),
        ((2, 3), 4.0),
        ((0, 0), np.inf),
        ((0, 4), np.inf),
    ):
        assert plain.gaps(np.array([other_experts]))[0] * size == pytest.approx(gap), other_experts
    assert plain.gaps(np.array([[UNKNOWN, UNKNOWN]]))[0] == 0
    assert plain.margins()[0] * size == pytest.approx(0.1)


def test_a_gap_among_groups_is_that_of_groups_or_of_experts() -> None:
    # Groups of two, scored by their best two: 5, 4.9 and 4; one is open.
    grouped = router((3.0, 2.0, 4.4, 0.5, 2.2, 1.8), groups=3, open_groups=1, best=2)
    assert grouped.chosen.tolist() == [[0, 1]]
    for other_experts, gap in (((2, 3), 0.1), ((4, 5), 1.0), ((0, 2), np.inf)):
        assert grouped.gaps(np.array([other_experts]))[0] * grouped.size == pytest.approx(gap), other_experts
    (exchange,) = grouped.exchanges(0, 0.5 / grouped.size)
    assert exchange[1].tolist() == [2, 3]
    # Two are open: the choice lies in the first two, and 4 in a third.
    two = router((3.0, 2.0, 4.4, 0.5, 2.2, 1.8), groups=3, open_groups=2, best=2)
    assert sorted(two.chosen[0].tolist()) == [0, 2]
    assert two.gaps(np.array([[2, 4]]))[0] * two.size == pytest.approx(1.0)  # of the groups: 5 against 4


def test_exchanges_are_the_choices_across_borders_that_are_narrow_enough() -> None:
    plain = router((4.0, 3.0, 2.9, 2.5))
    exchanges = plain.exchanges(0, 0.6 / plain.size)
    assert [(round(width * plain.size, 6), sorted(experts.tolist())) for width, experts in exchanges] == [
        (0.1, [0, 2]),
        (0.5, [0, 3]),
    ]
    assert router((4.0, 3.0), num_taken=2).exchanges(0, 9.0) == []


def experts_of(choices: Choices, context: tuple[int, ...], tree: Tree | None = None) -> Array:
    experts = choices.of(context, tree).experts
    assert experts is not None
    return experts


def test_choices_belong_to_texts_and_the_latest_counts() -> None:
    choices = Choices(1)
    # Node 1 hangs from node 2: a parent may have the larger number.
    tree = Tree((0, 2, 0), (7, 8, 9))
    choices.add((5,), tree, RowChoices(np.array([[[0], [1], [2], [3]]])))
    assert experts_of(choices, (5,), tree).tolist() == [[[0], [1], [2], [3]]]
    assert experts_of(choices, (5, 7, 9, 8)).tolist() == [[[0], [1], [3], [2]]]
    assert experts_of(choices, (5, 8)).tolist() == [[[0], [UNKNOWN]]]
    assert experts_of(choices, (6,), tree).tolist() == [[[UNKNOWN]] * 4]
    choices.add((5, 7), Tree((0,), (9,)), RowChoices(np.array([[[UNKNOWN], [6], [7]]])))
    assert experts_of(choices, (5, 7, 9)).tolist() == [[[0], [6], [7]]]


def others_of(family: str) -> tuple[Seeded, Array]:
    """A model of `family`, and experts for the rows of CONTEXT and TREE that are no row's best."""
    model = Seeded(listed_architectures(family)[0], 1)
    node_routing = scored_choices(EXPERTS, SharedPrefix(load(model, "float64")), CONTEXT, TREE)
    assert node_routing is not None
    chosen = node_routing.chosen.copy()
    for layer, scores in enumerate(node_routing.scorers):
        if isinstance(scores, Router):
            # The last experts by their scores, of groups that are no wall here.
            chosen[layer] = np.argsort(scores.scores, axis=-1)[:, : scores.experts_per_row]
    return model, chosen


@pytest.mark.parametrize("family", MIXING)
def test_both_evaluators_follow_choices_and_differ_from_their_own(family: str) -> None:
    model, chosen = others_of(family)
    plain = load(model, "float64")
    parameters = with_choices(plain, CONTEXT, TREE, RowChoices(chosen))
    by_prefix, by_path = SharedPrefix(parameters), PathByPath(parameters)
    for prefix_array, path_array in (
        (by_prefix.nodes(CONTEXT, TREE).logits, by_path.nodes(CONTEXT, TREE).logits),
        (by_prefix.kv(CONTEXT).values, by_path.kv(CONTEXT).values),
    ):
        np.testing.assert_allclose(prefix_array, path_array, rtol=0, atol=1e-9)
    assert np.abs(by_prefix.nodes(CONTEXT, TREE).logits - SharedPrefix(plain).nodes(CONTEXT, TREE).logits).max() > 1e-6
    # Its own choices, told to it, change nothing.
    node_routing = scored_choices(EXPERTS, SharedPrefix(plain), CONTEXT, TREE)
    assert node_routing is not None
    logits = (
        SharedPrefix(with_choices(plain, CONTEXT, TREE, RowChoices(node_routing.chosen))).nodes(CONTEXT, TREE).logits
    )
    np.testing.assert_allclose(logits, SharedPrefix(plain).nodes(CONTEXT, TREE).logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", MIXING)
def test_some_rows_have_the_scores_that_they_have_among_all(family: str) -> None:
    model, others = others_of(family)
    evaluator, rows = SharedPrefix(load(model, "float64")), [2, 6, 7]
    every = scored_choices(EXPERTS, evaluator, CONTEXT, TREE)
    some = scored_choices(EXPERTS, evaluator, CONTEXT, TREE, rows=rows)
    assert every is not None
    assert some is not None
    np.testing.assert_array_equal(some.chosen, every.chosen[:, rows])
    np.testing.assert_allclose(some.margins(), every.margins()[:, rows], rtol=1e-12)
    np.testing.assert_allclose(some.gaps(others[:, rows]), every.gaps(others)[:, rows], rtol=1e-12)


def test_nodes_of_one_text_each_take_their_own() -> None:
    twins = Tree((0, 0, 0, 1, 2), (2, 5, 5, 3, 3))
    parameters = load(Seeded(listed_architectures("mixtral")[0], 1), "float64")
    own = scored_choices(EXPERTS, SharedPrefix(parameters), CONTEXT, twins)
    assert own is not None
    router, second = own.scorers[0], len(CONTEXT) + 2
    assert isinstance(router, Router)
    chosen = own.chosen.copy()
    chosen[0, second] = router.exchanges(second, np.inf)[0][1]
    following = with_choices(parameters, CONTEXT, twins, RowChoices(chosen))
    assert following.twins_differ
    known = following.known_choices(CONTEXT, twins).experts
    assert known is not None
    assert np.array_equal(known, chosen)
    # Where a later run of the texts has like ones, these count.
    again = Choices(len(chosen))
    again.add(CONTEXT, twins, RowChoices(chosen))
    again.add(CONTEXT, twins, RowChoices(own.chosen))
    assert np.array_equal(experts_of(again, CONTEXT, twins), own.chosen)
    # A text by itself has the choices that came last.
    alone = following.known_choices((*CONTEXT, 2, 5)).experts
    assert alone is not None
    assert np.array_equal(alone[0, -1], chosen[0, second])
    nodes, plain = SharedPrefix(following).nodes(CONTEXT, twins), SharedPrefix(parameters).nodes(CONTEXT, twins)
    for node in (1, 3):
        np.testing.assert_allclose(nodes.logits[node], plain.logits[node], atol=1e-12)
    for node in (2, 4):
        assert np.abs(nodes.logits[node] - plain.logits[node]).max() > 1e-6
    # Behind an accepted path the text counts, whichever run came before.
    path_of = SharedPrefix(following)
    path_of.nodes(CONTEXT, twins)
    behind = path_of.nodes((*CONTEXT, 2, 5), Tree((0,), (3,)))
    np.testing.assert_allclose(behind.logits[0], nodes.logits[4], atol=1e-12)


def test_an_oracle_follows_on_its_target_alone() -> None:
    model, chosen = others_of("mixtral")
    other_model = Seeded(listed_architectures("mixtral")[0], 2)
    choices = Choices(len(chosen))
    choices.add(CONTEXT, TREE, RowChoices(chosen))
    oracle = Oracle()
    case = Case(model, (1, 2))
    following = oracle.following(case, choices)
    for asked_model, moves in ((model, True), (other_model, False)):
        oracle_logits, following_logits = (
            each.model(asked_model, "float64").nodes(CONTEXT, TREE).logits for each in (oracle, following)
        )
        assert (np.abs(oracle_logits - following_logits).max() > 1e-6) == moves
    assert following.following(case, choices).base is oracle  # type: ignore[attr-defined]
