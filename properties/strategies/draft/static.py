"""Strategy for static trees of ranks, which models and tries fill with tokens."""

from functools import cache

from hypothesis import strategies as st

from specverify.properties.strategies.trees import parents, parents_of_size, side_by_side
from specverify.reference.draft_trees import named_tree
from specverify.reference.tree import RankTree, Shape

STATIC_NODES = 12
"""Most nodes of a static tree; few, since the draft model runs once for each inner level."""


NAMES = ("D2", "D4", "D2-BF2", "D3-BF2", "D2-BF3", "D3-BF2-N8", "D4-BF3-N9", "eagle-mc_sim_7b_63")
"""Names of static trees that are drawn; the published list is the smaller one."""

NAMED = 12
"""The number of static trees of which one has a name."""


@cache
def static_trees(named: int) -> st.SearchStrategy[RankTree]:
    """Static trees whose nodes have at most `named` children; some are known by a name."""
    fitting = [tree for tree in map(named_tree, NAMES) if max(tree.rank) < named]
    return st.integers(0, NAMED - 1).flatmap(
        lambda choice: st.sampled_from(fitting) if choice == NAMED - 1 else rank_trees(named)
    )


@st.composite
def rank_trees(draw: st.DrawFn, named: int) -> RankTree:
    """Static trees whose nodes have at most `named` children (and at most four), with rotated ranks."""
    some = st.integers(3, 6).flatmap(parents_of_size)
    chains = st.builds(side_by_side, st.integers(2, 3), st.integers(2, 3))
    # In a third of the trees several nodes of a level have children: only there may a wrong branch go on.
    kinds = st.sampled_from((parents(STATIC_NODES, shuffle=False), some, chains))
    parent = list(draw(kinds.flatmap(lambda kind: kind)))
    for node in range(1, len(parent)):
        # The root is its own parent in row 0, which is no child.
        while parent[:node].count(parent[node]) - (parent[node] == 0) >= min(named, 4):
            parent[node] += 1
    shape = Shape(tuple(parent))
    turn = draw(st.integers(0, 3))
    rank = [0] * len(parent)
    for below in shape.children:
        for index, node in enumerate(below):
            rank[node] = (index + turn) % len(below)
    return RankTree(tuple(parent), tuple(rank))


LONG_PATHS = (17, 24, 20)
"""Nodes below the root of long chains, which a draft near its target accepts whole."""

LARGE_NODES = (65, 100, 256, 40)
"""Nodes of large static trees."""


@st.composite
def large_static_trees(draw: st.DrawFn, named: int) -> RankTree:
    """A chain of one of LONG_PATHS, or a full tree of one of LARGE_NODES whose nodes have at most `named` children."""
    if named < 3 or draw(st.booleans()):
        below = draw(st.sampled_from(LONG_PATHS))
        return RankTree((0, *range(below)), (0,) * (below + 1))
    width = draw(st.integers(3, min(named, 8)))
    nodes = draw(st.sampled_from(LARGE_NODES))
    numbers = range(nodes - 1)
    return RankTree((0, *(node // width for node in numbers)), (0, *(node % width for node in numbers)))
