"""Strategy for drafts of blocks on built-in targets."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from specverify.properties.strategies.draft.drawing import DraftSetting, draws, kinds_of_weights
from specverify.properties.strategies.draft.dynamic import BOUNDS
from specverify.properties.strategies.draft.head import (
    SEEDS,
    head_layers,
    head_trees,
    likely_vocabularies,
    several_states,
)
from specverify.reference.draft.block import MARKOV, Block
from specverify.reference.draft_trees import DraftTree, Expansion, Stopped, outlines
from specverify.reference.tree import RankTree

SPARE_SLOTS = (0, 1, 2, 0, 8)
"""Slots of a block that its tree does not reach; engines draft a few tokens with published blocks of 8 to 16 slots."""

WINDOWS = (1, 2, 3, 5)
"""Windows of layers: shorter and longer than drawn prompts."""

RANKS = (1, 3)
"""Ranks of Markov heads and of selectors."""

TAPS = (2, 2, 1, 3)
"""Taps of convolutions; published ones have two."""

CANDIDATES = (3, 2, 4, 8)
"""Candidates of selectors; published ones have 16, of larger vocabularies."""


@draws(Block.TAG)
@st.composite
def block_drafts(draw: st.DrawFn, setting: DraftSetting) -> Block:
    """Blocks over a tree, mostly with a reduced vocabulary; each switch is set in one of two to four."""
    # No token stands beside a state that becomes context.
    reads = replace(draw(several_states(setting.model.architecture.layers)), shift=0)
    vocabulary = draw(likely_vocabularies(setting))
    named = len(vocabulary) or setting.model.vocab_size
    selector = draw(selectors(named))
    # A selector chooses between few tokens, and fills no dynamic tree.
    kinds = tuple(kind for kind in setting.tree_kinds if kind != "dynamic") if selector else setting.tree_kinds
    shape = draw(head_trees(replace(setting, tree_kinds=kinds), selector.get("selector_top_k", named)))
    deepest = shape.depth if isinstance(shape, Expansion) else max(outline.height for outline in outlines(shape))
    from_anchor = draw(st.integers(0, 2)) == 2
    slots = max(deepest, 1) + (not from_anchor) + draw(st.sampled_from(SPARE_SLOTS))
    further = selector or draw(markov_heads())
    switches = draw(layers_and_windows()) | draw(convolutions(setting.model.architecture.hidden_size)) | further
    mask_token = draw(st.integers(0, setting.model.vocab_size - 1))
    layer = draw(head_layers())
    seed = draw(st.integers(0, SEEDS - 1))
    quantised = draw(kinds_of_weights(setting))
    confidence = draw(confidences(switches))
    if confidence and "stopped" in setting.tree_kinds:
        shape = draw(ended_by_head(shape))
    fields = {
        "confidence": confidence,
        "from_anchor": from_anchor,
        "vocabulary": vocabulary,
        "seed": seed,
        "quantised": quantised,
        **switches,
    }
    return Block(shape, reads, layer, slots, mask_token, **fields)


@st.composite
def confidences(draw: st.DrawFn, switches: dict[str, Any]) -> str:
    """The input of a confidence head: every published DSpark has such a head, which mostly reads the token before."""
    if "markov_rank" in switches:
        return draw(st.sampled_from(("markov", "", "markov", "state")))
    return "state" if draw(st.integers(0, 3)) == 3 else ""


@st.composite
def ended_by_head(draw: st.DrawFn, shape: DraftTree) -> DraftTree:
    """`shape` with paths that end by a confidence head; as it is where its own scores or the batch decide its form."""
    if isinstance(shape, Stopped):
        return replace(shape, when="head")
    if not isinstance(shape, RankTree):
        return shape
    return Stopped(shape, draw(st.sampled_from(BOUNDS)), "head", draw(st.booleans()))


@st.composite
def layers_and_windows(draw: st.DrawFn) -> dict[str, Any]:
    """The layers, one or two: a third of draws have windows, mostly causal, and the others are rarely causal."""
    layers = draw(st.integers(1, 2))
    if draw(st.integers(0, 2)) < 2:
        return {"layers": layers, "causal": draw(st.sampled_from(("none", "none", "none", "all")))}
    windows = [draw(st.sampled_from(WINDOWS)) for _ in range(layers)]
    if layers > 1 and draw(st.booleans()):
        windows[-1] = 0
    causal = draw(st.sampled_from(("windowed", "windowed", "none", "all")))
    return {"layers": layers, "windows": tuple(windows), "causal": causal}


@st.composite
def markov_heads(draw: st.DrawFn) -> dict[str, Any]:
    """No Markov head, as DFlash has none, or one of each kind, as DSpark has."""
    if draw(st.booleans()):
        return {}
    return {"markov_rank": draw(st.sampled_from(RANKS)), "markov": draw(st.sampled_from(MARKOV))}


@st.composite
def convolutions(draw: st.DrawFn, channels: int) -> dict[str, Any]:
    """Mostly no convolutions; one time in three some, of groups that divide the `channels` of a row."""
    if draw(st.integers(0, 2)) < 2:
        return {}
    groups = [size for size in (1, 2, 4, 16) if channels % size == 0]
    return {"conv_taps": draw(st.sampled_from(TAPS)), "conv_group": draw(st.sampled_from(groups))}


@st.composite
def selectors(draw: st.DrawFn, named: int) -> dict[str, int]:
    """Mostly no selector; one time in three one between fewer tokens than the `named` ones that the draft can name."""
    counts = [count for count in CANDIDATES if count <= named]
    if not counts or draw(st.integers(0, 2)) < 2:
        return {}
    return {"selector_rank": draw(st.sampled_from(RANKS)), "selector_top_k": draw(st.sampled_from(counts))}
