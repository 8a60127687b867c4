"""The joined tree of several drafts, made of the token paths of each."""

from specverify.reference.draft.merged import Merged
from specverify.reference.oracle.draft.question import PROPOSALS, Question, proposes
from specverify.reference.trace import Drafted
from specverify.reference.tree import Tree


@proposes(Merged.TAG)
def propose(draft: Merged, question: Question) -> Drafted:
    """The first `nodes` distinct paths, by level, then by draft, then by row."""
    trees = [PROPOSALS[part.TAG](part, question).tree for part in draft.drafts]
    nodes = [
        (tree.depth[node], number, node, tree.tokens_to(node))
        for number, tree in enumerate(trees)
        for node in range(len(tree))
    ]
    paths = list(dict.fromkeys(path for *_, path in sorted(nodes)))[: draft.nodes]
    parents = (0, *(paths.index(path[:-1]) for path in paths[1:]))
    return Drafted(Tree(parents, tuple(path[-1] for path in paths)))
