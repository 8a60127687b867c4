"""Which trees may be sampled losslessly, and with which proposal law: each kind by exact enumeration.

Laws are in fractions, so that lossless is a distance of 0. Beside each kind stands a neighbour whose law is not the
target's, so that a distance of 0 says something.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from specverify.commands.subjects import rules
from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Seeded
from specverify.reference.draft import LanguageModel
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.medusa import Medusa
from specverify.reference.draft_trees import TREE_LAWS, Dispatch, Expansion, Stopped, named_tree
from specverify.reference.oracle import acceptance
from specverify.reference.oracle.acceptance import Answer, Row, normalise
from specverify.reference.oracle.coin_source import Chance, Number, enumerate_law
from specverify.reference.oracle.law import Law, round_law, total_variation
from specverify.reference.oracle.tree_growth import Path, siblings
from specverify.reference.rules import DRAWS, Rule
from specverify.reference.tree import Shape, Tree
from tests.meta.laws.test_law import Tables

MODEL = Seeded(GALLERY[0], 1)

LOSSLESS = (
    *(("multi-round", draws) for draws in DRAWS),
    *(("eagle", draws) for draws in DRAWS),
    *(("traversal", draws) for draws in DRAWS),
    *(("sample-and-match", draws) for draws in DRAWS),
    ("specinfer", "top-k"),
    ("specinfer", "with-replacement"),
    ("target-only", "top-k"),
    ("target-only", "without-replacement"),
)
"""Rules that verify trees, each with a way to name siblings under which it promises the target's law."""

LOSSY = (("specinfer", "without-replacement"), ("target-only", "with-replacement"))
RANKED = tuple((rule, draws) for rule, draws in LOSSLESS if draws == "top-k")
PRODUCT = Shape((0, 0, 0, 1, 1, 2, 2))
SEEDS = range(2, 8)


def off(law: Law, tables: Tables, tokens: int) -> Number:
    assert sum(law.values()) == 1
    return total_variation(law, tables.target, tokens)


def blocks(program: Callable[[Chance], tuple[Path, tuple[Number, ...]]]) -> Law:
    """The law of whole blocks of a program that returns accepted tokens and the weights of the token after them."""
    law: Law = {}
    for (tokens, weights), mass in enumerate_law(program).items():
        for token, weight in enumerate(normalise(weights)):
            if weight:
                block = (*tokens, token)
                law[block] = law.get(block, 0) + mass * weight
    return law


def test_the_promises_are_those_that_are_shown_here() -> None:
    every = itertools.product(
        ("multi-round", "eagle", "traversal", "sample-and-match", "specinfer", "target-only"), DRAWS
    )
    lossless_kinds = {kind for kind in every if Rule(kind[0]).lossless(kind[1], kind[1] != "with-replacement")}
    assert lossless_kinds == {*LOSSLESS}
    assert not lossless_kinds & {*LOSSY}


def test_the_kinds_of_tree_are_told_with_the_draws_that_cases_admit() -> None:
    draws_by_kind = {law.name: law.draws for law in TREE_LAWS}
    plans = {
        "static": LanguageModel(MODEL, named_tree("D2-BF2")),
        "product": Medusa(named_tree("D2-BF2"), HiddenStates(place="normed"), 2),
        "batch size": LanguageModel(MODEL, Dispatch((1,), (named_tree("D2"),))),
        "dynamic": LanguageModel(MODEL, Expansion(2, 2, 4)),
        "stopped": LanguageModel(MODEL, Stopped(named_tree("D2-BF2"), 0.4)),
    }
    for name, draft in plans.items():
        assert tuple(draw for draw in DRAWS if draft.refuses_draws(draw) is None) == draws_by_kind.pop(name)
    assert not draws_by_kind
    for row in rules():
        lossless_draws = {draws for rule, draws in LOSSLESS if rule == row["name"]}
        assert row["chains_only"] or row["state"] == "lossy" or {*row["lossless_for"]} == lossless_draws


