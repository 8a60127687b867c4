"""Strategies for drafts: one file for each kind, which registers under its tag.

Every module of this folder is imported, so that a new kind is a new file here and no line elsewhere.
"""

from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules

from hypothesis import strategies as st

from specverify.properties.strategies.draft.drawing import DRAWN, DraftSetting
from specverify.properties.strategies.draft.mtp import has_modules
from specverify.properties.strategies.draft.side_branch import side_branches
from specverify.properties.strategies.models import loading_limits
from specverify.properties.strategies.swarm import ALL_ON, Swarm
from specverify.properties.strategies.within import admitted_values
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Seeded
from specverify.reference.draft import Draft, Scripted
from specverify.reference.draft.block import Block
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.mtp import Mtp
from specverify.reference.draft.trie import Trie
from specverify.reference.draft_trees import TREE_KINDS

# Importing a module registers its strategies in DRAWN.
for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

PLAIN = ("scripted", "scripted", "scripted", "model", "scripted", "ngram")
"""Kinds of draft, each as often as it is drawn; Hypothesis shrinks towards the first."""

LEARNING = ("scripted", "model", "scripted", "model", "ngram", "model")
"""The same for sampled cases and for sessions, where interruptions endanger a draft's cache most."""


FURTHER = 5
"""How often a further kind is drawn, beside twelve draws of PLAIN; then one of them is chosen."""

FURTHER_LEARNING = 6
"""The same beside twelve draws of LEARNING."""

MODULES_AGAIN = 4
"""How often MTP modules are among the further kinds again on targets of families with modules of their own layers."""

HEADS = (Block.TAG, Eagle1.TAG, Eagle3.TAG, Mtp.TAG)
"""Heads with a KV cache of their own and states of the target beside it: what a session interrupts in most servers."""


@st.composite
def any_draft(
    draw: st.DrawFn,
    model: Seeded,
    prompt: tuple[int, ...],
    ahead: Sequence[int],
    learning: bool = False,
    within: Abilities | None = None,
    large_trees: bool = False,
    swarm: Swarm = ALL_ON,
) -> Draft:
    """A draft: mostly scripted trees, or a model half of the time if `learning`; else a trie or a further kind.

    For a target with a recurrent state the accepted path is a side branch half of the time.
    It proposes nothing for an engine that brings a draft of its own. With `large_trees`, trees have up to 256 nodes or
    paths of more than 16. Draft models follow the `swarm`.
    """
    branches = within is None or (within.trees == "any" and Scripted.TAG in within.drafts)
    branches = branches and not large_trees
    if model.architecture.recurrent and branches and model.vocab_size > 1 and draw(st.booleans()):
        return draw(side_branches(prompt[-1], ahead, model.vocab_size))
    # Heads are dear, and each fault of a further kind shows in most of its cases: one draft in five is enough for all.
    further = admitted_values(sorted(set(DRAWN) - set(PLAIN)), within, "drafts")
    times = FURTHER_LEARNING if learning else FURTHER
    kinds = admitted_values((LEARNING if learning else PLAIN) * 2, within, "drafts") + (further[:1] * times)
    if not kinds:
        return Scripted()
    kind = draw(st.sampled_from(kinds))
    if kind in further:
        # Tries show that they are kept apart only in some sessions, and heads what an interruption leaves behind.
        again: tuple[str, ...] = (Trie.TAG, Trie.TAG, *HEADS) if learning else (Trie.TAG, Block.TAG)
        again += (Mtp.TAG,) * MODULES_AGAIN if has_modules(model.architecture) else ()
        kind = draw(st.sampled_from(further + admitted_values(again, within, "drafts")))
    fills = within is None or within.draft_trees
    tree_kinds = admitted_values(TREE_KINDS, within, "tree_kinds")
    quantises = within is None or within.quantised
    loading = loading_limits(within)
    setting = DraftSetting(model, prompt, ahead, fills, tree_kinds, quantises, large_trees, loading, swarm)
    draft: Draft = draw(DRAWN[kind](setting))
    return draft
