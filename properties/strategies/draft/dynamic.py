"""Strategies for dynamic trees, which drafts with scores grow."""

from hypothesis import strategies as st

from properties.strategies.draft.drawing import Given
from reference.draft_trees import DraftTree, Expansion
from reference.tree import RankTree

RARE = 6
"""One tree in this many is dynamic where a draft has scores, so that about one case in fifteen holds such a tree."""

MOST_TOP_K, MOST_LEVELS, MOST_TOTAL = 3, 4, 12


def trees(given: Given, named: int, static: st.SearchStrategy[RankTree]) -> st.SearchStrategy[DraftTree]:
    """A tree of `static`, or now and then a dynamic one for a draft that can name `named` tokens."""
    if not given.grows:
        return static
    return st.integers(0, RARE - 1).flatmap(lambda one: expansions(named) if one == RARE - 1 else static)


@st.composite
def expansions(draw: st.DrawFn, named: int) -> Expansion:
    """Small dynamic trees; one in four is a greedy top-k tree, which holds a frontier at each level."""
    top_k = draw(st.integers(1, min(MOST_TOP_K, named)))
    # A frontier chooses only where there are more candidates than it holds, which is below level 1.
    depth = draw(st.integers(2 if top_k > 1 else 1, MOST_LEVELS))
    if draw(st.integers(0, 3)) == 3:
        return Expansion(top_k, depth, 1 + top_k * depth, rerank=False)
    candidates = top_k + (depth - 1) * top_k**2
    return Expansion(top_k, depth, draw(st.integers(min(depth, candidates) + 1, min(candidates + 1, MOST_TOTAL))))
