"""Laws of whole rounds: closed forms, exact zeros for the lossless rules, and biases of the size that theory gives."""

import itertools
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction as F
from functools import cache
from typing import Any

import numpy as np
import pytest

from specverify.reference.malformed import Malformed
from specverify.reference.oracle import acceptance
from specverify.reference.oracle.acceptance import Answer, Program, Row
from specverify.reference.oracle.coin_source import Chance, Number
from specverify.reference.oracle.law import (
    Law,
    distance,
    expected_length,
    given_tree_law,
    round_law,
    sorted_biases,
    target_rows,
    total_variation,
    world_law,
)
from specverify.reference.oracle.processing import softmax
from specverify.reference.oracle.tree_growth import STOPS, DraftStop, Path
from specverify.reference.probability_world import GivenTree, World
from specverify.reference.rules import DRAWS, Rule
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.tree import Shape, Tree

CHAINS = ((0, 0), (0, 0, 1), (0, 0, 1, 2))
TREES = ((0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1, 1), (0, 2, 0, 0), (0, 0, 0, 2, 1))
BINARY = (0, 0, 0, 1, 1, 2, 2)
WORLDS = 12


@dataclass(frozen=True)
class Tables:
    """Random rational rows by context: small denominators, zeros, one-hot rows and p = q among them."""

    vocab: int
    seed: int

    def target(self, path: Path) -> Row:
        return self._row(("p", *path))

    def draft(self, path: Path, k: int) -> Row:
        if self.seed % 7 == 3:
            return self.target(path)
        return self._row(("q", 0, *path))

    def two_drafts(self, path: Path, k: int) -> Row:
        return self._row(("q", k % 2, *path))

    def _row(self, name: tuple[str | int, ...]) -> Row:
        return self._draw_row(self.vocab, self.seed, name)

    @staticmethod
    @cache
    def _draw_row(vocab: int, seed: int, name: tuple[str | int, ...]) -> Row:
        rng = random.Random(f"{seed} {name}")
        lowest = 0 if seed % 3 == 0 else 1
        weights = [rng.randint(lowest, 5) for _ in range(vocab)]
        if (seed % 5 == 1 and name[0] == "q") or not any(weights):
            weights = [int(token == rng.randrange(vocab)) for token in range(vocab)]
            weights[rng.randrange(vocab)] += 1
        return [F(weight, sum(weights)) for weight in weights]


def height(parent: Path) -> int:
    return Shape(parent).height + 1


def tv(law: Law, tables: Tables, parent: Path) -> Number:
    return total_variation(law, tables.target, height(parent))


def worlds(shapes: Sequence[Path]) -> Iterator[tuple[Path, Tables]]:
    for seed in range(WORLDS):
        parent = shapes[seed % len(shapes)]
        yield parent, Tables(4 if len(parent) < 4 or seed % 4 == 0 else 3, seed)


@pytest.mark.parametrize(
    ("rule", "draws"),
    [
        *itertools.product(("chain", "block", "multi-round", "eagle", "traversal", "sample-and-match"), DRAWS),
        ("specinfer", "top-k"),
        ("specinfer", "with-replacement"),
        ("target-only", "top-k"),
        ("target-only", "without-replacement"),
    ],
)
def test_a_lossless_rule_is_lossless_exactly(rule: str, draws: str) -> None:
    """In fractions: no tolerance. The tree drafted whole, and drawn as it is walked, are one law."""
    assert Rule(rule).lossless(draws, distinct=True)
    shapes = CHAINS if Rule(rule).promise.chains_only else TREES
    biased = []
    for parent, tables in worlds(shapes):
        law, lazy = (
            round_law(Shape(parent), tables.target, tables.draft, Rule(rule), draws, whole_tree_first=whole_tree)
            for whole_tree in (True, False)
        )
        assert sum(law.values()) == 1
        assert law == lazy
        zero = tv(law, tables, parent) == 0
        assert zero == all(bias.weight == 0 for bias in sorted_biases(law, tables.target, height(parent)))
        if not zero:
            biased.append((parent, tables))
    assert biased == []


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("rule", ["multi-round", "eagle", "sample-and-match"])
def test_seven_nodes(rule: str, draws: str) -> None:
    for seed in range(2, 5):
        tables = Tables(3, seed)
        law = round_law(Shape(BINARY), tables.target, tables.draft, Rule(rule), draws, whole_tree_first=False)
        assert tv(law, tables, BINARY) == 0


