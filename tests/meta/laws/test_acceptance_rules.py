"""The rules decision by decision, coins set by hand; and chance itself against a grid over all coins."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction as F
from typing import Any

import numpy as np
import pytest

from specverify.reference import rules
from specverify.reference.oracle import acceptance
from specverify.reference.oracle.acceptance import Row, verify
from specverify.reference.oracle.coin_source import Chance, Number, TapeChance, enumerate_law
from specverify.reference.rules import Rule
from specverify.reference.tape import place, stride
from specverify.reference.trace import Accepted
from specverify.reference.tree import Tree

P = [F(5, 10), F(3, 10), F(2, 10), F(0)]
Q = [F(2, 10), F(2, 10), F(3, 10), F(3, 10)]
HALF = [F(0), F(0), F(1, 2), F(1, 2)]
LAST = [F(1, 10), F(2, 10), F(3, 10), F(4, 10)]


def tape_chance(nodes: int, **coins: float) -> TapeChance:
    """A tape of .999 where nothing else is said: accept_3=.5 is the coin (accept, 3)."""
    tape = np.full(stride(nodes), 0.999)
    for name, coin in coins.items():
        kind, node = name.split("_")
        tape[place(kind, int(node), nodes)] = coin
    return TapeChance(tape, nodes)


def decide(
    rule: Rule | str, tree: Tree, draws: str = "top-k", q: Row | None = None, after: Row = LAST, **coins: float
) -> tuple[tuple[int, ...], list[Number], list[tuple[str, int]]]:
    """Path, last weights, coins used: p is P at the root and `after` elsewhere; without q the siblings are certain."""
    rule = Rule(rule) if isinstance(rule, str) else rule
    chance = tape_chance(len(tree), **coins)
    target = [P] + [after] * (len(tree) - 1)
    certain = [[F(int(index == token)) for index in range(4)] for token in tree.token]
    path, weights = verify(chance, rule, draws, tree, target, [q] * len(tree) if q else certain, q is not None)
    return path, weights, chance.used_coins


def accepts(*nodes: int) -> list[tuple[str, int]]:
    return [("accept", node) for node in nodes]


@pytest.mark.parametrize("vocab", [4, 4096, 4097])
def test_greedy_takes_the_lowest_of_equals_and_the_first_of_twins(vocab: int) -> None:
    rows = np.full((5, vocab), -1.0)
    for node, best in enumerate([(1, 3), (2,), (0, 1, 2), (3,), (0, 3)]):
        rows[node, list(best)] = 2.0
    # Both children of the root carry 1; the second child of node 1 is the 2 that it wants.
    tree = Tree((0, 0, 0, 1, 1), (9, 1, 1, 0, 2))
    assert acceptance.greedy_walk(tree, rows) == Accepted((0, 1, 4), 0)
    assert acceptance.greedy_walk(Tree((0, 0), (1, 3)), rows) == Accepted((0,), 1)
    assert [acceptance.greedy_token(row) for row in rows] == [1, 2, 0, 3, 0]


def test_every_rule_has_a_program() -> None:
    assert acceptance.RULES.keys() == rules.RULES.keys()


def test_chain() -> None:
    tree = Tree((0, 0, 1), (0, 2, 0))
    assert decide("chain", tree, q=Q, accept_1=0.67) == ((0,), [F(3, 4), F(1, 4), 0, 0], accepts(1))
    assert decide("chain", tree, q=Q, accept_1=0.66) == ((0, 1), [0, 0, 0, 1], accepts(1, 2))
    assert decide("chain", tree, q=Q, accept_1=0.66, accept_2=0.49) == ((0, 1, 2), LAST, accepts(1, 2))
    # Half-open: a coin at the threshold rejects, and one at 0 accepts nothing that the target never says.
    half = Tree((0, 0), (0, 3))
    assert decide("chain", half, q=Q, accept_1=0.0)[0] == (0,)
    assert decide("chain", Tree((0, 0), (0, 2)), q=[F(0), F(3, 5), F(2, 5), F(0)], accept_1=0.5)[0] == (0,)
    below = float(np.nextafter(0.5, 0.0))
    assert decide("chain", Tree((0, 0), (0, 2)), q=[F(0), F(3, 5), F(2, 5), F(0)], accept_1=below)[0] == (0, 1)
    # What the draft could not have drawn is not accepted.
    assert decide("chain", Tree((0, 0), (0, 0)), q=[F(0), F(1), F(0), F(0)], accept_1=0.0)[0] == (0,)


def test_multi_round_subtracts_what_was_rejected() -> None:
    """After token 2, drawn from Q: p = (3/4, 1/4, 0, 0). Drawn again, it leaves (11/12, 1/12, 0, 0)."""
    again = Tree((0, 0, 0, 0), (0, 2, 2, 1))
    path, weights, used = decide("multi-round", again, "with-replacement", Q, accept_2=0.0)
    assert (path, used) == ((0,), accepts(1, 2, 3))
    assert weights == [1, 0, 0, 0]
    assert decide("multi-round", again, "with-replacement", Q, accept_3=0.41)[0] == (0, 3)  # (1/12) / .2
    assert decide("multi-round", again, "with-replacement", Q, accept_3=0.42)[0] == (0,)
    # Without replacement token 1 comes from (2, 2, 0, 3)/7.
    two = Tree((0, 0, 0), (0, 2, 1))
    assert decide("multi-round", two, "with-replacement", Q)[0] == (0, 2)
    assert decide("multi-round", two, "without-replacement", Q, accept_2=0.874)[0] == (0, 2)
    assert decide("multi-round", two, "without-replacement", Q, accept_2=0.876)[:2] == ((0,), [1, 0, 0, 0])
    assert decide("multi-round", again, "without-replacement", Q, accept_2=0.0)[:2] == ((0,), [1, 0, 0, 0])


def test_multi_round_with_certain_siblings() -> None:
    tree = Tree((0, 0, 0), (0, 1, 0))
    assert decide("multi-round", tree, accept_1=0.29)[0] == (0, 1)
    assert decide("multi-round", tree, accept_1=0.31, accept_2=0.714)[0] == (0, 2)
    assert decide("multi-round", tree, accept_1=0.31, accept_2=0.715) == ((0,), [0, 0, 1, 0], accepts(1, 2))
    # The second of two equal siblings has nothing left to claim.
    assert decide("multi-round", Tree((0, 0, 0), (0, 1, 1)), accept_2=0.0)[1] == [F(5, 7), 0, F(2, 7), 0]


def test_eagle_takes_equal_prefixes_for_one() -> None:
    """Nodes 1 and 3 are twins: the children of both are candidates once their token is accepted.

    The path goes to the accepted child through its own parent.
    """
    tree = Tree((0, 0, 0, 0, 3, 1, 3), (0, 1, 2, 1, 3, 0, 0))
    assert decide("eagle", tree) == ((0,), [1, 0, 0, 0], accepts(1, 2))
    path, weights, used = decide("eagle", tree, accept_1=0.2)
    assert (path, used) == ((0, 1), accepts(1, 4, 5))
    assert weights == [0, F(2, 5), F(3, 5), 0]
    assert decide("eagle", tree, accept_1=0.2, accept_4=0.39) == ((0, 3, 4), LAST, accepts(1, 4))
    assert decide("eagle", tree, accept_1=0.2, accept_5=0.16)[0] == (0, 1, 5)
    assert decide("eagle", tree, accept_1=0.2, accept_5=0.17)[0] == (0, 1)


def test_specinfer_tries_siblings_in_random_order() -> None:
    tree = Tree((0, 0, 0, 0), (0, 0, 1, 2))
    path, weights, used = decide("specinfer", tree, order_1=0.34, order_2=0.5, accept_3=0.3)
    # First sibling 2, then of (1, 3) the second, node 3: its P is 2/7 after token 1 has gone.
    assert used == [("order", 1), ("accept", 2), ("order", 2), ("accept", 3), ("accept", 1)]
    assert (path, weights) == ((0, 1), LAST)  # no other token is left
    outside = Tree((0, 0, 0), (0, 1, 2))
    assert decide("specinfer", outside, order_1=0.5, accept_1=0.38)[:2] == ((0,), [1, 0, 0, 0])
    assert decide("specinfer", outside, order_1=0.49, accept_2=0.28)[0] == (0, 2)
    assert decide("specinfer", tree, order_1=0.34, order_2=0.5, accept_3=0.28)[0] == (0, 3)
    assert decide("specinfer", tree, order_1=0.32, accept_1=0.49)[0] == (0, 1)
    # Against the law of its own draft.
    two = Tree((0, 0, 0), (0, 2, 2))

    def path_of(**coins: float) -> tuple[int, ...]:
        return verify(tape_chance(3, **coins), Rule("specinfer"), "with-replacement", two, [P] * 3, [Q, Q, HALF], True)[
            0
        ]

    assert path_of(order_1=0.1, accept_1=0.66) == (0, 1)
    assert path_of(order_1=0.1, accept_1=0.67, accept_2=0.0) == (0,)
    assert path_of(order_1=0.6, accept_2=0.39) == (0, 2)
    assert path_of(order_1=0.6, accept_2=0.41, accept_1=0.0) == (0,)


def test_target_only_has_one_coin_a_level() -> None:
    tree = Tree((0, 0, 0, 2), (0, 1, 2, 3))
    assert decide("target-only", tree, accept_0=0.29) == ((0, 1), LAST, accepts(0))
    assert decide("target-only", tree, accept_0=0.49) == ((0, 2), [F(1, 6), F(2, 6), F(3, 6), 0], accepts(0, 2))
    assert decide("target-only", tree, accept_0=0.49, accept_2=0.39)[0] == (0, 2, 3)
    assert decide("target-only", tree, accept_0=0.5) == ((0,), [1, 0, 0, 0], accepts(0))
    assert decide(Rule("target-only", threshold_acc=0.5), tree, accept_0=0.59)[0] == (0, 1)
    assert decide(Rule("target-only", threshold_single=0.2), tree)[0] == (0, 1)
    assert decide(Rule("target-only", threshold_single=0.5), Tree((0, 0), (0, 0)))[0] == (0, 1)  # at it is enough
    assert decide(Rule("target-only", threshold_single=0.3125), tree, accept_2=0.0)[0] == (0,)
    assert decide("target-only", Tree((0, 0, 0), (0, 1, 1)), accept_0=0.59)[0] == (0, 2)


def test_typical_takes_the_longest_then_the_likeliest_path() -> None:
    """exp(-H) of P is .357, of LAST .278; epsilon .3 and delta .9 make the limits .3 and .25."""
    rule = Rule("typical", epsilon=0.3, delta=0.9)
    assert math.exp(sum(float(p) * math.log(p) for p in P if p)) == pytest.approx(0.357, abs=5e-4)
    assert decide(rule, Tree((0, 0, 0), (0, 0, 1))) == ((0, 1), LAST, [])
    # .3 is not above .3, even if a longer path begins there.
    assert decide(rule, Tree((0, 0, 0, 2), (0, 0, 1, 3)))[0] == (0, 1)
    assert decide(Rule("typical", epsilon=0.29, delta=0.9), Tree((0, 0, 0, 2), (0, 0, 1, 3)))[0] == (0, 2, 3)
    # The entropy's limit: LAST admits .3 below .25 and not .2.
    assert decide(rule, Tree((0, 0, 1, 1, 1), (0, 0, 1, 2, 3)))[0] == (0, 1, 4)
    assert decide(rule, Tree((0, 0, 1, 1), (0, 0, 1, 2)))[0] == (0, 1, 3)
    assert decide(rule, Tree((0, 0, 1), (0, 0, 1)))[0] == (0, 1)
    # Equally long and likely: the first end in row order.
    assert decide(rule, Tree((0, 0, 0, 2, 1), (0, 0, 0, 3, 3)))[0] == (0, 2, 3)


def accepts_typically(rule: Rule, law: Row) -> bool:
    """Whether token 1 is accepted below a root whose law this is."""
    tree = Tree((0, 0), (0, 1))
    path, _ = acceptance.typical(tape_chance(2), rule, "top-k", tree, [law, law], [], False)
    return path == (0, 1)


def test_typical_accepts_no_token_at_its_threshold() -> None:
    """The source's rule is p > min(epsilon, ...), whatever side of its fraction the float of epsilon lies on."""
    for thousandths in range(1, 1000):
        p, epsilon = F(thousandths, 1000), thousandths / 1000
        assert not accepts_typically(Rule("typical", epsilon=epsilon, delta=60.0), [1 - p, p])
        assert accepts_typically(Rule("typical", epsilon=epsilon - 1e-9, delta=60.0), [1 - p, p])
    # exp(-entropy) of a uniform law is exactly the probability of each token.
    assert not accepts_typically(Rule("typical", epsilon=0.9, delta=1.0), [F(1, 3)] * 3)


