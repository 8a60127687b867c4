"""A sampled step by hand: who a drawn tree names, which coin names it, and what every node's row says."""

from dataclasses import replace

import numpy as np
import pytest

from specverify.reference import tape
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.model import PathByPath
from specverify.reference.oracle.parameters import load
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Array, Drafted
from specverify.reference.tree import RankTree, Tree

ARCH = Architecture("llama", 6, 8, 8, 2, 1, 4, (0,), max_positions=64)
TARGET, DRAFT = Seeded(ARCH, 3), Seeded(ARCH, 4)
PROMPT = (5, 1, 2)
TEMPERATURE = 3.0
"""Logits scatter by 3: no token is so likely that it is always drawn."""

SHAPES = (
    RankTree((0,), (0,)),
    RankTree((0, 0), (0, 0)),
    RankTree((0, 0, 0, 0, 1, 1), (0, 0, 1, 2, 0, 1)),
    RankTree((0, 3, 0, 0, 1, 3), (0, 1, 1, 0, 0, 0)),
)
PLAIN = PathByPath(load(DRAFT, "float64"))


def draft_of_step(sampling: Sampling, shape: RankTree, vocabulary: tuple[int, ...]) -> Drafted:
    draft = LanguageModel(DRAFT, shape, vocabulary)
    case = Case(TARGET, PROMPT, draft, sampling=sampling, stops=Stops(8), dtype="float64", steps=1)
    step_draft = Oracle()(case).steps[0].drafted
    assert step_draft is not None
    return step_draft


def row(path: tuple[int, ...]) -> Array:
    """The draft's logits after the prompt and the tokens `path`, as one sequence without a tree."""
    tokens = (*PROMPT, *path)
    logits: Array = PLAIN.nodes(tokens[:-1], Tree((0,), tokens[-1:])).logits[0]
    return logits


def law_of(path: tuple[int, ...], tokens: list[int]) -> Array:
    """The softmax over the tokens `tokens`, 0 elsewhere."""
    p: Array = np.zeros(ARCH.vocab_size)
    p[tokens] = np.exp(row(path)[tokens] / TEMPERATURE)
    p /= p.sum()
    return p


def chosen_token(p: Array, coin: float) -> int:
    """The first token at which the cumulated share passes the coin."""
    return int((np.cumsum(p / p.sum()) <= coin).sum())


@pytest.mark.parametrize("draws", ["without-replacement", "with-replacement"])
@pytest.mark.parametrize("vocabulary", [(), (0, 2, 5)])
def test_each_node_is_named_by_its_own_coin(draws: str, vocabulary: tuple[int, ...]) -> None:
    names = list(vocabulary or range(ARCH.vocab_size))
    chance = np.random.default_rng(len(names))
    drawn_tokens: set[tuple[int, ...]] = set()
    for shape in SHAPES:
        for _ in range(8):
            # The coins of drafting come first on the tape, one for each node.
            coins = chance.integers(0, 2**24, len(shape)) / 2.0**24
            step_draft = draft_of_step(Sampling(TEMPERATURE, tuple(coins), draws=draws), shape, vocabulary)
            tree, proposal = step_draft.tree, step_draft.proposal
            assert step_draft.logits is not None
            assert proposal is not None
            drawn_tokens.add(tree.token)
            for node in range(len(shape)):
                path = tree.tokens_to(node)[1:]
                if node and not shape.children[node]:
                    assert np.isnan(step_draft.logits[node]).all(), "a leaf is never asked"
                else:
                    np.testing.assert_allclose(step_draft.logits[node], row(path)[names], rtol=0, atol=1e-10)
                expected = law_of(path, names)
                remainder = expected.copy()
                for child in shape.children[node]:
                    assert tree.token[child] == chosen_token(remainder, coins[child]), (shape, coins, child)
                    np.testing.assert_allclose(proposal[child], expected, rtol=0, atol=1e-12)
                    if draws == "without-replacement":
                        remainder[tree.token[child]] = 0.0
            assert tree.parent == shape.parent
            assert tree.token[0] == PROMPT[-1]
            assert step_draft.draft_ids == (0, *(names.index(token) for token in tree.token[1:]))
            np.testing.assert_array_equal(proposal[0], np.full(ARCH.vocab_size, 1 / 6))
    assert len(drawn_tokens) > 8


@pytest.mark.parametrize("vocabulary", [(), (0, 2, 5)])
def test_children_beyond_the_law_are_the_best_of_what_is_left_and_sure(vocabulary: tuple[int, ...]) -> None:
    names = list(vocabulary or range(ARCH.vocab_size))
    shape = RankTree((0, 0, 0, 0), (0, 0, 1, 2))
    best = sorted(names, key=lambda token: -row(())[token])
    for top_k, drawn in ((1, 1), (2, 2)):
        sampling = Sampling(TEMPERATURE, (0.0, 0.3, 0.6, 0.9), draws="without-replacement", top_k=top_k)
        step_draft = draft_of_step(sampling, shape, vocabulary)
        assert step_draft.proposal is not None
        assert sorted(step_draft.tree.token[1 : 1 + drawn]) == sorted(best[:drawn])
        assert list(step_draft.tree.token[1 + drawn :]) == best[drawn:3]
        for child in range(1, 4):
            expected = law_of((), best[:top_k]) if child <= drawn else np.eye(6)[step_draft.tree.token[child]]
            np.testing.assert_allclose(step_draft.proposal[child], expected, rtol=0, atol=1e-12)


def test_a_draft_looks_back_over_its_own_path() -> None:
    """A ban of (2, t) holds under the pending root 2, and one of (t, u) under a child t, whatever the prompt holds."""
    shape = RankTree((0, 0, 1), (0, 0, 0))
    for coin in (0.0, 0.5, 0.999):
        free = draft_of_step(
            Sampling(TEMPERATURE, (0.0, coin, coin), draws="without-replacement"), shape, ()
        ).tree.token
        banned = Sampling(TEMPERATURE, (0.0, coin, coin), bad_words=((2, free[1]),), draws="without-replacement")
        other_tokens = draft_of_step(banned, shape, ()).tree.token
        remainder = law_of((), [token for token in range(6) if token != free[1]])
        assert other_tokens[1] == chosen_token(remainder, coin) != free[1]
        deeper = draft_of_step(replace(banned, bad_words=((free[1], free[2]),)), shape, ()).tree.token
        assert deeper[1] == free[1]
        remainder = law_of(free[1:2], [token for token in range(6) if token != free[2]])
        assert deeper[2] == chosen_token(remainder, coin) != free[2]


def test_seeded_coins_are_one_long_row_that_steps_share_out() -> None:
    """Step s of trees of n nodes owns 3n + 1 coins, in multiples of 2^-24; what the tape holds comes first."""
    row = np.floor(np.random.Generator(np.random.Philox(key=9)).random(200) * 2**24) / 2**24
    for nodes in range(1, 8):
        wide = 3 * nodes + 1
        assert tape.stride(nodes) == wide
        for step in range(6):
            expected_coins = row[step * wide : (step + 1) * wide]
            np.testing.assert_array_equal(tape.coins(Sampling(1.0, seed=9), step, nodes), expected_coins)
            coins = tuple(number / 256 for number in range(9))
            tape_then_seed = [*coins, *row[9:]][step * wide : (step + 1) * wide]
            np.testing.assert_array_equal(tape.coins(Sampling(1.0, coins, seed=9), step, nodes), tape_then_seed)
        places = [tape.place(kind, node, nodes) for kind in ("draft", "order", "accept") for node in range(nodes)]
        assert [*places, tape.place("bonus", 5, nodes)] == list(range(wide))
