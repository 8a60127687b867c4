"""Strategy for images: prompts of a drawn case get blocks on three axes, or none.

The target of such a case becomes one that has three axes, of the same vocabulary, and scripted trees are steered again.
"""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from specverify.properties.strategies.models import can_list_ids
from specverify.properties.strategies.prompts import LONGEST
from specverify.properties.strategies.serving.adapters import steer_draft
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Draft
from specverify.reference.family import FAMILIES
from specverify.reference.images import Image, Images
from specverify.reference.session import Session

IMAGES = 16
"""Images are drawn for one case in this many, where its target may be another one."""

TOGETHER = 4
"""The same for a session."""

SHARED = 2
"""The same for a session in a layout with a prefix cache, whose pages must be kept apart by images."""

# (frames, height, width); the first ones fit into short prompts.
SIZES = ((1, 1, 2), (1, 2, 2), (1, 2, 1), (2, 1, 1), (1, 1, 3), (1, 2, 3), (1, 3, 2), (2, 2, 1), (2, 2, 2), (3, 1, 1))
"""Sizes of drawn blocks."""


def image_targets(case: Case, within: Abilities | None) -> list[Architecture]:
    """Architectures with three axes that may take the place of the target's; none for a case that stays as it is."""
    if (within is not None and not within.images) or _keeps_target(case):
        return []
    assert isinstance(case.model, Seeded)
    arch = case.model.architecture
    sizes: dict[str, Any] = {"vocab_size": arch.vocab_size, "max_positions": arch.max_positions}
    if not can_list_ids(case.model):
        sizes["tied"] = True  # a head of its own would have as many weights again
    architectures = [
        Architecture(family.name, **{**fields, **sizes})
        for family in FAMILIES.values()
        if family.three_axes
        for fields in family.drawn
    ]
    return [architecture for architecture in architectures if within is None or within.not_loaded(architecture) is None]


def _keeps_target(case: Case) -> bool:
    """Whether `case` needs the target that it has."""
    model = case.model
    session = case.session or Session()
    assert isinstance(model, Seeded)
    drafts = [case.draft, *(mate.draft for mate in session.mates)]
    drafts += [action.draft for action in session.actions if action.draft is not None]
    return (
        # A family that is seldom drawn would hardly be met beside kept prefixes.
        model.architecture.words.rare
        or model.weights != "margin"
        or model.adapter is not None
        or any(mate.adapter is not None for mate in session.mates)
        or (case.ranks > 1 and not case.spread)
        or len(case.prompt) > LONGEST
        or any(draft.reads is not None for draft in drafts)
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
    """At most two blocks of an image inside `prompt`, the first often at its beginning; none in a short prompt."""
    blocks: list[Image] = []
    begin = draw(st.sampled_from((0, 0, 1, 2)))
    for _ in range(draw(st.sampled_from((1, 1, 2)))):
        fitting = [size for size in SIZES if begin + size[0] * size[1] * size[2] < len(prompt)]
        if not fitting:
            break
        blocks.append(Image(begin, *draw(st.sampled_from(fitting))))
        begin = blocks[-1].end + draw(st.sampled_from((0, 1, 3)))
    return tuple(blocks)


@st.composite
def with_images(draw: st.DrawFn, case: Case, architectures: list[Architecture]) -> Case:
    """`case` on a target with one of `architectures`, with images in its own prompt or in a mate's.

    Requests take their images from two drawn lists or have none, so that prompts that begin alike have other images.
    The twin of a fork mostly has its source's, whose columns it then shares.
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
    changed = replace(case, model=own_target, draft=_for_target(case.draft, case.prompt, old, own_target), session=None)
    if case.session is None:
        return changed
    for action in case.session.actions:
        if action.kind == "fork" and draw(st.integers(0, 3)):
            source, twin = action.requests
            chosen_images[twin] = chosen_images[source] if twin else chosen_images[twin]
    new_mates = []
    for mate, mate_images in zip(mates, chosen_images[1:], strict=True):
        target = replace(plain, images=_images_inside(mate_images, mate.prompt))
        new_mates.append(replace(mate, draft=_for_target(mate.draft, mate.prompt, old, target), images=mate_images))
    actions = [
        action if action.draft is None else replace(action, draft=_for_target(action.draft, (), old, plain))
        for action in case.session.actions
    ]
    return replace(changed, session=replace(case.session, mates=tuple(new_mates), actions=tuple(actions)))


def _images_inside(images: Images, prompt: tuple[int, ...]) -> Images:
    """The images of `images` behind which `prompt` goes on."""
    return tuple(image for image in images if image.end < len(prompt))


def _for_target(draft: Draft, prompt: tuple[int, ...], old: Seeded, new: Seeded) -> Draft:
    """`draft` for the target `new` in place of `old`: steered again, and a model of the old kind becomes a new one."""
    if isinstance(draft.model, Seeded):
        is_target_kind = draft.model.architecture == old.architecture
        return draft.with_model(replace(draft.model, architecture=new.architecture)) if is_target_kind else draft
    return steer_draft(draft, prompt, old, new) if prompt else draft