def test_block_verification_by_hand() -> None:
    """Tokens 2, 0 with q = Q: pi_1 = 2/3, and S = sum relu(2/3 LAST - Q) = 0; pi_2 = 2/3 * .1/.2 = 1/3."""
    tree = Tree((0, 0, 1), (0, 2, 0))
    assert decide("block", tree, q=Q, accept_1=0.0) == ((0,), [F(3, 4), F(1, 4), 0, 0], accepts(1, 2))
    assert decide("block", tree, q=Q, accept_2=0.33) == ((0, 1, 2), LAST, accepts(1, 2))
    assert decide("block", tree, q=Q, accept_2=0.34)[0] == (0,)
    # Token 3 of LAST: S = relu(2/3 * 7/10 - 3/10) = 1/6, h_1 = (1/6) / (1/6 + 1/3) = 1/3.
    after = [F(1, 10), F(1, 10), F(1, 10), F(7, 10)]
    assert decide("block", tree, q=Q, after=after, accept_1=0.33) == ((0, 1), [0, 0, 0, 1], accepts(1, 2))
    assert decide("block", tree, q=Q, after=after, accept_1=0.34)[0] == (0,)


def test_traversal_tries_the_leaves_first() -> None:
    """Token 2 below the root has 2/3, token 0 below it 2/3 * .1/.2 = 1/3; then its parent relu(2/3 LAST - Q) = 0."""
    tree = Tree((0, 0, 1, 0), (0, 2, 0, 1))
    assert decide("traversal", tree, "with-replacement", Q, accept_2=0.33) == ((0, 1, 2), LAST, accepts(2))
    # The root's law without token 2 is (3/4, 1/4, 0, 0): token 1 has (1/4) / .2, cut to 1.
    missed = decide("traversal", tree, "with-replacement", Q, accept_2=0.34, accept_1=0.0)
    assert missed == ((0, 3), LAST, accepts(2, 1, 3))
    # Token 3 of LAST leaves 1/6 of the weight: h = (1/6) / (1/6 + 1/3), as block verification has it.
    after = [F(1, 10), F(1, 10), F(1, 10), F(7, 10)]
    path, weights, used = decide("traversal", tree, "with-replacement", Q, after, accept_2=0.34, accept_1=0.33)
    assert (path, weights, used) == ((0, 1), [0, 0, 0, 1], accepts(2, 1))
    # Without replacement the second sibling comes from q without token 2: (1/4) / (2/7).
    two = Tree((0, 0, 0), (0, 2, 1))
    assert decide("traversal", two, "without-replacement", Q, accept_2=0.874)[0] == (0, 2)
    assert decide("traversal", two, "without-replacement", Q, accept_2=0.876)[:2] == ((0,), [1, 0, 0, 0])


