"""Scripted trees whose accepted path is a side branch."""

from collections.abc import Sequence

from hypothesis import strategies as st

from specverify.reference.draft import Scripted
from specverify.reference.tree import Tree


@st.composite
def side_branches(draw: st.DrawFn, root: int, ahead: Sequence[int], vocabulary: int) -> Scripted:
    """One to three trees, in each of which a rejected row stands before every accepted one.

    A state kept by depth, by the last row, or by a scan in row order is right where the accepted path is the first rows
    of the block; here it never is. After the trees come steps without drafts.

    `root` is the last token of the prompt, `ahead` the greedy continuation; `vocabulary` counts token ids, at least 2.
    """
    trees: list[Tree] = []
    for _ in range(draw(st.integers(1, 3))):
        deep = draw(st.integers(1, 2))
        if len(ahead) < deep:
            break
        parent = [0]
        token = [root]
        above = 0
        for right in ahead[:deep]:
            offsets = draw(st.lists(st.integers(1, vocabulary - 1), min_size=1, max_size=9, unique=True))
            wrong = [(right + offset) % vocabulary for offset in offsets]
            parent = [*parent, *[above] * len(wrong), above]
            token = [*token, *wrong, right]
            above = len(parent) - 1
        trees.append(Tree(tuple(parent), tuple(token)))
        if len(ahead) <= deep:
            break
        root, ahead = ahead[deep], ahead[deep + 1 :]
    return Scripted(tuple(trees))
