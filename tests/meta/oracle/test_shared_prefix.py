"""The shared-prefix oracle equals the naive one, whatever it has seen before."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specverify.reference.architecture import Architecture, Rope, Seeded
from specverify.reference.malformed import Malformed
from specverify.reference.oracle import shared_prefix
from specverify.reference.oracle.model import PathByPath
from specverify.reference.oracle.parameters import load
from specverify.reference.oracle.shared_prefix import MOST_CONTEXTS, SharedPrefix
from specverify.reference.trace import Array
from specverify.reference.tree import Tree

VOCABULARY = 5  # small, so that contexts share prefixes and siblings share tokens


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 1)]))
    rope = draw(st.sampled_from([Rope(), Rope(100.0, "yarn", 4.0, 8), Rope(100.0, "llama3", 4.0, 16)]))
    reaches = draw(st.lists(st.sampled_from([0, 0, 1, 2, 3, 7, 20, -1, -3, -8]), min_size=1, max_size=3))
    unrotated = tuple(layer for layer in range(len(reaches)) if draw(st.integers(0, 2)) == 2)
    return Architecture(
        family=draw(st.sampled_from(["qwen3", "llama4"])),
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=12,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=4,
        windows=tuple(max(0, reach) for reach in reaches),
        chunks=tuple(max(0, -reach) for reach in reaches) if min(reaches) < 0 else (),
        unrotated=unrotated,
        floor_scale=draw(st.sampled_from([0, 1, 3])) if unrotated else 0,
        rope=rope,
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Any tree of up to 14 nodes, its rows in any order: a child may stand before its parent."""
    ups = draw(st.lists(st.integers(0, 99), max_size=13))
    parent = (0, *(up % (node + 1) for node, up in enumerate(ups)))
    token = tuple(draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=len(parent), max_size=len(parent))))
    order = (0, *draw(st.permutations(range(1, len(parent)))))
    return Tree(parent, token).renumber(order)


contexts = st.lists(st.integers(0, VOCABULARY - 1), max_size=24).map(tuple)


def assert_equal(naive: PathByPath, shared: SharedPrefix, context: tuple[int, ...], tree: Tree) -> None:
    expected, actual = naive.nodes(context, tree), shared.nodes(context, tree)
    assert actual.logits.shape == expected.logits.shape
    np.testing.assert_allclose(actual.logits, expected.logits, rtol=0, atol=1e-11)
    for seen_rows, expected_rows in zip(actual.attended, expected.attended, strict=True):
        width = expected_rows.shape[-1]
        np.testing.assert_allclose(seen_rows[..., :width], expected_rows, rtol=0, atol=1e-11)
        assert not np.any(seen_rows[..., width:])
    naive_inputs, shared_inputs = naive.inputs(context, tree), shared.inputs(context, tree)
    for name in ("queries", "keys", "values"):
        for seen_rows, asked_rows in zip(getattr(shared_inputs, name), getattr(naive_inputs, name), strict=True):
            assert seen_rows.shape == asked_rows.shape
            np.testing.assert_allclose(seen_rows, asked_rows, rtol=0, atol=1e-11)


@settings(max_examples=60, deadline=None)
@given(architectures(), st.integers(0, 3), st.data())
def test_equals_the_naive_oracle_over_a_life_of_calls(arch: Architecture, seed: int, data: st.DataObject) -> None:
    parameters = load(Seeded(arch, seed), "float64")
    naive, shared = PathByPath(parameters), SharedPrefix(parameters)
    context: tuple[int, ...] = ()
    with pytest.MonkeyPatch.context() as patch:
        # Contexts here are short: a small block puts several of them, and their seams, into one.
        patch.setattr(shared_prefix, "BLOCK", data.draw(st.sampled_from([1, 3, 8])))
        for _ in range(data.draw(st.integers(1, 5))):
            # Grow, cut back, branch off in the middle, or start anew.
            length = data.draw(st.integers(0, len(context)))
            context = (context[:length] + data.draw(contexts))[:40]
            if data.draw(st.booleans()):
                expected, actual = naive.kv(context), shared.kv(context)
                assert actual.keys.shape == expected.keys.shape
                np.testing.assert_allclose(actual.keys, expected.keys, rtol=0, atol=1e-11)
                np.testing.assert_allclose(actual.values, expected.values, rtol=0, atol=1e-11)
            assert_equal(naive, shared, context, data.draw(trees()))


def plain(windows: tuple[int, ...] = (0, 0), rope: Rope | None = None) -> Architecture:
    return Architecture("llama", VOCABULARY, 8, 12, 2, 1, 4, windows, rope or Rope())


def test_remembers_few_contexts_and_not_the_empty_one() -> None:
    shared = SharedPrefix(load(Seeded(plain(), 0), "float64"))
    for token in range(VOCABULARY):
        shared.kv((token, 1, 2))
        shared.kv(())
    assert len(shared._recent_contexts) == MOST_CONTEXTS
    assert [int(context.tokens[0]) for context in shared._recent_contexts] == [1, 2, 3, 4]


