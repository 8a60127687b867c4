"""Strategy for images: prompts get blocks on three axes, or none, and drafts see them or read tokens.

The target of such a case becomes one that has three axes, of the same vocabulary, and scripted trees are steered again.
A head is made for the new target, of as many layers as the old one, since it reads the states of named layers.
"""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from specverify.properties.strategies.acceptance import continuation
from specverify.properties.strategies.draft.drawing import DRAWN, DraftSetting
from specverify.properties.strategies.models import HEAD_DIMS, WIDEST_ROWS, can_list_ids, widened
from specverify.properties.strategies.prompts import LONGEST
from specverify.properties.strategies.serving.adapters import steer_draft
from specverify.properties.strategies.within import admitted_values
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Draft, LanguageModel
from specverify.reference.draft.base import most_rows
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.layer_head import LayerHead
from specverify.reference.draft.mtp import PLAIN_LAYER, Mtp
from specverify.reference.draft_trees import TREE_KINDS
from specverify.reference.family import FAMILIES
from specverify.reference.images import Image, Images
from specverify.reference.malformed import Malformed
from specverify.reference.session import Session

IMAGES = 6
"""Images are drawn for one case in this many, where its target may be another one."""

TOGETHER = 3
"""The same for a session."""

SHARED = 2
"""The same for a session in a layout with a prefix cache, whose pages must be kept apart by images."""

# (frames, height, width); the first ones fit into short prompts.
SIZES = ((1, 1, 2), (1, 2, 2), (1, 2, 1), (2, 1, 1), (1, 1, 3), (1, 2, 3), (1, 3, 2), (2, 2, 1), (2, 2, 2), (3, 1, 1))
"""Sizes of drawn blocks."""

SEEDS = (1, 2, 0)
"""Seeds of the embeddings of drawn blocks; 0 for those of their tokens."""

BLIND = 6
"""Of so many drafts that could see images one reads the tokens of prompts."""

OTHER_KIND = 2
"""Of so many drafts that see no images, beside images, one is drawn anew, of SEEING_KINDS."""

SEEING_KINDS = (LanguageModel.TAG, Eagle1.TAG, Eagle3.TAG, Mtp.TAG)
"""Kinds of draft that may see images."""

NAMED = 4
"""The next tokens of a target that a head with a part of the ids can name."""

ROTATIONS = ((0, 1, 2), (1, 2, 0), (2, 0, 1))
"""The orders of axes in which a head's rotary pairs are shared out, one pair after the other."""


def image_targets(case: Case, within: Abilities | None) -> list[Architecture]:
    """Architectures with three axes that may take the place of the target's; none for a case that stays as it is."""
    if (within is not None and not within.images) or _keeps_target(case):
        return []
    assert isinstance(case.model, Seeded)
    arch = case.model.architecture
    sizes: dict[str, Any] = {"vocab_size": arch.vocab_size, "max_positions": arch.max_positions}
    if any(draft.reads is not None for draft in _drafts(case)):
        sizes["windows"] = (0,) * arch.layers
    if not can_list_ids(case.model):
        sizes["tied"] = True  # a head of its own would have as many weights again
    architectures = [
        Architecture(family.name, **{**fields, **sizes})
        for family in FAMILIES.values()
        if family.three_axes
        for fields in family.drawn
    ]
    if arch.head_dim in HEAD_DIMS:
        narrow_enough = [kind for kind in architectures if kind.heads * arch.head_dim <= WIDEST_ROWS]
        architectures = [widened(kind, arch.head_dim) for kind in narrow_enough] or architectures
    return [
        architecture
        for architecture in architectures
        if (within is None or within.not_loaded(architecture) is None) and _takes_heads(architecture, case)
    ]


def _drafts(case: Case) -> list[Draft]:
    """The drafts of all requests, and those to which the session switches."""
    session = case.session or Session()
    drafts = [case.draft, *(mate.draft for mate in session.mates)]
    return drafts + [action.draft for action in session.actions if action.draft is not None]


def _takes_heads(architecture: Architecture, case: Case) -> bool:
    """Whether a target with `architecture` can be made, and the heads of `case` for it.

    Rows of wide heads together with a large vocabulary may be more weights than a built-in model has.
    """
    assert isinstance(case.model, Seeded)
    try:
        target = replace(case.model, architecture=architecture)
        for draft in _drafts(case):
            if draft.reads is not None:
                _of_plain_layers(draft).check_target(target)
    except Malformed:
        return False
    return True