@pytest.mark.parametrize("tokens", [(0, 2, 0), (0, 2, 3), (0, 1, 2)])
def test_traversal_of_a_chain_is_block_verification(tokens: tuple[int, ...]) -> None:
    tree = Tree((0, 0, 1), tokens)

    def law(name: str) -> dict[tuple[tuple[int, ...], tuple[Number, ...]], Number]:
        def program(chance: Chance) -> tuple[tuple[int, ...], tuple[Number, ...]]:
            path, weights = verify(chance, Rule(name), "with-replacement", tree, [P, LAST, LAST], [Q] * 3, True)
            return path, tuple(weights)

        return enumerate_law(program)

    assert law("traversal") == law("block")


def test_sample_and_match_emits_the_token_that_it_drew() -> None:
    """P ends at .5, .8 and 1; LAST at .1, .3, .6 and 1."""
    tree = Tree((0, 0, 0, 2), (0, 2, 1, 3))
    assert decide("sample-and-match", tree, accept_0=0.49) == ((0,), [1, 0, 0, 0], accepts(0))
    assert decide("sample-and-match", tree, accept_0=0.8) == ((0, 1), LAST, accepts(0))
    assert decide("sample-and-match", tree, accept_0=0.5, accept_2=0.61) == ((0, 2, 3), LAST, accepts(0, 2))
    assert decide("sample-and-match", tree, accept_0=0.5, accept_2=0.31) == ((0, 2), [0, 0, 1, 0], accepts(0, 2))
    assert decide("sample-and-match", Tree((0, 0, 0), (0, 1, 1)), accept_0=0.5)[0] == (0, 1)


