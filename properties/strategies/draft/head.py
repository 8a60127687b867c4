"""Strategies for what all heads have: a layer, hidden states, a vocabulary."""

from hypothesis import strategies as st

from specverify.properties.strategies.draft.drawing import DraftSetting
from specverify.properties.strategies.draft.dynamic import trees
from specverify.properties.strategies.draft.static import static_trees
from specverify.properties.strategies.trees import side_by_side
from specverify.reference.architecture import Rope
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.draft_trees import DraftTree
from specverify.reference.tree import RankTree

LLAMA3 = Rope(kind="llama3", theta=500000.0, factor=8.0, original=64)
"""The rotary embedding of heads of Llama 3's models, whose original length is 8,192."""

LAYERS = (
    HeadLayer(1, 1, 4, 8),
    HeadLayer(2, 1, 4, 12),
    HeadLayer(4, 2, 6, 8, theta=500000.0),
    HeadLayer(2, 1, 4, 12, rope=Rope(kind="linear", factor=2.0), norm_eps=1e-6),
    HeadLayer(2, 2, 6, 8, rope=Rope(kind="yarn", factor=4.0, original=64)),
    HeadLayer(4, 2, 8, 12, theta=LLAMA3.theta, rope=LLAMA3),
)
"""The sizes of drawn heads, the smallest first, and the variants of their rotary embeddings."""

SEEDS = 2
"""Weight seeds per head; few, so that engines find most heads already made."""


def head_layers() -> st.SearchStrategy[HeadLayer]:
    """The sizes of a head's layer."""
    return st.sampled_from(LAYERS)


def head_trees(setting: DraftSetting, named: int) -> st.SearchStrategy[DraftTree]:
    """Static and dynamic trees; one static tree in four is two chains of three or four nodes.

    The later levels of two chains continue unlike rows.
    """
    if named < 2:
        return trees(setting, named, static_trees(named))
    chains = st.integers(3, 4).map(
        lambda height: RankTree(side_by_side(2, height), (0, 0, 1, *(0,) * (2 * height - 2)))
    )
    static = st.integers(0, 3).flatmap(lambda choice: chains if choice == 3 else static_trees(named))
    return trees(setting, named, static)


@st.composite
def one_state(draw: st.DrawFn, layers: int) -> HiddenStates:
    """The output of the last norm, or one time in four the residual stream after a layer."""
    if draw(st.integers(0, 3)) < 3:
        return HiddenStates(place="normed", shift=1)
    return HiddenStates((draw(st.integers(-1, layers - 1)),), shift=1)


@st.composite
def several_states(draw: st.DrawFn, layers: int) -> HiddenStates:
    """The residual stream at three places in ascending order; at all there are where the target is shallower."""
    places = list(range(-1, layers))
    while len(places) > 3:
        places.pop(draw(st.integers(0, len(places) - 1)))
    return HiddenStates(tuple(places), shift=1)


@st.composite
def likely_vocabularies(draw: st.DrawFn, setting: DraftSetting) -> tuple[int, ...]:
    """The target ids that a head can name: all (an empty tuple), or some with the target's next greedy tokens.

    A seeded head guesses at random, so that its tokens are accepted where it has few to choose from.
    """
    vocab = setting.model.vocab_size
    if vocab < 4 or draw(st.integers(0, 2)) == 0:
        return ()
    some = {*setting.ahead[: draw(st.integers(1, 4))], draw(st.integers(1, vocab - 1)), vocab - 1}
    return tuple(sorted(some))