@pytest.mark.parametrize("cumulated", [False, True])
@pytest.mark.parametrize("when", STOPS)
@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("rule", ["chain", "block", "multi-round", "traversal"])
def test_the_length_of_a_draft_may_not_depend_on_the_token_it_withdraws(
    rule: str, draws: str, when: str, cumulated: bool
) -> None:
    """A tree cut by what it reads before a token, or below it, keeps the law; a withdrawn draw does not."""
    cut, biased = 0, 0
    stop = DraftStop(F(2, 5), when, cumulated)
    for parent, tables in worlds(CHAINS if Rule(rule).promise.chains_only else TREES):
        laws = [
            round_law(
                Shape(parent), tables.target, tables.draft, Rule(rule), draws, whole_tree_first=whole_tree, stop=ends
            )
            for whole_tree, ends in ((False, None), (False, stop), (True, stop))
        ]
        assert laws[1] == laws[2]
        cut += laws[0] != laws[1]
        biased += tv(laws[1], tables, parent) != 0
    assert cut > 1
    assert (biased > 0) == (when == "drop" and draws != "top-k")


def test_two_drafts_are_verified_each_against_its_own_law() -> None:
    """Lossless in random order and in row order; not where both are verified against the first one's law."""

    def one_q(
        chance: Chance, rule: Rule, draws: str, tree: Tree, target: Any, proposal: Any, *arguments: Any
    ) -> Answer:
        first = [proposal[tree.children[up][0] if node else 0] for node, up in enumerate(tree.parent)]
        return acceptance.specinfer(chance, rule, draws, tree, target, first, *arguments)

    biased = 0
    for parent, tables in worlds(TREES):
        for rule in ("specinfer", "multi-round"):
            law = round_law(Shape(parent), tables.target, tables.two_drafts, Rule(rule), "with-replacement")
            assert tv(law, tables, parent) == 0
        law = round_law(Shape(parent), tables.target, tables.two_drafts, Rule(), "with-replacement", program=one_q)
        biased += tv(law, tables, parent) > 0
    assert biased > WORLDS / 2


def test_the_tree_may_have_parents_after_their_children_and_absent_siblings() -> None:
    """Support 2 for three siblings: the third is not drafted, nor is what hangs below it."""
    q = [F(1, 4), F(3, 4), F(0)]
    p = [F(1, 2), F(1, 6), F(1, 3)]
    drawn_trees = set()

    def watch_rule(chance: Chance, rule: Rule, draws: str, tree: Tree, *arguments: Any) -> Answer:
        drawn_trees.add((tree.parent, tree.token))
        return acceptance.multi_round(chance, rule, draws, tree, *arguments)

    shape = Shape((0, 4, 0, 0, 0))  # nodes 2, 3, 4 below the root, node 1 below the third of them
    for draws in ("top-k", "without-replacement"):
        drawn_trees.clear()
        law = round_law(shape, lambda path: p, lambda path, k: q, Rule(), draws, program=watch_rule)
        assert total_variation(law, lambda path: p, 3) == 0
        trees = {((0, 0, 0), (0, 1, 0)), ((0, 0, 0), (0, 0, 1))}
        assert drawn_trees == (trees if draws == "without-replacement" else {((0, 0, 0), (0, 1, 0))})


# ------------------------------------------------------------------------------------------------ closed forms


def single(
    p: Row, q: Row, tokens: Path, sampled: bool, rule: Rule, draws: str = "without-replacement"
) -> tuple[Law, list[Number]]:
    """The law of one level of siblings `tokens`, and of its first token."""
    nodes = len(tokens) + 1
    given_tree = GivenTree(
        tree=Tree((0,) * nodes, (0, *tokens)),
        target=np.array([[float(value) for value in p]] * nodes),
        proposal=np.array([[float(value) for value in q]] * nodes) if sampled else np.eye(len(p))[[0, *tokens]],
        sampling=Sampling(1.0, rule=rule, draws=draws),
    )
    law = given_tree_law(given_tree, sampled)
    return law, [sum(mass for block, mass in law.items() if block[0] == token) for token in range(len(p))]