def _of_plain_layers(draft: Draft) -> Draft:
    """`draft`, or MTP modules of plain layers in place of those of the target's family."""
    return replace(draft, layer=PLAIN_LAYER) if isinstance(draft, Mtp) and draft.layer is None else draft


def _keeps_target(case: Case) -> bool:
    """Whether `case` needs the target that it has."""
    model = case.model
    session = case.session or Session()
    assert isinstance(model, Seeded)
    return (
        model.weights != "margin"
        or model.adapter is not None
        or any(mate.adapter is not None for mate in session.mates)
        or (case.ranks > 1 and not case.spread)
        or len(case.prompt) > LONGEST
        or case.layout.latent
        or case.layout.stay_in_chunk
    )


def image_interval(case: Case) -> int:
    """Images are drawn for one in this many cases like `case`."""
    if case.session is None:
        return IMAGES
    return SHARED if case.layout.traits.keeps_prefixes else TOGETHER


@st.composite
def images(draw: st.DrawFn, prompt: tuple[int, ...]) -> Images:
    """At most two blocks of an image inside `prompt`, the first near its beginning or middle; none in a short prompt.

    Text before an image fills pages and chunks of its own.
    """
    blocks: list[Image] = []
    begin = draw(st.sampled_from((0, 0, 1, 2, len(prompt) // 2, len(prompt) // 2)))
    for _ in range(draw(st.sampled_from((1, 1, 2)))):
        fitting = [size for size in SIZES if begin + size[0] * size[1] * size[2] < len(prompt)]
        if not fitting:
            break
        blocks.append(Image(begin, *draw(st.sampled_from(fitting)), seed=draw(st.sampled_from(SEEDS))))
        begin = blocks[-1].end + draw(st.sampled_from((0, 1, 3)))
    return tuple(blocks)


@st.composite
def with_images(
    draw: st.DrawFn, case: Case, architectures: list[Architecture], within: Abilities | None = None
) -> Case:
    """`case` on a target with one of `architectures`, with images in its own prompt or in a mate's.

    Requests take their images from two drawn lists or have none, so that prompts that begin alike have other images.
    The twin of a fork mostly has its source's, whose columns it then shares. Of the drafts that can see images one in
    BLIND reads tokens; an engine may have no others.
    """
    old = case.model
    mates = case.session.mates if case.session else ()
    assert isinstance(old, Seeded)
    plain = replace(old, architecture=draw(st.sampled_from(architectures)))
    prompts = [case.prompt, *(mate.prompt for mate in mates)]
    longest = max(prompts, key=len)
    pool = (draw(images(longest)), (), draw(images(longest)))
    lists = [pool[0], *(draw(st.sampled_from(pool)) for _ in mates)]
    chosen_images = [_images_inside(image_list, prompt) for image_list, prompt in zip(lists, prompts, strict=True)]
    own_target = replace(plain, images=chosen_images[0])
    own_draft = _for_target(case.draft, case.prompt, old, own_target)
    own_draft = draw(of_seeing_kind(own_draft, replace(case, model=own_target, draft=own_draft, session=None), within))
    own_draft = draw(seeing(own_draft, plain, architectures, within))
    changed = replace(case, model=own_target, draft=own_draft, session=None)
    if case.session is None:
        return changed
    for action in case.session.actions:
        if action.kind == "fork" and draw(st.integers(0, 3)):
            source, twin = action.requests
            chosen_images[twin] = chosen_images[source] if twin else chosen_images[twin]
    new_mates = []
    for mate, mate_images in zip(mates, chosen_images[1:], strict=True):
        target = replace(plain, images=_images_inside(mate_images, mate.prompt))
        draft = _for_target(mate.draft, mate.prompt, old, target)
        request = replace(
            case,
            model=target,
            prompt=mate.prompt,
            draft=draft,
            sampling=mate.sampling,
            stops=mate.stops,
            steps=0,
            session=None,
        )
        draft = draw(of_seeing_kind(draft, request, within))
        draft = draw(seeing(draft, plain, architectures, within))
        new_mates.append(replace(mate, draft=draft, images=mate_images))
    actions = list(case.session.actions)
    for index, action in enumerate(actions):
        if action.draft is not None:
            switched = draw(seeing(_for_target(action.draft, (), old, plain), plain, architectures, within))
            actions[index] = replace(action, draft=switched)
    return replace(changed, session=replace(case.session, mates=tuple(new_mates), actions=tuple(actions)))


def _images_inside(images: Images, prompt: tuple[int, ...]) -> Images:
    """The images of `images` behind which `prompt` goes on."""
    return tuple(image for image in images if image.end < len(prompt))


@st.composite
def of_seeing_kind(draw: st.DrawFn, draft: Draft, request: Case, within: Abilities | None) -> Draft:
    """`draft` of `request`, or one time in OTHER_KIND a draft of a kind that can see images, where both fit.

    Most drafts are scripts, which see nothing. A request that samples keeps its draft, by whose law it was drawn.
    """
    kinds = admitted_values(SEEING_KINDS, within, "drafts")
    fills = within is None or within.draft_trees
    is_fixed = draft.TAG in SEEING_KINDS or draft.shared or not request.sampling.greedy or not fills
    if is_fixed or not kinds or draw(st.integers(0, OTHER_KIND - 1)):
        return draft
    assert isinstance(request.model, Seeded)
    tree_kinds = tuple(kind for kind in admitted_values(TREE_KINDS, within, "tree_kinds") if kind != "dispatched")
    ahead = continuation(request.model, request.prompt)
    quantises = within is None or within.quantised
    setting = DraftSetting(request.model.bare, request.prompt, ahead, fills, tree_kinds, quantises, False)
    other: Draft = draw(DRAWN[draw(st.sampled_from(kinds))](setting))
    grows = most_rows(other) > most_rows(draft) or other.height > draft.height
    if grows and request.layout.pages:  # the pool was drawn for the smaller tree
        return draft
    try:
        replace(request, draft=other)
    except Malformed:  # a tree that is deeper than the pages or the positions allow
        return draft
    return draft if within is not None and within.outside(replace(request, draft=other)) else other


@st.composite
def seeing(
    draw: st.DrawFn, draft: Draft, target: Seeded, architectures: list[Architecture], within: Abilities | None
) -> Draft:
    """`draft` of `target`, which mostly sees images where its kind and the engine can.

    A model that is unlike the target becomes one with any of `architectures`, whose rows may have another width.
    """
    sees = (within is None or within.draft_images) and draw(st.integers(0, BLIND - 1)) > 0
    if sees and isinstance(draft.model, Seeded) and not draft.model.architecture.words.three_axes:
        draft = draft.with_model(replace(draft.model, architecture=draw(st.sampled_from(architectures))))
    seeing_draft = draft.as_seeing
    if seeing_draft is None:
        return draft
    if isinstance(seeing_draft, LayerHead):
        rotation = draw(st.sampled_from((None, *ROTATIONS)))
        layer = seeing_draft.layer
        pairs = layer.head_dim // 2
        sections = () if rotation is None else tuple(len(range(rotation[axis], pairs, 3)) for axis in range(3))
        seeing_draft = replace(seeing_draft, layer=replace(layer, sections=sections))
    try:
        seeing_draft.check_target(target)
    except Malformed:  # rows of a width of their own
        return draft
    return seeing_draft if sees else draft


def _for_target(draft: Draft, prompt: tuple[int, ...], old: Seeded, new: Seeded) -> Draft:
    """`draft` for the target `new` in place of `old`: steered again, and a model of the old kind becomes a new one.

    A head that names a part of the ids names those with which the new target goes on, too.
    """
    if draft.reads is not None:
        draft = _of_plain_layers(draft)
        if isinstance(draft, Eagle3) and draft.vocabulary and prompt:
            ahead = continuation(new, prompt)[:NAMED]
            return replace(draft, vocabulary=tuple(sorted({*draft.vocabulary, *ahead})))
        return draft
    if isinstance(draft.model, Seeded):
        is_target_kind = draft.model.architecture == old.architecture
        return draft.with_model(replace(draft.model, architecture=new.architecture)) if is_target_kind else draft
    return steer_draft(draft, prompt, old, new) if prompt else draft
