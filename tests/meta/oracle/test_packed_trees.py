"""Trees of successive steps in one forward: every family within 1e-12 of one forward a step, and what is packed."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from specverify.reference.architecture import Architecture, Rope, Seeded
from specverify.reference.oracle import shared_prefix
from specverify.reference.oracle.evaluator import Evaluator, recurrent_state
from specverify.reference.oracle.family import FAMILIES
from specverify.reference.oracle.packed_trees import PlacedTree, packed
from specverify.reference.oracle.parameters import load
from specverify.reference.oracle.shared_prefix import SharedPrefix
from specverify.reference.trace import Array
from specverify.reference.tree import Tree
from specverify.references.torch_oracle import TorchEvaluator
from tests.meta.oracle.test_torch_reference import CLOSE, CONFIGURATIONS, configuration, worst
from tests.tiers import gated

STEPS: tuple[PlacedTree, ...] = (
    ((3, 1, 4), Tree((0, 0, 0, 1, 2, 1, 5), (1, 2, 3, 4, 0, 1, 2))),
    # Nodes 2 and 4 were accepted, and 4 is the bonus; the next tree has twins, and a child before its parent.
    ((3, 1, 4, 1, 3, 0), Tree((0, 2, 0, 0, 3), (4, 1, 2, 2, 3))),
    ((3, 1, 4, 1, 3, 0, 4), Tree((0,), (0,))),
    ((3, 1, 4, 1, 3, 0, 4, 0), Tree((0, 0, 1, 2), (2, 0, 1, 3))),
)


def answers(evaluator: Evaluator) -> Iterator[Array]:
    for context, tree in STEPS:
        nodes, inputs = evaluator.nodes(context, tree), evaluator.inputs(context, tree)
        yield from (nodes.logits, nodes.attended, evaluator.node_states(context, tree))
        yield from (layer for side in (inputs.queries, inputs.keys, inputs.values) for layer in side)
        kv, state = evaluator.kv(context), recurrent_state(evaluator, context)
        yield from (kv.keys, kv.values)
        yield from () if state is None else (*state.windows, *state.memories)


class Counted(SharedPrefix):
    """An evaluator that counts its forwards of trees, and of contexts' tokens."""

    trees = 0
    tokens = 0

    def _run_tree(self, context: tuple[int, ...], tree: Tree) -> shared_prefix._Run:
        self.trees += 1
        return super()._run_tree(context, tree)

    def _append(self, context: shared_prefix._Context, tokens: Array) -> None:
        self.tokens += len(tokens)
        super()._append(context, tokens)


@pytest.mark.parametrize(
    ("family", "number"),
    gated(
        [(family, number) for number in range(CONFIGURATIONS) for family in FAMILIES],
        lambda index: index < len(FAMILIES),
    ),
)
def test_every_family_as_with_a_forward_for_each_step(family: str, number: int) -> None:
    parameters = load(Seeded(configuration(family, number), number), "float64")
    one_by_one, together = Counted(parameters), Counted(parameters)
    together.expect(STEPS)
    for packed_array, array in zip(answers(together), answers(one_by_one), strict=True):
        assert worst(packed_array, array) < CLOSE
    assert (one_by_one.trees, together.trees) == (len(STEPS), 1)
    keeps_columns = not parameters.architecture.recurrent and parameters.formulas.indexer is None
    assert together.tokens == (len(STEPS[0][0]) if keeps_columns else one_by_one.tokens)


def plain(rope: Rope | None = None) -> SharedPrefix:
    return Counted(load(Seeded(Architecture("llama", 5, 8, 12, 2, 1, 4, (0, 0), rope or Rope()), 0), "float64"))


def test_torch_packs_too() -> None:
    parameters = plain().parameters
    together = TorchEvaluator(parameters, torch.device("cpu"))
    together.expect(STEPS)
    for packed_array, array in zip(answers(together), answers(SharedPrefix(parameters)), strict=True):
        assert worst(packed_array, array) < CLOSE
    assert together._packed is not None


def test_a_text_has_one_row() -> None:
    pack = packed(STEPS, 100)
    assert pack is not None
    assert pack.context == STEPS[0][0]
    # Of the second tree the root is new, and three of its nodes; its twins are one. The bare root is a node of it.
    assert len(pack.tree) == 7 + 1 + 3 + 1 + 4
    assert pack.tree.ordered
    assert pack.nodes_of(*STEPS[0]) == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("most", "trees"), [(1, 0), (10, 0), (11, 2), (12, 3), (15, 3), (16, 4)])
def test_as_many_trees_as_have_room(most: int, trees: int) -> None:
    pack = packed(STEPS, most)
    assert (0 if pack is None else sum(pack.nodes_of(*step) is not None for step in STEPS)) == trees


@pytest.mark.parametrize(
    "stranger",
    [((3, 1, 4, 2), Tree((0,), (0,))), ((3, 1), Tree((0,), (4,))), ((3, 1, 4), Tree((0,), (2,)))],
    ids=["another text", "a shorter context", "a second root"],
)
def test_what_does_not_follow_is_left_to_a_forward_of_its_own(stranger: PlacedTree) -> None:
    assert packed((STEPS[0], stranger), 100) is None
    evaluator = plain()
    assert isinstance(evaluator, Counted)
    evaluator.expect((*STEPS[:2], stranger, STEPS[2]))
    alone = SharedPrefix(evaluator.parameters)
    for step in (*STEPS[:2], stranger, STEPS[2]):
        assert worst(evaluator.nodes(*step).logits, alone.nodes(*step).logits) < CLOSE
    assert evaluator.trees == 3


def test_a_run_over_the_switch_of_long_factors_is_not_packed() -> None:
    rope = Rope(100.0, "longrope", original=8, short_factor=(1.0, 1.0), long_factor=(2.0, 3.0))
    evaluator = plain(rope)
    assert isinstance(evaluator, Counted)
    evaluator.expect(STEPS)
    alone = SharedPrefix(evaluator.parameters)
    for step in STEPS[:1]:
        assert np.array_equal(evaluator.nodes(*step).logits, alone.nodes(*step).logits)
    assert evaluator._packed is None