def test_a_greedy_draft_whose_soft_law_is_handed_over() -> None:
    """The published counter-example: the argmax is accepted with .6/.8, and the rest goes to the other token."""
    law, first = single([0.6, 0.4], [0.8, 0.2], (0,), True, Rule("chain"))
    assert first == pytest.approx([0.75, 0.25], abs=1e-15)
    assert law[(1,)] == pytest.approx(0.25, abs=1e-15)
    exact = round_law(
        Shape((0, 0)), lambda path: [F(3, 5), F(2, 5)], lambda path, k: [F(4, 5), F(1, 5)], Rule("chain"), "top-k",
        program=soft,
    )  # fmt: skip
    assert total_variation(exact, lambda path: [F(3, 5), F(2, 5)], 2) == F(3, 20)
    assert expected_length(exact) == F(7, 4)


def soft(chance: Chance, rule: Rule, draws: str, tree: Tree, target: Any, *arguments: Any) -> Answer:
    return acceptance.chain(chance, rule, draws, tree, target, [[F(4, 5), F(1, 5)]] * 2, True)


@pytest.mark.parametrize("seed", range(12))
def test_the_thresholds_of_target_only(seed: int) -> None:
    """TV = P_k(1/t - 1) while nothing saturates, max(1 - P_j, P_{j-1}(1/t - 1)) from the child that does."""
    p = Tables(5, 3 * seed + 1).target(())
    tokens = (1, 0, 3)
    masses = [sum(p[token] for token in tokens[: count + 1]) for count in range(3)]

    def law_of(**thresholds: float) -> Number:
        law = round_law(
            Shape((0, 0, 0, 0)), lambda path: p, lambda path, k: p, Rule("target-only", **thresholds), "top-k",
            tokens=(0, *tokens),
        )  # fmt: skip
        return total_variation(law, lambda path: p, 1)

    assert law_of() == 0
    assert law_of(threshold_single=7.0) == 0
    for t in (0.875, 0.5, 0.25):
        saturated = [j for j in range(3) if masses[j] >= t]
        if saturated:
            j = saturated[0]
            expected = max(1 - masses[j], (masses[j - 1] if j else 0) * (1 / F(t) - 1))
        else:
            expected = masses[-1] * (1 / F(t) - 1)
        assert law_of(threshold_acc=t) == expected
        forced = [j for j in range(3) if p[tokens[j]] >= t]
        assert law_of(threshold_single=t) == (1 - masses[forced[0]] if forced else 0)
    covered = masses[-1]
    assert law_of(threshold_acc=1.25) == (covered * F(1, 5) if covered < 1 else 0) or covered == 1


def test_repeated_siblings_bias_target_only_and_no_other() -> None:
    p = [0.5, 0.2, 0.15, 0.1, 0.05]
    _, distinct = single(p, p, (0, 1), False, Rule("target-only"), "top-k")
    assert distinct == pytest.approx(p, abs=1e-15)
    _, twice = single(p, p, (0, 0), False, Rule("target-only"), "top-k")
    assert twice == pytest.approx([1, 0, 0, 0, 0], abs=1e-15)
    _, twice = single(p, p, (1, 1), False, Rule("target-only"), "top-k")
    assert twice == pytest.approx([0.375, 0.4, 0.1125, 0.075, 0.0375], abs=1e-15)
    for rule in ("multi-round", "eagle", "specinfer"):
        _, token_law = single(p, p, (1, 1), False, Rule(rule), "top-k")
        assert token_law == pytest.approx(p, abs=1e-15)


def test_how_often_siblings_are_accepted() -> None:
    """Always rejecting is lossless too: sum min(p, q) of one draw is accepted, and the covered mass of certain ones."""
    for seed in range(8):
        tables = Tables(4, seed)
        p, q = tables.target(()), tables.draft((), 0)
        law = round_law(Shape((0, 0)), tables.target, tables.draft, Rule("chain"), "with-replacement")
        assert expected_length(law) == 1 + sum(min(a, b) for a, b in zip(p, q, strict=True))
        for rule in ("multi-round", "eagle", "target-only", "specinfer"):
            law = round_law(Shape((0, 0, 0)), tables.target, tables.draft, Rule(rule), "top-k")
            best = sorted(range(4), key=lambda token: (-q[token], token))[:2]
            assert expected_length(law) == 1 + sum(p[token] for token in best if q[token] > 0)


