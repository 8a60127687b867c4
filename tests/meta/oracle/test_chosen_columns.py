"""Index scores, the choices of columns that they admit, and the oracle under the choices of another."""

from collections.abc import Callable

import numpy as np
import pytest

from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.oracle.choices import COLUMNS, Choices, RowChoices
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.evaluator import Evaluator
from specverify.reference.oracle.formulas.column_scores import ColumnScores, FollowedColumns
from specverify.reference.oracle.formulas.routers import UNKNOWN
from specverify.reference.oracle.model import PathByPath
from specverify.reference.oracle.parameters import Parameters, load
from specverify.reference.oracle.scored_choices import own_choices, scored_choices, with_choices
from specverify.reference.oracle.shared_prefix import SharedPrefix
from specverify.reference.sampling import Stops
from specverify.reference.trace import Array
from specverify.reference.tree import Tree

INDEXED = tuple(arch for arch in GALLERY if arch.words.indexed)
# Node 3 hangs from node 4: a parent may have the larger number.
CONTEXT, TREE = (1, 2, 3, 4, 9, 8, 7), Tree((0, 0, 0, 4, 1, 3), (2, 5, 7, 3, 1, 6))
NAMES = [f"{arch.family}-{number}" for number, arch in enumerate(INDEXED)]


def scores_of(*products: float, num_taken: int = 2) -> ColumnScores:
    """The scores of one row and one head of weight 1 for columns with these products."""
    row = np.array([products])
    return ColumnScores(np.maximum(row, 0.0), row, np.sqrt(np.mean(np.square(row), axis=-1)), num_taken)


def row_of(*columns: int) -> Array:
    return np.array([columns])


def test_a_gap_is_what_scores_must_change_before_a_choice_is_the_best() -> None:
    scores = scores_of(1.0, 4.0, 3.0, 2.9)
    (size,) = scores.sizes
    assert scores.chosen.tolist() == [[1, 2]]
    assert scores.margins()[0] * size == pytest.approx(0.1)
    for columns, gap in (((1, 2), 0.0), ((1, 3), 0.1), ((0, 1), 2.0), ((0, 3), 3.0), ((UNKNOWN, UNKNOWN), 0.0)):
        assert scores.gaps(row_of(*columns))[0] * size == pytest.approx(gap), columns


@pytest.mark.parametrize("columns", [(1,), (1, 1), (1, 4), (0, 1, 2), (1, UNKNOWN), (-2, 1)])
def test_what_is_no_choice_has_no_finite_gap(columns: tuple[int, ...]) -> None:
    """Too few columns, one twice, one that the row does not see, too many."""
    assert scores_of(1.0, 4.0, 3.0, 2.9).gaps(row_of(*columns))[0] == np.inf


def test_a_row_that_sees_no_more_columns_than_it_takes_takes_all() -> None:
    scores = scores_of(1.0, -4.0, num_taken=3)
    assert scores.chosen.tolist() == [[0, 1]]
    assert scores.margins().tolist() == [np.inf]
    assert scores.gaps(row_of(0, 1, UNKNOWN)).tolist() == [0.0]
    assert scores.gaps(row_of(0, UNKNOWN, UNKNOWN)).tolist() == [np.inf]


def test_of_rectified_products_the_first_are_taken_and_another_is_as_far_as_its_product_from_0() -> None:
    scores = scores_of(-2.0, 1.0, -0.1, -3.0)
    (size,) = scores.product_sizes
    assert scores.chosen.tolist() == [[0, 1]]
    # Column 2 comes first where its product is positive, column 3 where either product is.
    assert scores.margins()[0] * size == pytest.approx(0.1)
    assert scores.gaps(row_of(1, 2))[0] * size == pytest.approx(0.1)
    assert scores.gaps(row_of(1, 3))[0] * size == pytest.approx(2.0)


def test_a_row_without_a_positive_product_has_distances_all_the_same() -> None:
    scores = scores_of(-2.0, -1.0, -0.5, num_taken=1)
    assert scores.chosen.tolist() == [[0]]
    assert scores.gaps(row_of(2))[0] * scores.product_sizes[0] == pytest.approx(0.5)
    changed = scores_of(-2.0, -1.0, -0.5 + 1e-6, num_taken=1)
    assert np.isfinite(scores.squared_change(changed)).all()


def test_exchanges_are_those_near_enough_the_nearest_first() -> None:
    scores = scores_of(1.0, 4.0, 3.0, 2.9)
    exchanges = scores.exchanges(0, 1.2 / scores.sizes[0])
    assert [columns.tolist() for _, columns in exchanges] == [[1, 3], [2, 3]]
    assert scores_of(4.0, 3.0).exchanges(0, 9.0) == []


def test_a_change_is_that_of_columns_that_move_or_of_products() -> None:
    scores, changed = scores_of(3.0, -4.0, -1.0, -2.0), scores_of(3.3, -4.0, -1.0, -2.0)
    assert scores.squared_change(changed)[0] == pytest.approx((0.3 / scores.sizes[0]) ** 2)
    changed = scores_of(3.0, -4.4, -1.4, -2.4)
    assert scores.squared_change(changed)[0] == pytest.approx(0.75 * (0.4 / scores.product_sizes[0]) ** 2)


def test_a_layer_that_follows_has_the_columns_of_the_one_before() -> None:
    followed = FollowedColumns(row_of(1, 4, UNKNOWN))
    assert followed.gaps(row_of(1, 4)).tolist() == [0.0]
    assert followed.gaps(row_of(UNKNOWN, UNKNOWN)).tolist() == [0.0]
    assert followed.gaps(row_of(1, 3)).tolist() == [np.inf]
    assert followed.margins().tolist() == [np.inf]
    assert followed.follow(row_of(2, UNKNOWN)).tolist() == [[2, UNKNOWN, UNKNOWN]]