def medusa(rule: str, draws: str, tables: Tables) -> Law:
    """A round of Medusa heads: the children of every node come from the law of their depth, by coins of their own."""
    return round_law(
        PRODUCT if draws != "with-replacement" else Shape((0, 0, 0, 1, 1)),  # twins multiply what is enumerated
        tables.target,
        lambda path, k: tables.draft((0,) * len(path), k),
        Rule(rule),
        draws,
        whole_tree_first=False,
    )


@pytest.mark.parametrize(("rule", "draws"), LOSSLESS)
def test_a_product_of_one_law_for_each_depth_is_lossless(rule: str, draws: str) -> None:
    assert [off(medusa(rule, draws, Tables(3, seed)), Tables(3, seed), 3) for seed in SEEDS] == [0] * len(SEEDS)


@pytest.mark.parametrize(("rule", "draws"), LOSSY)
def test_a_rule_that_does_not_promise_it_is_not(rule: str, draws: str) -> None:
    assert any(off(medusa(rule, draws, Tables(3, seed)), Tables(3, seed), 3) for seed in SEEDS)


@pytest.mark.parametrize("draws", ["with-replacement", "without-replacement"])
def test_a_product_of_lists_that_are_drawn_once_for_a_depth_is_lossless_too(draws: str) -> None:
    """One path is walked: the list of a depth does not depend on what was drawn and accepted above it."""
    for seed in SEEDS:
        tables = Tables(3, seed)
        heads = [tables.draft((0,) * depth, 0) for depth in range(2)]
        if any(sum(value > 0 for value in row) < 2 for row in heads):
            continue  # no two tokens to draw without replacement

        def program(chance: Chance, heads: list[Row] = heads, tables: Tables = tables) -> Any:
            first, second = (
                tuple(siblings(chance, draws, [row] * 2, nodes).values())
                for row, nodes in zip(heads, ((1, 2), (3, 4)), strict=True)
            )
            token: Path = (0, *first, *second, *second)
            tree = Tree(PRODUCT.parent, token)
            rows = [tables.target(tree.tokens_to(node)[1:]) for node in range(len(tree))]
            law: list[Row] = [heads[0]] * 3 + [heads[1]] * 4
            path, weights = acceptance.verify(chance, Rule(), draws, tree, rows, law, True)
            return tuple(token[node] for node in path[1:]), tuple(weights)

        assert off(blocks(program), tables, 3) == 0


def grow_tree(plan: Expansion, tables: Tables) -> tuple[Shape, Path]:
    """The dynamic tree of best tokens by the draft's exact law: shape and tokens."""
    worth: dict[Path, Number] = {(): 1}
    level: list[Path] = [()]
    paths: list[Path] = [()]
    for _ in range(plan.depth):
        below: list[Path] = []
        for path in level:
            row = tables.draft(path, 0)
            for token in sorted(range(len(row)), key=lambda candidate: (-row[candidate], candidate))[: plan.top_k]:
                below.append((*path, token))
                worth[below[-1]] = worth[path] * row[token]
        level = sorted(sorted(below, key=lambda path: -worth[path])[: plan.top_k], key=below.index)
        paths += below
    kept_paths = sorted(sorted(paths, key=lambda path: -worth[path])[: plan.total], key=paths.index)
    parents = tuple(kept_paths.index(path[:-1]) for path in kept_paths)
    return Shape(parents), (0, *(path[-1] for path in kept_paths[1:]))


@pytest.mark.parametrize(("rule", "draws"), RANKED)
def test_a_dynamic_tree_of_best_tokens_is_lossless(rule: str, draws: str) -> None:
    """Its shape and its tokens follow from the context alone, and each token counts as surely proposed."""
    shapes = set()
    for seed in SEEDS:
        tables = Tables(4, seed)
        shape, tokens = grow_tree(Expansion(2, 2, 5), tables)
        shapes.add(shape.parent)
        assert off(round_law(shape, tables.target, tables.draft, Rule(rule), draws, tokens), tables, 3) == 0
    assert len(shapes) > 1