def test_block_verification_accepts_no_less_than_the_chain_rule() -> None:
    more = 0
    for seed in range(1, 25):
        tables = Tables(3, seed)
        chain, block = (
            expected_length(round_law(Shape((0, 0, 1, 2)), tables.target, tables.draft, Rule(rule), "with-replacement"))
            for rule in ("chain", "block")
        )
        assert block >= chain
        more += block > chain
    assert more > 12


# ------------------------------------------------------------------------------------------------ lossy ones


def unaware(chance: Chance, rule: Rule, draws: str, *arguments: Any) -> Answer:
    """Siblings drawn without replacement, each tried as if drawn with it."""
    return acceptance.multi_round(chance, rule, "with-replacement", *arguments)


def fresh(
    chance: Chance, rule: Rule, draws: str, tree: Tree, target: Sequence[Row], proposal: Sequence[Row], *arguments: Any
) -> Answer:
    """The chain rule for every sibling: p as it was, whatever has been rejected."""
    path = [0]
    while tree.children[path[-1]]:
        for child in tree.children[path[-1]]:
            p, q, x = target[path[-1]], proposal[child], tree.token[child]
            if chance.below("accept", child, p[x] / q[x] if q[x] else 0):
                path.append(child)
                break
        else:
            residual = acceptance.residual(target[path[-1]], proposal[tree.children[path[-1]][0]])
            return tuple(path), residual if any(residual) else list(target[path[-1]])
    return tuple(path), list(target[path[-1]])


def one_coin(chance: Chance, *arguments: Any) -> Answer:
    """The coin of a level used again below it: marginals of the first token stay exact, the joint law does not."""

    class Again:
        def below(self, kind: str, node: int, threshold: Number) -> bool:
            return chance.below(kind, 0, threshold)

        def choose(self, kind: str, node: int, weights: Sequence[Number]) -> int:
            return chance.choose(kind, node, weights)

    return acceptance.target_only(Again(), *arguments)


@pytest.mark.parametrize(
    ("rule", "draws", "program", "parent"),
    [
        (Rule("typical"), "top-k", None, BINARY),
        (Rule("ensemble"), "without-replacement", None, (0, 0, 1)),
        (Rule("fly", entropy=0.3), "without-replacement", None, (0, 0, 1)),
        (Rule("synthetic"), "without-replacement", None, (0, 0, 1)),
        (Rule("target-only", threshold_acc=0.9), "top-k", None, BINARY),
        (Rule("target-only", threshold_acc=1.1), "top-k", None, BINARY),
        (Rule("target-only", threshold_single=0.25), "top-k", None, BINARY),
        (Rule("target-only"), "with-replacement", None, (0, 0, 0, 1, 1)),
        (Rule("specinfer"), "without-replacement", None, (0, 0, 0, 1, 1)),
        (Rule(), "without-replacement", unaware, (0, 0, 0)),
        (Rule(), "with-replacement", fresh, (0, 0, 0)),
        (Rule(), "top-k", one_coin, (0, 0, 0, 1, 1)),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "name", None)),
)
def test_a_lossy_rule_is_seen(rule: Rule, draws: str, program: Program | None, parent: Path) -> None:
    biased = 0
    for seed in range(12):
        tables = Tables(4, seed)
        lazily = program is None
        law = round_law(
            Shape(parent), tables.target, tables.draft, rule, draws, program=program, whole_tree_first=not lazily
        )
        assert sum(law.values()) == 1
        off = tv(law, tables, parent)
        assert off == by_hand(law, tables.target, 4, height(parent))
        contributions = sorted_biases(law, tables.target, height(parent))
        assert [bias.weight for bias in contributions] == sorted((bias.weight for bias in contributions), reverse=True)
        assert (contributions[0].weight > 0) == (off > 0)
        biased += off > 0
    assert biased >= 3


def by_hand(law: Law, continuation: Callable[[Path], Row], vocab: int, tokens: int) -> Any:
    """Total variation of the completed law by visiting every sequence."""
    off: Any = 0
    for sequence in itertools.product(range(vocab), repeat=tokens):
        steps = [continuation(sequence[:index])[token] for index, token in enumerate(sequence)]
        off += abs(
            sum(law.get(sequence[:length], 0) * math.prod(steps[length:]) for length in range(tokens + 1))
            - math.prod(steps)
        )
    return off / 2


