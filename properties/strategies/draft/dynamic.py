"""Strategies for trees of drafts with scores: static, dynamic, by batch size, or ended early."""

from hypothesis import strategies as st

from specverify.properties.strategies.draft.drawing import DraftSetting
from specverify.properties.strategies.draft.static import large_static_trees, static_trees
from specverify.reference.draft_trees import STOP_TIMES, Dispatch, DraftTree, Expansion, Stopped
from specverify.reference.tree import RankTree

KINDS = ("static",) * 12 + ("dispatched",) * 3 + ("dynamic",) * 12 + ("stopped",) * 6
"""Kinds of tree of a draft with scores: SGLang's default is dynamic, and that of transformers ends early."""

BOUNDS = (0.4, 0.2, 0.1, 0.3, 0.6, 0.05)
"""Confidences at which drawn paths end: transformers' default first, and those that small models reach now and then."""

TOP_K = (2, 3, 4, 1, 4)
"""Candidates that an expanded node of a dynamic tree gives; engines take four to ten."""

MOST_LEVELS, MOST_TOTAL = 4, 12


def trees(setting: DraftSetting, named: int, static: st.SearchStrategy[RankTree]) -> st.SearchStrategy[DraftTree]:
    """A tree of `static`, or now and then a dynamic one or a table, for a draft that can name `named` tokens.

    Only kinds of the setting are drawn; large trees are static.
    """
    if setting.large_trees:
        return large_static_trees(named)
    kinds: dict[str, st.SearchStrategy[DraftTree]] = {"static": static}
    if "dynamic" in setting.tree_kinds:
        kinds["dynamic"] = expansions(named)
    if "dispatched" in setting.tree_kinds:
        kinds["dispatched"] = tables(named)
    if "stopped" in setting.tree_kinds:
        kinds["stopped"] = stopped_trees(static)
    # A kind that the engine lacks is drawn as a static tree; a swarm may leave static trees out.
    drawn_kinds = KINDS if "static" in setting.tree_kinds else setting.tree_kinds or KINDS
    return st.sampled_from(drawn_kinds).flatmap(lambda kind: kinds.get(kind, static)) if len(kinds) > 1 else static


@st.composite
def tables(draw: st.DrawFn, named: int) -> Dispatch:
    """Tables of two or three small trees, each of another shape, and some batch sizes for a request without mates.

    The bounds are small: a drawn session has up to four requests.
    """
    up_to = draw(st.sampled_from(((1, 2), (1, 3), (2, 3), (1, 2, 3), (1, 2, 4))))
    every = st.lists(static_trees(named), min_size=len(up_to), max_size=len(up_to), unique_by=lambda tree: tree.parent)
    batches = draw(st.lists(st.integers(1, 5), min_size=2, max_size=5))
    return Dispatch(up_to, tuple(draw(every)), tuple(batches))


@st.composite
def expansions(draw: st.DrawFn, named: int) -> Expansion:
    """Small dynamic trees; one in four is a greedy top-k tree, which holds a frontier at each level."""
    top_k = min(draw(st.sampled_from(TOP_K)), named)
    # A frontier chooses only where there are more candidates than it holds, which is below level 1.
    depth = draw(st.integers(2 if top_k > 1 else 1, MOST_LEVELS))
    if draw(st.integers(0, 3)) == 3:
        return Expansion(top_k, depth, 1 + top_k * depth, rerank=False)
    candidates = top_k + (depth - 1) * top_k**2
    # A third of the trees each: of any size, of at most half as many nodes as there are candidates, of the fewest.
    most = draw(st.sampled_from((candidates, max(top_k * depth // 2, depth), min(depth, candidates))))
    return Expansion(top_k, depth, draw(st.integers(min(depth, candidates) + 1, min(most + 1, MOST_TOTAL))))


@st.composite
def stopped_trees(draw: st.DrawFn, static: st.SearchStrategy[RankTree]) -> Stopped:
    """Trees of `static` whose paths end by the draft's law; one in three multiplies the probabilities along a path."""
    tree = draw(static)
    cumulated = draw(st.integers(0, 2)) == 2
    return Stopped(tree, draw(st.sampled_from(BOUNDS)), draw(st.sampled_from(STOP_TIMES[:2])), cumulated)
