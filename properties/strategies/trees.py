"""Strategies for trees of 1 to 64 nodes, and large ones of up to 256, as tuples of parent rows.

Shapes are chains, stars, combs, full and random trees. Rows are in any order that keeps the root first.
"""

from functools import cache

import numpy as np
from hypothesis import strategies as st

MAX_NODES, MOST_NODES = 64, 256
"""Most nodes of a tree, and of a large one."""

Parents = tuple[int, ...]


def _random(choices: bytes) -> Parents:
    return (0, *(choice % (index + 1) for index, choice in enumerate(choices)))


def _chain(nodes: int) -> Parents:
    return (0, *range(nodes - 1))


def _star(nodes: int) -> Parents:
    return (0,) * nodes


def _comb(nodes: int) -> Parents:
    """A spine of even nodes, each with one odd node as its leaf."""
    return (0, *(node - 1 if node % 2 else max(node - 2, 0) for node in range(1, nodes)))


def _spine(choices: bytes) -> Parents:
    """A spine of five nodes, with other nodes anywhere below, so that long blocks can be accepted."""
    return (0, 0, 1, 2, 3, *(choice % node for node, choice in enumerate(choices, 5)))


def _full(nodes: int, width: int) -> Parents:
    return (0, *((node - 1) // width for node in range(1, nodes)))


def row_order(parent: Parents, seed: int) -> tuple[int, ...]:
    """The row order of `seed`: node `order[i]` moves to row i, and the root stays first; seed 0 keeps the order."""
    # Row 0 stays the root, as everywhere in a tree.
    nodes = np.random.default_rng(seed).permutation(len(parent) - 1) + 1 if seed else np.arange(1, len(parent))
    return (0, *nodes.tolist())


def renumber(parent: Parents, order: tuple[int, ...]) -> Parents:
    """`parent` after moving node `order[i]` to row i."""
    row = {node: index for index, node in enumerate(order)}
    return tuple(row[parent[node]] for node in order)


def side_by_side(width: int, height: int) -> Parents:
    """`width` chains of `height` nodes under one root, numbered level by level."""
    return (0,) * (width + 1) + tuple(range(1, width * (height - 1) + 1))


@cache
def parents_of_size(nodes: int) -> st.SearchStrategy[Parents]:
    """Parents of trees of exactly `nodes` nodes: a chain, a star, or any."""
    count = max(nodes - 1, 0)
    return st.one_of(
        st.just(_chain(nodes)), st.just(_star(nodes)), st.binary(min_size=count, max_size=count).map(_random)
    )


def deep_parents() -> st.SearchStrategy[Parents]:
    """Parents of trees of 5 to 8 nodes, at least 4 deep, the root first."""
    return st.binary(max_size=3).map(_spine)


@cache
def large_parents() -> st.SearchStrategy[Parents]:
    """Parents of trees of MAX_NODES + 1 to MOST_NODES nodes: full trees, stars, or any in an order of their rows."""
    nodes = st.integers(MAX_NODES + 1, MOST_NODES)
    full = st.builds(_full, nodes, st.integers(2, 8))
    seeded = st.builds(_seeded, nodes, st.integers(0, 2**16))
    return st.one_of(seeded, full, nodes.map(_star))


def _seeded(nodes: int, seed: int) -> Parents:
    """A random tree whose rows are in a random order that keeps the root first."""
    rng = np.random.default_rng(seed)
    parent = (0, *(int(rng.integers(0, node)) for node in range(1, nodes)))
    return renumber(parent, row_order(parent, seed))


@cache  # Hypothesis validates a strategy once, which takes longer than to draw from it
def parents(max_nodes: int = MAX_NODES, shuffle: bool = True) -> st.SearchStrategy[Parents]:
    """Parents of a rooted tree; drawn bytes shrink far better than a draw per node (measured: 7 nodes against 39)."""
    few = min(8, max_nodes)
    small = [
        st.binary(max_size=few - 1).map(_random),
        st.integers(1, few).map(_chain),
        st.integers(1, few).map(_star),
        st.integers(1, few).map(_comb),
    ]
    large = [
        st.binary(max_size=max_nodes - 1).map(_random),
        st.builds(_full, st.integers(1, max_nodes), st.integers(2, 4)),
        st.integers(1, max_nodes).map(_star),
        st.integers(1, min(24, max_nodes)).map(_chain),
        st.integers(1, min(24, max_nodes)).map(_comb),
    ]
    if max_nodes > 16:
        # A strategy of its own for 16 nodes and more, so that large random trees are drawn often.
        large.append(st.binary(min_size=15, max_size=max_nodes - 1).map(_random))
    natural = st.one_of(*small, st.one_of(large))
    if not shuffle:
        return natural
    order = st.one_of(st.just(0), st.integers(0, 2**16))
    return st.builds(lambda parent, seed: renumber(parent, row_order(parent, seed)), natural, order)