def test_choices_belong_to_texts_whatever_their_number() -> None:
    choices = Choices(1)
    tree = Tree((0, 2, 0), (7, 8, 9))
    choices.add((5,), tree, RowChoices(columns=np.array([[[0, -1, -1], [0, 1, -1], [0, 1, 3], [1, 2, -1]]])))
    columns = choices.of((5, 7, 9, 8)).columns
    assert columns is not None
    assert columns.tolist() == [[[0, -1, -1], [0, 1, -1], [1, 2, -1], [0, 1, 3]]]
    # A later row may have fewer places; a column behind the row's own text cannot be followed.
    choices.add((5, 7), Tree((0,), (9,)), RowChoices(columns=np.array([[[0], [2], [2]]])))
    columns = choices.of((5, 7, 9)).columns
    assert columns is not None
    assert [row[row != UNKNOWN].tolist() for row in columns[0]] == [[0], [0, 1], [2]]
    assert choices.of((5,), tree).experts is None


def last_columns(arch: Architecture) -> tuple[Parameters, RowChoices]:
    """A model, and the worst columns for each row of CONTEXT and TREE; layers that follow take those of the one before.

    They take its own experts, and one row in three takes too few columns.
    """
    parameters = load(Seeded(arch, 1), "float64")
    plain = SharedPrefix(parameters)
    scored = scored_choices(COLUMNS, plain, CONTEXT, TREE)
    assert scored is not None
    chosen = scored.chosen.copy()
    for layer, scorer in enumerate(scored.scorers):
        for row in range(chosen.shape[1]):
            if isinstance(scorer, ColumnScores):
                length = int(scorer.lengths[row])
                worst = np.argsort(scorer.scores[row, :length], kind="stable")[: 4 - (row % 3 == 2)]
                chosen[layer, row] = UNKNOWN
                chosen[layer, row, : len(worst)] = np.sort(worst)
            else:
                chosen[layer, row] = chosen[layer - 1, row]
    return parameters, RowChoices(own_choices(plain, CONTEXT, TREE).experts, chosen)


@pytest.mark.parametrize("arch", INDEXED, ids=NAMES)
def test_both_evaluators_follow_columns_and_differ_from_their_own(arch: Architecture) -> None:
    parameters, rows = last_columns(arch)
    parameters_with_choices = with_choices(parameters, CONTEXT, TREE, rows)
    shared, naive = SharedPrefix(parameters_with_choices), PathByPath(parameters_with_choices)
    for answer in (lambda run: run.nodes(CONTEXT, TREE).logits, lambda run: run.kv(CONTEXT).keys):
        ask: Callable[[Evaluator], Array] = answer
        np.testing.assert_allclose(ask(shared), ask(naive), rtol=0, atol=1e-9)
    plain = SharedPrefix(parameters).nodes(CONTEXT, TREE).logits
    assert np.abs(shared.nodes(CONTEXT, TREE).logits - plain).max() > 1e-3
    # Its own choices, told to it, change nothing.
    evaluator_choices = own_choices(SharedPrefix(parameters), CONTEXT, TREE)
    same_logits = SharedPrefix(with_choices(parameters, CONTEXT, TREE, evaluator_choices)).nodes(CONTEXT, TREE).logits
    np.testing.assert_allclose(same_logits, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("arch", INDEXED, ids=NAMES)
def test_both_evaluators_score_columns_alike_on_context_and_tree(arch: Architecture) -> None:
    """The context as a chain above the tree is the text of every row."""
    parameters = load(Seeded(arch, 2), "float64")
    shared, naive = (scored_choices(COLUMNS, run(parameters), CONTEXT, TREE) for run in (SharedPrefix, PathByPath))
    assert shared is not None
    assert naive is not None
    np.testing.assert_array_equal(shared.chosen, naive.chosen)
    np.testing.assert_allclose(shared.margins(), naive.margins(), rtol=1e-9)
    assert (shared.gaps(naive.chosen) == 0).all()


@pytest.mark.parametrize("rows", [[7, 9, 12], [0, 3, 8], []], ids=["tree", "context and tree", "none"])
@pytest.mark.parametrize("arch", INDEXED, ids=NAMES)
def test_some_rows_have_the_scores_that_they_have_among_all(arch: Architecture, rows: list[int]) -> None:
    parameters = load(Seeded(arch, 2), "float64")
    every = scored_choices(COLUMNS, SharedPrefix(parameters), CONTEXT, TREE)
    some = scored_choices(COLUMNS, SharedPrefix(parameters), CONTEXT, TREE, rows=rows)
    assert every is not None
    assert some is not None
    other = np.sort((every.chosen + 1) % (1 + every.chosen.max(axis=-1, keepdims=True)), axis=-1)
    np.testing.assert_array_equal(some.chosen, every.chosen[:, rows])
    np.testing.assert_allclose(some.margins(), every.margins()[:, rows], rtol=1e-9)
    np.testing.assert_allclose(some.gaps(other[:, rows]), every.gaps(other)[:, rows], rtol=1e-9)


def test_scores_move_with_weights_and_not_where_a_layer_follows() -> None:
    glm = next(arch for arch in INDEXED if arch.family == "glm_moe_dsa")
    case = _case(glm)
    movement = Oracle().score_movement(COLUMNS, case, CONTEXT, TREE)
    assert movement is not None
    assert (movement[1] == 0).all()
    assert (movement[[0, 2]] > 0).all()
    assert np.median(movement[0]) < 100


def _case(arch: Architecture) -> Case:
    return Case(Seeded(arch, 1), (*CONTEXT, TREE.token[0]), Scripted((TREE,)), stops=Stops(2), dtype="float64")