def test_a_mixture_of_target_and_draft_accepts() -> None:
    """Token 2 has p/q = 2/3: by half of the target, 1/2 + 1/2 * 2/3 = 5/6. Token 3 has p = 0."""
    half = Rule("ensemble", weight=0.5)
    assert decide(half, Tree((0, 0), (0, 2)), q=Q, accept_1=0.83)[0] == (0, 1)
    assert decide(half, Tree((0, 0), (0, 2)), q=Q, accept_1=0.84)[:2] == ((0,), [F(3, 4), F(1, 4), 0, 0])
    assert decide(half, Tree((0, 0), (0, 3)), q=Q, accept_1=0.0)[0] == (0,)
    assert decide(Rule("ensemble", weight=1.0), Tree((0, 0), (0, 2)), q=Q, accept_1=0.67)[0] == (0,)


def test_a_rate_accepts_whatever_the_laws_say() -> None:
    often = Rule("synthetic", acceptance_rate=0.75)
    assert decide(often, Tree((0, 0, 1), (0, 2, 0)), q=Q, accept_1=0.74, accept_2=0.74)[0] == (0, 1, 2)
    assert decide(often, Tree((0, 0), (0, 0)), q=Q, accept_1=0.75)[:2] == ((0,), [F(3, 4), F(1, 4), 0, 0])
    assert decide(often, Tree((0, 0), (0, 3)), q=Q, accept_1=0.0)[0] == (0,)