def test_total_variation_of_laws_that_no_rule_made() -> None:
    """Mass on a token of probability 0, and below it; a block that is too long; a law that says nothing at all."""
    p = [F(1, 2), F(1, 2), F(0)]
    laws: tuple[Law, ...] = (
        {(2,): F(1)},
        {(2, 0): F(1, 2), (0,): F(1, 2)},
        {(0,): F(1, 4), (0, 1): F(1, 4), (1, 2): F(1, 4), (1, 0, 1): F(1, 4)},
        {(0,): F(1)},
    )
    for law in laws:
        for tokens in (max(map(len, law)), max(map(len, law)) + 1):
            assert total_variation(law, lambda path: p, tokens) == by_hand(law, lambda path: p, 3, tokens)
    assert total_variation({(2,): F(1)}, lambda path: p, 3) == 1
    assert total_variation({(0, 0, 1): F(1, 2), (1, 1): F(1, 2)}, lambda path: p, 1) == 0
    assert distance({(0,): F(1)}, {(1,): F(1, 3), (0,): F(2, 3)}) == F(1, 3)
    assert expected_length({(0,): F(1, 2), (0, 1, 1): F(1, 2)}) == 2


def test_where_a_bias_comes_from() -> None:
    p = [F(3, 10), F(7, 10)]
    (first, second) = sorted_biases({(1,): F(3, 10), (1, 0): F(4, 10), (0,): F(3, 10)}, lambda path: p, 2)
    assert (first.context, first.reach, first.law, first.total_variation) == ((1,), F(4, 10), [1, 0], F(7, 10))
    assert first.weight == F(28, 100)
    assert (second.context, second.reach, second.weight) == ((), 1, 0)
    # Where no block goes on, nothing follows that could be biased.
    (only,) = sorted_biases({(0,): F(3, 10), (1,): F(7, 10), (0, 1): F(0)}, lambda path: p, 2)
    assert (only.context, only.law, only.weight) == ((), p, 0)


# ------------------------------------------------------------------------------------------------ worlds


def world(seed: int, draws: str, **settings: object) -> World:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1.5, (3, 40, 4))
    sampling = replace(Sampling(0.7, draws=draws), **settings)  # type: ignore[arg-type]
    return World(Shape((0, 0, 0, 1, 1)), logits[0], logits[1:2], sampling, prompt=(3, 1))


PROCESSED: dict[str, object] = {
    "repetition_penalty": 1.5, "presence_penalty": 0.3, "frequency_penalty": 0.4, "bad_words": ((1, 2), (0, 0)),
    "min_tokens": 2, "top_k": 3, "top_p": 0.95, "min_p": 0.05,
}  # fmt: skip


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("settings", [{}, PROCESSED], ids=["plain", "processed"])
def test_a_world_is_lossless_in_its_processed_law(draws: str, settings: dict[str, object]) -> None:
    for seed in range(3):
        drawn_world = replace(world(seed, draws, **settings), stops=Stops(eos=(3,)))
        exact = world_law(drawn_world, exact=True, whole_tree_first=False)
        assert total_variation(exact, target_rows(drawn_world, exact=True), 3) == 0
        floats = world_law(drawn_world)
        assert total_variation(floats, target_rows(drawn_world), 3) < 1e-14
        assert distance(floats, exact) < 1e-14
        assert {type(mass) for mass in exact.values()} == {F}
        assert sum(exact.values()) == 1
        assert {type(mass) for mass in floats.values()} == {float}, "fractions only where they are asked for"
        bare = replace(drawn_world, sampling=Sampling(0.7, draws=draws))
        if settings:
            assert total_variation(floats, target_rows(bare), 3) > 0.05
            assert all(mass == 0 for block, mass in floats.items() if 3 in block[:2])


def test_a_world_with_given_tokens_ignores_its_draft() -> None:
    drawn_world = replace(world(0, "without-replacement"), tokens=(1, 2, 2, 0, 3))
    law = world_law(drawn_world)
    assert total_variation(law, target_rows(drawn_world), 3) < 1e-15
    assert distance(law, world_law(replace(drawn_world, drafts=-3 * drawn_world.drafts))) == 0
    # Nodes 1 and 2 are twins: the children of the second are out of reach, and eagle alone takes them for one.
    swapped = replace(drawn_world, shape=Shape((0, 0, 0, 2, 2)))
    assert max(map(len, world_law(swapped))) == 2
    assert max(map(len, world_law(swapped.with_sampling(replace(drawn_world.sampling, rule=Rule("eagle")))))) == 3


