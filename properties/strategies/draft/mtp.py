"""Strategy for multi-token prediction modules on built-in targets."""

from dataclasses import replace

from hypothesis import strategies as st

from specverify.properties.strategies.draft.drawing import DraftSetting, draws, kinds_of_weights
from specverify.properties.strategies.draft.head import SEEDS, head_layers, head_trees, one_state
from specverify.properties.strategies.models import can_list_ids
from specverify.reference.architecture import LARGEST, Architecture
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.draft.mtp import PLAIN_LAYER, Mtp, module_architecture

MODULES = 3
"""Most modules that are drawn."""

CONVENTIONS = ((False, False, False), (True, False, False), (False, True, False), (False, False, True))
"""Choices of the state fed back, the first embedding, and the projection's order: vLLM's, and each other one alone."""


OWN_MATRICES = ((False, False),) * 6 + ((True, True), (False, True))
"""Whether modules have an embedding and a head of their own, where the vocabulary is small."""

PLAIN = 4
"""A plain layer stands in 1 of this many modules, on a target whose family has modules of its own layers."""


def has_modules(target: Architecture) -> bool:
    """Whether modules of `target` can have layers of its family."""
    return target.words.modules is not None and module_architecture(target, MODULES).weights <= LARGEST


@st.composite
def module_layers(draw: st.DrawFn, target: Architecture) -> HeadLayer | None:
    """The sizes of a plain layer, or None for a layer of the target's family."""
    if has_modules(target) and draw(st.integers(0, PLAIN - 1)) < PLAIN - 1:
        return None
    return draw(head_layers())


@draws(Mtp.TAG)
@st.composite
def mtp_modules(draw: st.DrawFn, setting: DraftSetting) -> Mtp:
    """Modules, one to three, over a tree, in one of CONVENTIONS; with the target's layers where its family has any."""
    reads = draw(one_state(setting.model.architecture.layers))
    shape = draw(head_trees(setting, setting.model.vocab_size))
    layer = draw(module_layers(setting.model.architecture))
    seed = draw(st.integers(0, SEEDS - 1))
    quantised = draw(kinds_of_weights(setting))
    own_embedding, own_head = draw(st.sampled_from(OWN_MATRICES if can_list_ids(setting.model) else OWN_MATRICES[:1]))
    modules = Mtp(
        shape,
        reads,
        layer,
        draw(st.integers(1, MODULES)),
        *draw(st.sampled_from(CONVENTIONS)),
        own_embedding,
        own_head,
        seed=seed,
        quantised=quantised,
    )
    return fitting_modules(modules, setting.model.architecture)


def fitting_modules(modules: Mtp, target: Architecture) -> Mtp:
    """`modules`, or what of them a built-in model may have on a wide target.

    They lose the matrices of their own first, then all modules but the first, then the layers of the target's family.
    """
    without_matrices = replace(modules, own_embedding=False, own_head=False)
    smaller = (modules, without_matrices, replace(without_matrices, count=1))
    fitting = (choice for choice in smaller if choice.layer is not None or choice.count_weights(target) <= LARGEST)
    return next(fitting, replace(without_matrices, layer=PLAIN_LAYER))