def test_an_uncertain_rejection_is_lifted_by_the_nodes_behind_it() -> None:
    """The entropy of P is 1.03, of LAST 1.28; token 2 is rejected at .67, token 0 of LAST accepted below .5."""
    chain = Tree((0, 0, 1, 2), (0, 2, 0, 0))
    lifted = Rule("fly", entropy=1.0, window=1)
    assert decide(lifted, chain, q=Q, accept_1=0.67, accept_2=0.49) == ((0, 1, 2), [0, 0, 0, 1], accepts(1, 2, 3))
    assert decide(Rule("fly", entropy=1.1, window=1), chain, q=Q, accept_1=0.67, accept_2=0.49)[0] == (0,)
    # Both nodes of a longer window must be accepted, and both must be there.
    longer = Rule("fly", entropy=1.0, window=2)
    assert decide(longer, chain, q=Q, accept_1=0.67, accept_2=0.49)[0] == (0,)
    assert decide(longer, chain, q=Q, accept_3=0.49, accept_1=0.67, accept_2=0.49) == (
        (0, 1, 2, 3),
        LAST,
        accepts(1, 2, 3),
    )
    assert decide(longer, Tree((0, 0, 1), (0, 2, 0)), q=Q, accept_1=0.67, accept_2=0.49)[:2] == (
        (0,),
        [F(3, 4), F(1, 4), 0, 0],
    )
    # Token 3 has no probability in P.
    assert decide(lifted, Tree((0, 0, 1), (0, 3, 0)), q=Q, accept_1=0.0, accept_2=0.49)[0] == (0,)