def test_a_rule_is_told_whether_tokens_were_drawn() -> None:
    """And what named them: the draft's law after each node's parent, or certainty."""
    calls: list[tuple[bool, list[list[Number]]]] = []

    def recording_rule(
        chance: Chance, rule: Rule, draws: str, tree: Tree, target: Any, proposal: Any, sampled: bool
    ) -> tuple[Path, list[Number]]:
        calls.append((sampled, [list(row) for row in proposal[1:]]))
        return acceptance.multi_round(chance, rule, draws, tree, target, proposal, sampled)

    drawn_world = world(1, "without-replacement")
    world_law(drawn_world, program=recording_rule)
    assert {sampled for sampled, _ in calls} == {True}
    rows = [pytest.approx(softmax(row / 0.7).tolist(), abs=1e-15) for row in drawn_world.drafts[0]]
    for _, proposal in calls:
        assert proposal[:2] == [rows[0]] * 2
        assert proposal[2] == proposal[3]
        assert proposal[2] in [rows[drawn_world.row((token,))] for token in range(4)]
    for certain in (world(1, "top-k"), replace(drawn_world, tokens=(1, 0, 1, 2, 3))):
        calls.clear()
        world_law(certain, program=recording_rule)
        assert {sampled for sampled, _ in calls} == {False}
        assert all(sorted(row) == [0, 0, 0, 1] for _, proposal in calls for row in proposal)


def test_a_given_law_is_the_average_over_drafts() -> None:
    """For every fixed tree target-only and eagle are lossless; p/q rules are so only on average over trees."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    mixed: dict[str, Law] = {}
    for rule, x, y in itertools.product(("multi-round", "target-only", "eagle"), range(3), range(3)):
        if x != y:
            law, first = single(p.tolist(), q.tolist(), (x, y), True, Rule(rule))
            assert (max(abs(np.array(first, dtype=float) - p)) < 1e-15) == (rule != "multi-round")
            for block, mass in law.items():
                sums = mixed.setdefault(rule, {})
                sums[block] = sums.get(block, 0) + mass * float(q[x] * q[y] / (1 - q[x]))
    for law in mixed.values():
        assert total_variation(law, lambda path: p.tolist(), 2) < 1e-15
    given_tree = GivenTree(Tree((0,), (0,)), p[None], p[None], Sampling(1.0))
    exact = given_tree_law(given_tree, True, exact=True)
    assert sum(exact.values()) == 1
    assert all(isinstance(mass, F) for mass in exact.values())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda tree: 1 / 0, "rule: raised ZeroDivisionError: division by zero"),
        (lambda tree: ((1,), [1.0] * 4), "does not begin at the root"),
        (lambda tree: ((0, 3), [1.0] * 4), "3 is no child of the node before it"),
        (lambda tree: ((0,), [1.0] * 5), "answered 5 weights for a vocabulary of 4"),
        (lambda tree: ((0,), [float("nan")] * 4), "weights that are no law"),
        (lambda tree: ((0,), [2.0, -1.0, 0.0, 0.0]), "weights that are no law"),
        (lambda tree: ((0,), [0.0] * 4), "weights that are no law"),
        (lambda tree: None, "answered None, not (path of node indices, weights as fractions or floats)"),
        (lambda tree: (0, [1.0] * 4), "answered (0, [1.0, 1.0, 1.0, 1.0]), not (path"),
        (lambda tree: ((0.0,), [1.0] * 4), "answered ((0.0,), [1.0, 1.0, 1.0, 1.0]), not (path"),
        (lambda tree: ((0,), ["x"] * 4), "answered ((0,), ['x', 'x', 'x', 'x']), not (path"),
        (lambda tree: ((0,), 4), "answered ((0,), 4), not (path"),
    ],
)
def test_a_rule_of_the_users_own_that_errs(answer: Callable[[Tree], Any], message: str) -> None:
    def own_rule(chance: Chance, rule: Rule, draws: str, tree: Tree, *arguments: Any) -> Answer:
        result: Answer = answer(tree)
        return result

    with pytest.raises(Malformed, match=re.escape(message)) as raised:
        world_law(world(0, "top-k"), program=own_rule)
    assert "\n" not in str(raised.value)