def test_a_context_of_several_blocks_equals_the_naive_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "BLOCK", 4)
    parameters = load(Seeded(plain((0, 3)), 0), "float64")
    naive, shared = PathByPath(parameters), SharedPrefix(parameters)
    for length in (4, 5, 8, 9, 13):  # at a seam and behind one, grown from what was there
        context = tuple(token * token % VOCABULARY for token in range(length))
        assert_equal(naive, shared, context, Tree((0, 0, 1), (1, 2, 0)))
        assert_equal(naive, SharedPrefix(parameters), context, Tree((0,), (3,)))
        assert shared.kv(context).keys.shape[2] == length


def test_runs_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedPrefix(load(Seeded(plain(), 0), "float64"))
    ran: list[int] = []
    append = SharedPrefix._append

    def count_append(self: SharedPrefix, recent_context: Any, tokens: Array) -> None:
        ran.append(len(tokens))
        append(self, recent_context, tokens)

    monkeypatch.setattr(SharedPrefix, "_append", count_append)
    root = Tree((0,), (1,))
    long = tuple(token % VOCABULARY for token in range(20))
    for context in (long, (*long, 1), long[:7], (*long[:7], 4, 4), (*long, 1, 2)):
        shared.nodes(context, root)
    # The columns of token 1 behind `long` are those of the first root; long[:7] is the beginning of what is there, and
    # its branch copies 7 tokens.
    assert ran == [20, 2, 1]


@pytest.mark.parametrize("windows", [(0, 0), (3, 0)])
def test_an_accepted_path_is_copied_from_the_run_of_its_tree(
    windows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = load(Seeded(plain(windows), 0), "float64")
    shared = SharedPrefix(parameters)
    # Nodes 1 and 2 are twins; the accepted path goes on below the second of them.
    tree = Tree((0, 0, 0, 2, 2), (3, 4, 4, 0, 1))
    shared.nodes((1, 2), tree)
    monkeypatch.setattr(SharedPrefix, "_append", None)
    columns = shared.kv((1, 2, 3, 4, 1))
    monkeypatch.undo()
    expected = PathByPath(parameters).kv((1, 2, 3, 4, 1))
    np.testing.assert_allclose(columns.keys, expected.keys, rtol=0, atol=1e-12)
    np.testing.assert_allclose(columns.values, expected.values, rtol=0, atol=1e-12)


def test_the_order_of_use_decides_who_is_forgotten() -> None:
    shared = SharedPrefix(load(Seeded(plain(), 0), "float64"))
    for token in (0, 1, 2, 3, 2, 4):
        shared.kv((token, 0))
    assert [int(context.tokens[0]) for context in shared._recent_contexts] == [1, 3, 2, 4]


def test_what_was_handed_out_stays_as_it_was_and_cannot_be_written() -> None:
    shared = SharedPrefix(load(Seeded(plain(), 0), "float64"))
    first = shared.kv((1, 2, 3))
    before = first.keys.copy()
    shared.kv((1, 2, 3, *([4] * 200)))
    shared.kv((1, 2, 0))
    np.testing.assert_array_equal(first.keys, before)
    with pytest.raises(ValueError, match="read-only"):
        first.keys[0, 0, 0, 0] = 0.0


LONGROPE = Rope(kind="longrope", factor=4.0, original=8, short_factor=(1.0, 1.5), long_factor=(2.0, 9.0))


def test_longrope_keeps_short_and_long_contexts_apart() -> None:
    arch = plain(rope=LONGROPE)
    parameters = load(Seeded(arch, 0), "float64")
    naive, shared = PathByPath(parameters), SharedPrefix(parameters)
    fork = Tree((0, 0), (1, 2))
    for length in (5, 9, 4, 12):
        context = tuple(token % VOCABULARY for token in range(length))
        assert_equal(naive, shared, context, fork)
        np.testing.assert_allclose(shared.kv(context).keys, naive.kv(context).keys, rtol=0, atol=1e-11)


@pytest.mark.parametrize("oracle", [PathByPath, SharedPrefix])
def test_a_step_across_a_change_of_frequencies_is_refused(oracle: type[PathByPath] | type[SharedPrefix]) -> None:
    chain = Tree((0, 0, 1), (1, 2, 3))
    arch = plain(rope=LONGROPE)
    run = oracle(load(Seeded(arch, 0), "float64"))
    run.nodes((1,) * 5, chain)
    run.nodes((1,) * 9, chain)
    for length in (6, 7, 8):
        with pytest.raises(Malformed, match=r"rope.original: a run from . to .* crosses 8"):
            run.nodes((1,) * length, chain)
    arch = Architecture("llama", VOCABULARY, 8, 12, 2, 1, 4, (0,), Rope(kind="dynamic", factor=2.0), max_positions=8)
    run = oracle(load(Seeded(arch, 0), "float64"))
    run.nodes((1,) * 5, chain)
    with pytest.raises(Malformed, match="9 tokens are beyond the 8 positions"):
        run.nodes((1,) * 6, chain)
    with pytest.raises(Malformed, match="9 tokens are beyond the 8 positions"):
        run.kv((1,) * 9)