@pytest.mark.parametrize("name", rules.RULES)
def test_the_bare_root_consumes_nothing(name: str) -> None:
    assert decide(name, Tree((0,), (0,))) == ((0,), P, [])


@pytest.mark.parametrize("name", sorted(rules.RULES.keys() - {"typical", "sample-and-match"}))
def test_nothing_left_means_the_targets_own_row(name: str) -> None:
    """p = q in floats, one ulp of rounding apart: the rejection cannot happen, yet a coin may say so."""
    p = [1.0 - 2.0**-53, 2.0**-60, 0.0]
    for tree in (Tree((0, 0), (0, 0)), Tree((0, 0, 0), (0, 0, 1))):
        if Rule(name).refuses(tree.branches):
            continue
        rows = [[1.0, 0.0, 0.0], *[p] * (len(tree) - 1)]
        rows[0] = [1.0 - 2.0**-53, 0.0, 0.0]
        path, weights = verify(
            tape_chance(len(tree), accept_0=1 - 2.0**-53, accept_1=1 - 2.0**-53),
            Rule(name), "with-replacement", tree, rows, [[1.0, 0.0, 0.0]] * len(tree), True,
        )  # fmt: skip
        assert (path, weights) == ((0,), rows[0])


# ------------------------------------------------------------------------------------------------ chance


def test_taped_coins_lie_in_their_places() -> None:
    chance = TapeChance(np.arange(10) / 10, 3)
    assert chance.margin == math.inf
    assert not chance.below("accept", 1, 0.7)  # place 7: .7, half-open
    assert chance.margin == 0.0
    assert chance.below("accept", 2, F(81, 100))
    assert chance.choose("draft", 1, [0, 1, 9, 0]) == 2  # .1, at the edge
    assert chance.choose("draft", 0, [0, 0, 1, 1]) == 2  # coin 0 never takes weight 0
    assert chance.choose("order", 0, [1, 1]) == 0
    assert chance.choose("bonus", 2, [0.1, 0.79, 0.0, 0.11]) == 3
    assert chance.below("bonus", 0, 1)
    assert chance.used_coins == [("accept", 1), ("accept", 2), ("draft", 1), ("draft", 0), ("order", 0), ("bonus", 0)]
    alone = TapeChance(np.arange(10) / 10, 3)
    assert alone.choose("bonus", 0, [2, 3, 3]) == 2
    assert alone.margin == pytest.approx(0.9 - 5 / 8)
    assert alone.below("accept", 0, 0.625)
    assert alone.margin == pytest.approx(0.025)


def test_the_largest_coin_takes_the_last_likely_index_however_sums_round() -> None:
    weights = [0.1] * 10 + [0.0]
    chance = TapeChance(np.full(4, float(np.nextafter(1.0, 0.0))), 1)
    assert chance.choose("bonus", 0, weights) == 9


@pytest.mark.parametrize("ask", [lambda program: program(TapeChance(np.zeros(4), 1)), enumerate_law])
def test_nothing_to_choose(ask: Callable[[Callable[[Chance], int]], object]) -> None:
    with pytest.raises(ValueError, match="no weight is positive"):
        ask(lambda chance: chance.choose("draft", 0, [0, 0]))


def test_a_threshold_that_is_no_number() -> None:
    with pytest.raises(ValueError, match="NaN"):
        enumerate_law(lambda chance: chance.below("accept", 0, float("nan")))


def test_a_law_forks_no_decision_of_probability_zero() -> None:
    runs = []

    def program(chance: Chance) -> tuple[bool, ...]:
        runs.append(1)
        sure = chance.below("accept", 0, 1), chance.below("accept", 0, 0), chance.below("accept", 0, 1.5)
        return (*sure, chance.below("accept", 1, F(1, 3)), chance.below("accept", 1, F(1, 2)))

    law = enumerate_law(program)
    assert law == {
        (True, False, True, True, True): F(1, 3),
        (True, False, True, False, True): F(1, 6),
        (True, False, True, False, False): F(1, 2),
    }
    assert len(runs) == 3


