"""Coin boxes: laws of toy samplers against closed forms, and the faults that must not get past them."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from specverify.properties.laws.enumeration import Law, TooManyCells, decisions, law
from specverify.reference.probability_world import Blocks
from specverify.reference.tape import place, stride
from specverify.reference.trace import Array
from specverify.reference.tree import Shape
from tests.tiers import first

SEVEN = Shape((0, 0, 0, 1, 1, 2, 2))
CHAIN = Shape((0, 0, 1))
Law3 = tuple[Array, Array, Array]


class Coins:
    """Coins that note between which ends nothing they decided would change."""

    def __init__(self, tapes: Array, fault: str = "") -> None:
        self.tape, self.fault = tapes, fault
        self.low, self.high = np.zeros(tapes.shape), np.ones(tapes.shape)
        self.row = np.arange(len(tapes))

    def below(self, coin_index: Array | int, threshold: Array, row_mask: Array) -> Array:
        """Whether coin `coin_index` lies below `threshold`, where `row_mask`."""
        coin_index = np.broadcast_to(coin_index, len(self.row))
        coin = self.tape[self.row, coin_index]
        yes = coin <= threshold if self.fault == "less-or-equal" else coin < threshold
        high, low = self.high[self.row, coin_index], self.low[self.row, coin_index]
        self.high[self.row, coin_index] = np.where(row_mask & yes, np.minimum(high, threshold), high)
        self.low[self.row, coin_index] = np.where(row_mask & ~yes, np.maximum(low, threshold), low)
        return np.asarray(row_mask & yes)

    def draw_token(self, coin_index: Array | int, weights: Array, row_mask: Array) -> Array:
        """The token that coin `coin_index` draws from `weights` [B, V]."""
        ends = weights.cumsum(axis=1) / weights.sum(axis=1, keepdims=True)
        last = weights.shape[1] - 1 - (weights[:, ::-1] > 0).argmax(axis=1)
        ends[np.arange(weights.shape[1]) >= last[:, None]] = 1.0
        token = np.zeros(len(weights), dtype=np.int64)
        drawn_rows = ~row_mask
        for column in range(weights.shape[1]):
            here = self.below(coin_index, ends[:, column], ~drawn_rows)
            token = np.where(here, column, token)
            drawn_rows = drawn_rows | here
        return token


class Toy:
    """Multi-round acceptance, vectorised; drafts are drawn from coins without replacement, or the tree is given.

    `table` gives target and draft laws after each path of at most two tokens: [V], [V, V], [V, V, V].
    """

    def __init__(
        self,
        shape: Shape,
        target: Law3,
        draft: Law3,
        *,
        reports: bool,
        rule: str = "multi-round",
        fault: str = "",
        tokens: tuple[int, ...] = (),
    ) -> None:
        self.shape, self.reports, self.rule, self.fault, self.tokens = shape, reports, rule, fault, tokens
        self.vocab = len(target[0])
        self.target, self.draft = (
            np.concatenate([part.reshape(-1, self.vocab) for part in parts]) for parts in (target, draft)
        )

    def __call__(self, tapes: Array) -> Blocks:
        if self.fault == "neighbour":
            tapes = np.concatenate([tapes[:, :-1], np.roll(tapes[:, -1:], 1, axis=0)], axis=1)
        nodes, batch = len(self.shape), len(tapes)
        coins = Coins(tapes, self.fault)
        every = np.ones(batch, dtype=bool)
        token = np.zeros((batch, nodes), dtype=np.int64)
        table = np.zeros((batch, nodes), dtype=np.int64)  # row of the tables after the path to each node
        draft_laws = {}  # draft law of each node before its token was drawn
        path = np.full((batch, self.shape.height + 1), -1)
        emitted = path.copy()
        path[:, 0] = 0
        current_node = np.zeros(batch, dtype=np.int64)
        residual = self.target[table[:, 0]]
        alive = every
        for depth in range(self.shape.height + 1):
            # Lazily: only children of accepted nodes are drawn.
            accepted = np.zeros(batch, dtype=bool)
            for node in (node for node in range(nodes) if self.shape.depth[node] == depth):
                here = alive & (current_node == node)
                p, q = self.target[table[:, node]], self.draft[table[:, node]]
                settled_rows = ~here
                covered = np.zeros(batch)
                for child in self.shape.children[node]:
                    if self.tokens:
                        token[:, child] = self.tokens[child]
                    else:
                        token[:, child] = coins.draw_token(place("draft", child, nodes), q, here)
                    table[:, child] = self._row(table[:, node], token[:, child], depth)
                    draft_laws[child] = q
                    masked_q = q.copy()
                    masked_q[np.arange(batch), token[:, child]] = 0
                    q = masked_q / masked_q.sum(axis=1, keepdims=True)
                for child in self.shape.children[node]:
                    x = token[:, child]
                    mass = p[np.arange(batch), x]
                    if self.rule == "target-only":
                        covered = covered + self.target[table[:, node]][np.arange(batch), x]
                        ok = coins.below(place("accept", node, nodes), covered, here & ~settled_rows)
                    else:
                        coin = place("accept", child, nodes)
                        if self.fault == "reuse" and depth:
                            coin = place("accept", self.shape.children[0][0], nodes)
                        share = np.where(settled_rows | bool(self.tokens), 1.0, draft_laws[child][np.arange(batch), x])
                        ok = coins.below(coin, np.minimum(mass / share, 1.0), here & ~settled_rows)
                    path[ok, depth + 1] = child
                    emitted[ok, depth] = x[ok]
                    current_node = np.where(ok, child, current_node)
                    accepted, lost, settled_rows = accepted | ok, here & ~settled_rows & ~ok, settled_rows | ok
                    if self.rule == "target-only" or self.tokens:  # as if surely drafted
                        remainder = p.copy()
                        remainder[np.arange(batch), x] = 0
                    else:
                        remainder = np.maximum(p - draft_laws[child], 0)
                    total = remainder.sum(axis=1, keepdims=True)
                    p = np.where((lost & (total[:, 0] > 0))[:, None], remainder / np.where(total > 0, total, 1), p)
                residual = np.where((here & ~accepted)[:, None], p, residual)
            for node in range(1, nodes):
                residual = np.where((accepted & (current_node == node))[:, None], self.target[table[:, node]], residual)
            alive = accepted
        end = (path >= 0).sum(axis=1) - 1
        emitted[np.arange(batch), end] = coins.draw_token(place("bonus", 0, nodes), residual, every)
        if not self.reports:
            return Blocks(path, emitted)
        if self.fault == "lies":
            coins.low[:, 0::5] = 0
            coins.high[:, 0::3] = 1
        return Blocks(path, emitted, coins.low, coins.high)

    def _row(self, above: Array, token: Array, depth: int) -> Array:
        return np.where(depth == 0, 1 + token, 1 + self.vocab + (above - 1) * self.vocab + token)


def tables(vocab: int, seed: int) -> Law3:
    rng = np.random.default_rng(seed)
    return tuple(rng.dirichlet(np.ones(vocab), size=(vocab,) * depth) for depth in range(3))  # type: ignore[return-value]


def complete_law(measured_law: Law, target: Law3) -> Array:
    """The law of three tokens: what was emitted, continued by the target."""
    vocab = len(target[0])
    joint = np.zeros((vocab,) * 3)
    for tokens, mass in measured_law.outcomes.items():
        if len(tokens) == 1:
            joint[tokens[0]] += mass * target[1][tokens[0]][:, None] * target[2][tokens[0]]
        elif len(tokens) == 2:
            joint[tokens] += mass * target[2][tokens]
        else:
            joint[tokens] += mass
    return joint


def distance(measured_law: Law, target: Law3) -> float:
    joint = target[0][:, None, None] * target[1][:, :, None] * target[2]
    return float(np.abs(complete_law(measured_law, target) - joint).sum() / 2)


CHAIN_COINS, SEVEN_COINS = stride(len(CHAIN)), stride(len(SEVEN))


def chain(reports: bool, fault: str = "", seed: int = 1, vocab: int = 4) -> tuple[Toy, Law3]:
    target, draft = tables(vocab, seed), tables(vocab, seed + 100)
    return Toy(CHAIN, target, draft, reports=reports, fault=fault), target


@pytest.mark.parametrize("reports", [True, False])
def test_one_coin_has_the_law_of_its_intervals(reports: bool) -> None:
    ends = np.array([0.125, 0.5, 0.75])

    def evaluate(tapes: Array) -> Blocks:
        token = np.searchsorted(ends, tapes[:, 0], side="right")
        low, high = np.append(0.0, ends)[token], np.append(ends, 1.0)[token]
        cells = (low[:, None], high[:, None]) if reports else (None, None)
        return Blocks(np.zeros((len(tapes), 1), dtype=int), token[:, None], *cells)

    measured_law = law(evaluate, 1)
    assert measured_law.outcomes == {(0,): 0.125, (1,): 0.375, (2,): 0.25, (3,): 0.25}
    assert measured_law.paths == {((0,), tokens): mass for tokens, mass in measured_law.outcomes.items()}
    assert measured_law.cells == 4


@pytest.mark.parametrize("order", [None, decisions(CHAIN)])
@pytest.mark.parametrize("reports", [True, False])
@pytest.mark.parametrize("seed", first(range(3), 1))
def test_a_chain_has_the_law_of_its_target(reports: bool, order: tuple[int, ...] | None, seed: int) -> None:
    toy, target = chain(reports, seed=seed)
    measured_law = law(toy, CHAIN_COINS, order=order)
    assert distance(measured_law, target) <= 1e-12
    assert (measured_law.disputed, measured_law.strays) == (0, ())


@pytest.mark.parametrize(("vocab", "reports"), first([(3, False), (4, True), (3, True), (4, False), (8, True)], 2))
def test_a_tree_with_drafts_inside_has_the_law_of_its_target(vocab: int, reports: bool) -> None:
    target, draft = tables(vocab, 1), tables(vocab, 101)
    measured_law = law(Toy(SEVEN, target, draft, reports=reports), SEVEN_COINS, order=decisions(SEVEN))
    assert distance(measured_law, target) <= 1e-12
    assert measured_law.disputed == 0
    assert measured_law.searched == (0 if reports else measured_law.cells)
    assert sum(measured_law.paths.values()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("reports", [True, False])
@pytest.mark.parametrize("rule", ["target-only", "eagle"])
def test_a_given_tree_has_the_law_of_its_target(rule: str, reports: bool) -> None:
    target, draft = tables(8, 4), tables(8, 5)
    toy = Toy(SEVEN, target, draft, reports=reports, rule=rule, tokens=(0, 3, 6, 1, 2, 7, 0))
    measured_law = law(toy, SEVEN_COINS)
    assert distance(measured_law, target) <= 1e-12
    assert 40 < measured_law.cells < 200


def test_a_given_tree_has_its_paths_in_closed_form() -> None:
    target, draft = tables(4, 4), tables(4, 5)
    measured_law = law(Toy(CHAIN, target, draft, reports=False, rule="eagle", tokens=(0, 2, 1)), CHAIN_COINS)
    accepted = {length: 0.0 for length in (1, 2, 3)}
    for (path, _), mass in measured_law.paths.items():
        accepted[len(path)] += mass
    first, second = target[0][2], target[1][2, 1]
    assert accepted == pytest.approx({1: 1 - first, 2: first * (1 - second), 3: first * second}, abs=1e-14)


@pytest.mark.parametrize("reports", [True, False])
def test_a_coin_used_again_below_moves_the_joint_law(reports: bool) -> None:
    toy, target = chain(reports, "reuse")
    measured_law = law(toy, CHAIN_COINS)
    # The first token alone does not show it.
    assert complete_law(measured_law, target).sum(axis=(1, 2)) == pytest.approx(target[0], abs=1e-12)
    assert distance(measured_law, target) > 1e-2


@pytest.mark.parametrize("reports", [True, False])
@pytest.mark.parametrize(("fault", "mass"), [("", None), ("less-or-equal", 2.0**-53)])
def test_a_token_of_probability_zero_is_seen_on_a_single_coin(fault: str, mass: float | None, reports: bool) -> None:
    target, draft = tables(4, 1), tables(4, 101)
    target[0][2] = 0
    target[0][:] = target[0] / target[0].sum()
    toy = Toy(CHAIN, target, draft, reports=reports, rule="eagle", fault=fault, tokens=(0, 2, 1))
    measured_law = law(toy, CHAIN_COINS)
    assert distance(measured_law, target) <= 1e-12
    first = [outcome for outcome in measured_law.outcomes if outcome[0] == 2]
    assert sum(measured_law.outcomes[outcome] for outcome in first) == (mass or 0)
    assert bool(first) == bool(mass)


def test_cells_that_lie_are_disputed_and_searched() -> None:
    toy, target = chain(True, "lies")
    measured_law = law(toy, CHAIN_COINS)
    assert measured_law.disputed > 0
    assert distance(measured_law, target) <= 1e-12


@pytest.mark.parametrize("end", ["wide", "elsewhere", "nan"])
def test_cells_that_are_no_cells_are_disputed(end: str) -> None:
    honest, target = chain(True)

    def evaluate(tapes: Array) -> Blocks:
        blocks = honest(tapes)
        assert blocks.low is not None
        assert blocks.high is not None
        low = {"wide": 0 * blocks.low, "elsewhere": blocks.low, "nan": np.full(tapes.shape, np.nan)}[end]
        high = {"wide": 0 * blocks.high + 1, "elsewhere": blocks.low, "nan": blocks.high}[end]
        return Blocks(blocks.path, blocks.tokens, low, high)

    measured_law = law(evaluate, CHAIN_COINS, order=decisions(CHAIN))
    assert measured_law.disputed > 40
    assert distance(measured_law, target) <= 1e-12


@pytest.mark.parametrize("reports", [True, False])
def test_a_request_that_reads_its_neighbours_coin_is_a_stray(reports: bool) -> None:
    toy, _ = chain(reports, "neighbour")
    measured_law = law(toy, CHAIN_COINS)
    assert measured_law.strays
    assert measured_law.outcomes == {}
    assert all(stray.outcome != stray.other_outcome for stray in measured_law.strays)
    # The coins told are those asked: alone, the request reads its own.
    stray = measured_law.strays[0]
    blocks = toy(np.array([stray.tape]))
    assert tuple(blocks.path[0][blocks.path[0] >= 0]) in (stray.outcome[0], stray.other_outcome[0])


def test_what_batches_round_differently_is_a_stray() -> None:
    num_calls = 0

    def evaluate(tapes: Array) -> Blocks:
        nonlocal num_calls
        num_calls += 1
        limit = 0.3 + 1e-3 * (num_calls % 2)
        return Blocks(np.zeros((len(tapes), 1), dtype=int), (tapes < limit).astype(int))

    assert law(evaluate, 1).strays


def test_hidden_decisions_do_not_hide_what_follows() -> None:
    """Which of the rejected tokens was drafted is not in the outcome, and the acceptance of the next depends on it."""
    first, accept, second = np.array([0.2, 0.3, 0.6]), np.array([0.5, 0.01, 0.7, 0.0]), np.array([0.9, 0.3, 0.5, 0.1])

    def evaluate(tapes: Array) -> Blocks:
        drafted = np.searchsorted(first, tapes[:, 0], side="right")
        is_accepted = tapes[:, 1] < accept[drafted]
        low = tapes[:, 2] < second[drafted]
        return Blocks(
            np.where(is_accepted, 1, 0)[:, None], np.where(is_accepted, drafted, np.where(low, 7, 8))[:, None]
        )

    share = np.diff(np.array([0, *first, 1]))
    expected_law = {(token,): mass for token, mass in enumerate(share * accept) if mass}
    expected_law |= {
        (7,): float((share * (1 - accept) * second).sum()),
        (8,): float((share * (1 - accept) * (1 - second)).sum()),
    }
    for order in product(range(3), repeat=3):
        if len(set(order)) == 3:
            assert law(evaluate, 3, order=order).outcomes == pytest.approx(expected_law, abs=1e-12)


@pytest.mark.parametrize("reports", [True, False])
def test_float32_has_its_own_grid(reports: bool) -> None:
    def evaluate(tapes: Array) -> Blocks:
        coins = tapes.astype(np.float32)
        assert (coins == tapes).all()
        third = np.float32(1 / 3)
        is_below = coins < third
        low, high = np.where(is_below, 0, third).astype(float), np.where(is_below, third, 1).astype(float)
        return Blocks(np.zeros((len(tapes), 1), dtype=int), is_below.astype(int), *((low, high) if reports else ()))

    measured_law = law(evaluate, 1, grid=2**24)
    assert measured_law.outcomes[(1,)] == np.ceil(float(np.float32(1 / 3)) * 2**24) / 2**24


def test_too_many_cells_are_said_to_be() -> None:
    toy, _ = chain(True)
    with pytest.raises(TooManyCells, match="more than 20 cells"):
        law(toy, CHAIN_COINS, most_cells=20)


@pytest.mark.parametrize(
    ("keywords", "word"),
    [({"order": (0, 0)}, "order"), ({"grid": 2**54}, "grid"), ({"coins": 0}, "without coins")],
)
def test_wrong_questions_are_refused(keywords: dict[str, object], word: str) -> None:
    arguments: dict[str, object] = {"coins": 2, **keywords}
    with pytest.raises(ValueError, match=word):
        law(lambda tapes: Blocks(tapes, tapes), **arguments)  # type: ignore[arg-type]


def test_a_batch_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="were asked"):
        law(lambda tapes: Blocks(tapes[:1], tapes[:1]), 2)


def used_coins(evaluate: Callable[[Array], Blocks], tape: Array) -> Array:
    """For each coin of `tape`, float64 [coins], whether it matters: bool [coins].

    A coin matters if the outcome changes along its axis while the others stay; it is tried at 0, at the last place of
    the grid, and once in each of 64 equal intervals.
    """
    coins = len(tape)
    rng = np.random.default_rng(0)
    inside = np.floor((np.arange(64) + rng.random((coins, 64))) / 64 * 2**53)
    values = np.concatenate([np.tile([0.0, 2.0**53 - 1.0], (coins, 1)), np.minimum(inside, 2**53 - 1)], axis=1) / 2**53
    tapes = np.tile(tape, (coins, values.shape[1], 1))
    tapes[np.arange(coins), :, np.arange(coins)] = values
    blocks = evaluate(np.concatenate([tape[None], tapes.reshape(-1, coins)]))
    rows = np.concatenate([blocks.path, blocks.tokens], axis=1)
    return np.asarray((rows[1:] != rows[0]).any(axis=1).reshape(coins, -1).any(axis=1))


def test_the_coins_that_matter() -> None:
    target, draft = tables(4, 4), tables(4, 5)
    toy = Toy(CHAIN, target, draft, reports=False, rule="eagle", tokens=(0, 2, 1))
    first, second, bonus = (place(*key, len(CHAIN)) for key in (("accept", 1), ("accept", 2), ("bonus", 0)))
    for coin, expected_coins in ((1 - 2.0**-53, [first, bonus]), (0.0, [first, second, bonus])):
        tape = np.full(CHAIN_COINS, 0.5)
        tape[first] = coin
        assert np.nonzero(used_coins(toy, tape))[0].tolist() == expected_coins


def test_another_seed_finds_the_same_law() -> None:
    toy, _ = chain(True)
    once, again = law(toy, CHAIN_COINS, seed=0), law(toy, CHAIN_COINS, seed=1)
    assert once.paths == pytest.approx(again.paths, abs=1e-14)
    assert law(toy, CHAIN_COINS, seed=0) == once
