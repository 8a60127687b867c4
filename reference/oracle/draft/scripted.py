"""The proposal of a script: its trees one by one, then the bare root."""

from specverify.reference.draft import Scripted
from specverify.reference.oracle.draft.question import Question, proposes
from specverify.reference.trace import Drafted
from specverify.reference.tree import Tree


@proposes(Scripted.TAG)
def propose(draft: Scripted, question: Question) -> Drafted:
    """The tree of this step, with the pending root in place of the tree's own root."""
    root = question.tokens[-1]
    tree = draft.trees[question.step] if question.step < len(draft.trees) else Tree((0,), (root,))
    return Drafted(tree.with_root(root))