def test_a_dynamic_tree_of_drawn_tokens_is_lossy_and_a_case_refuses_it() -> None:
    """Of two drawn siblings the likelier one is kept: it was not drawn from the law that the rule is told."""

    def likelier(
        chance: Chance, rule: Rule, draws: str, tree: Tree, target: Any, proposal: Any, sampled: bool
    ) -> Answer:
        likelier_child = max(tree.children[0], key=lambda node: proposal[node][tree.token[node]])
        cut = Tree((0, 0), (0, tree.token[likelier_child]))
        rows, law = [target[0], target[likelier_child]], [proposal[likelier_child]] * 2
        path, weights = acceptance.multi_round(chance, rule, draws, cut, rows, law, sampled)
        return tuple(likelier_child if node else 0 for node in path), weights

    for draws in ("with-replacement", "without-replacement"):
        biased = 0
        for seed in SEEDS:
            tables = Tables(3, seed)
            law = round_law(Shape((0, 0, 0)), tables.target, tables.draft, Rule(), draws, program=likelier)
            biased += off(law, tables, 2) > 0
        assert biased
        refusal = LanguageModel(MODEL, Expansion(2, 2, 4)).refuses_draws(draws)
        assert refusal is not None
        assert "use top-k" in refusal


def texts(tables: Tables, rule: str, draws: str, tree_for: Callable[[int, Path], Shape], tokens: int) -> Law:
    """The law of the first `tokens` tokens of a request whose step `n` after `output` verifies `tree_for(n, output)`.

    Each step begins where the one before it ended.
    """
    law: Law = {}

    def go_on(number: int, output: Path, mass: Number) -> None:
        if len(output) >= tokens:
            law[output[:tokens]] = law.get(output[:tokens], 0) + mass
            return
        block = round_law(
            tree_for(number, output),
            lambda path: tables.target(output + path),
            lambda path, k: tables.draft(output + path, k),
            Rule(rule),
            draws,
        )
        for block_tokens, share in block.items():
            go_on(number + 1, output + block_tokens, mass * share)

    go_on(0, (), 1)
    return law


TABLE = {1: Shape((0, 0, 0)), 2: Shape((0, 0)), 3: Shape((0,))}
"""Trees by batch size."""

BATCHES: tuple[Callable[[int, Path], int], ...] = (
    lambda number, output: 1 + number % 3,
    lambda number, output: 3 - number % 3,
    lambda number, output: 1 + sum(output) % 3,
)
"""Batch sizes by step; the last ones follow from what was emitted before, as where requests end by their own tokens."""


def tree_of_batch(size: Callable[[int, Path], int], number: int, output: Path) -> Shape:
    return TABLE[size(number, output)]


@pytest.mark.parametrize(("rule", "draws"), [("multi-round", "with-replacement"), ("eagle", "top-k")])
def test_a_tree_by_batch_size_keeps_the_law_of_a_text(rule: str, draws: str) -> None:
    """Whatever the batches: given all earlier tokens, the tree of a step is fixed before its first coin."""
    for seed, size in zip(SEEDS, BATCHES * 2, strict=True):
        tables = Tables(3, seed)
        law = texts(tables, rule, draws, partial(tree_of_batch, size), 3)
        assert off(law, tables, 3) == 0


def test_a_tree_by_the_tokens_that_were_drawn_for_it_does_not() -> None:
    """A step that drafts nothing where the drawn token is 0 loses the tokens that the draft would have given."""

    def unless_first(
        chance: Chance, rule: Rule, draws: str, tree: Tree, target: Any, proposal: Any, sampled: bool
    ) -> Answer:
        if tree.token[1] == 0:
            return (0,), list(target[0])
        return acceptance.multi_round(chance, rule, draws, tree, target, proposal, sampled)

    biased = 0
    for seed in SEEDS:
        tables = Tables(3, seed)
        law = round_law(Shape((0, 0)), tables.target, tables.draft, Rule(), "with-replacement", program=unless_first)
        biased += off(law, tables, 2) > 0
    assert biased