def test_a_law_against_a_grid_over_all_coins() -> None:
    """Thresholds are multiples of 1/24, coins the midpoints of 24 cells: counting cells is the law, with no forking."""

    def program(chance: Chance) -> tuple[Any, ...]:
        first = chance.choose("draft", 1, [1, 0, 2, 3])
        if chance.below("accept", 1, F(first + 1, 6)):
            return (first, "again", chance.below("accept", 1, F(1, 8)), chance.choose("draft", 1, [3, 1]))
        return (first, chance.choose("accept", 1, [F(1, 24), F(11, 24), F(1, 2)]), chance.below("bonus", 7, F(3, 8)))

    def by_cells(u: float, v: float, w: float) -> tuple[Any, ...]:
        first = 0 if u < 4 else 2 if u < 12 else 3
        if v < 4 * (first + 1):
            return (first, "again", v < 3, 0 if u < 18 else 1)
        return (first, 0 if v < 1 else 1 if v < 12 else 2, w < 9)

    counted = Counter(by_cells(*(cell + 0.5 for cell in cells)) for cells in itertools.product(range(24), repeat=3))
    law = enumerate_law(program)
    assert law == {outcome: F(cells, 24**3) for outcome, cells in counted.items()}
    assert sum(law.values()) == 1


class Noted:
    """Passes on, noting the denominators of thresholds and edges: on their common grid each cell decides alike."""

    def __init__(self, chance: Chance, grids: dict[tuple[str, int], int]) -> None:
        self._chance, self._grids = chance, grids

    def _note(self, kind: str, node: int, edge: Number) -> None:
        self._grids[kind, node] = math.lcm(self._grids.get((kind, node), 1), F(edge).denominator)

    def below(self, kind: str, node: int, threshold: Number) -> bool:
        self._note(kind, node, threshold)
        return self._chance.below(kind, node, threshold)

    def choose(self, kind: str, node: int, weights: Sequence[Number]) -> int:
        exact = [F(weight) for weight in weights]
        for edge in itertools.accumulate(exact):
            self._note(kind, node, edge / sum(exact))
        return self._chance.choose(kind, node, weights)


@pytest.mark.parametrize("name", rules.RULES)
def test_tapes_on_a_grid_have_the_enumerated_law(name: str) -> None:
    """Each rule with its last token, on every tape of the coarsest grid on which its decisions are constant."""
    tree = Tree((0, 0, 1), (0, 0, 1)) if Rule(name).promise.chains_only else Tree((0, 0, 0), (0, 0, 1))
    p = [[F(1, 4), F(3, 4)], [F(1, 2), F(1, 2)], [F(1, 4), F(3, 4)]]
    q: list[Row] = [[F(1, 2), F(1, 2)]] * 3

    def program(chance: Chance) -> tuple[tuple[int, ...], int]:
        path, weights = verify(chance, rule, "with-replacement", tree, p, q, True)
        return path, chance.choose("bonus", 0, weights)

    # Halves: as fractions the defaults have denominators that make no grid.
    rule = Rule(name, weight=0.5, acceptance_rate=0.5)
    grids: dict[tuple[str, int], int] = {}
    law = enumerate_law(lambda chance: program(Noted(chance, grids)))
    names = sorted(grids)
    counted: Counter[tuple[tuple[int, ...], int]] = Counter()
    for cells in itertools.product(*(range(grids[coin]) for coin in names)):
        tape = np.full(stride(3), np.nan)
        for coin, cell in zip(names, cells, strict=True):
            tape[place(*coin, 3)] = (cell + 0.5) / grids[coin]
        counted[program(TapeChance(tape, 3))] += 1
    total = math.prod(grids.values())
    assert law == {outcome: F(cells, total) for outcome, cells in counted.items()}
    assert len(law) > 1
