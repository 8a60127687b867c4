"""Strategy for scripted trees with steered tokens, for any number of acceptances."""

from hypothesis import strategies as st

from specverify.properties.strategies.acceptance import steered_trees
from specverify.properties.strategies.draft.drawing import DraftSetting, draws
from specverify.properties.strategies.models import can_list_ids
from specverify.properties.strategies.trees import MAX_NODES, deep_parents, large_parents, parents, parents_of_size
from specverify.reference.draft import Scripted
from specverify.reference.tree import Tree


@draws(Scripted.TAG)
@st.composite
def scripts(draw: st.DrawFn, setting: DraftSetting) -> Scripted:
    """One to three trees for successive steps; each has the root that the steps before lead to, by `ahead`."""
    trees: list[Tree] = []
    root = setting.prompt[-1]
    ahead = setting.ahead
    for step in range(draw(st.integers(1, 3))):
        large = setting.large_trees and step == 0
        through = step == 0 and not large and draw(st.integers(0, 4)) > 2
        most = MAX_NODES if step == 0 and can_list_ids(setting.model) else 8
        shapes = deep_parents() if through else large_parents() if large else parents(most)
        if step > 0 and len(trees[-1]) <= 8 and draw(st.booleans()):
            shapes = parents_of_size(len(trees[-1]))  # catches engines that cache masks by the number of rows alone
        steered = draw(steered_trees(root, ahead, setting.model.vocab_size, shapes, through))
        trees.append(steered.tree)
        # The greedy tokens that were computed ahead are used up.
        if steered.accepted + 1 > len(ahead):
            break
        root, ahead = ahead[steered.accepted], ahead[steered.accepted + 1 :]
    return Scripted(tuple(trees))
