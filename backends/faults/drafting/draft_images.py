"""Faults of drafts that see the images of a prompt: embeddings and positions of their rows."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.draft.base import HeadRows
from specverify.backends.engine.draft.filling import CachedTreeFilling
from specverify.backends.engine.draft.head import HeadDraft
from specverify.backends.engine.model.axes import Axes, ImageEmbeddings, ImageRows
from specverify.backends.engine.model.head import SeenRows
from specverify.backends.engine.request import Request
from specverify.backends.engine.sampling.step import StepSampling
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import drafted_fault, in_place_of

Beginning = tuple[StepSampling | None, tuple[list[int], StepSampling | None, Tensor | None]]
"""The answer of the method with which a request begins to draft."""


def with_draft_images(change: Callable[[Axes], Axes]) -> Callable[[Seams], Seams]:
    """From seams to those whose drafts see what `change` makes of images; twice is the same as once."""

    class SeeingRequest(Request):
        def begin_drafting(self) -> Beginning:
            draft = self.draft
            if isinstance(draft, CachedTreeFilling) and draft.images is not None:
                draft.images = change(draft.images)
            return super().begin_drafting()

    return in_place_of("request")(SeeingRequest)


def with_seeing_heads(kind: type[HeadDraft]) -> Callable[[Seams], Seams]:
    """From seams to those whose heads that see images have the methods of `kind`, which no other class has as base."""

    class SeeingRequest(Request):
        def begin_drafting(self) -> Beginning:
            draft = self.draft
            if isinstance(draft, HeadDraft) and draft.images is not None and not isinstance(draft, kind):
                # Only the class changes: all that the right code has made of the draft stays.
                draft.__class__ = type(kind.__name__, (kind, type(draft)), {})
            return super().begin_drafting()

    return in_place_of("request")(SeeingRequest)


@drafted_fault(
    "draft-embeds-placeholders",
    "sgl-project/sglang pull request 19730: the draft is not given mm_input_embeds; issue 35440: it cannot make them, "
    "since embed_tokens(input_ids) is the placeholder's row",
    "an image with embeddings of its own, and a draft that sees images",
)
def placeholders(seams: Seams) -> Seams:
    """A draft embeds the placeholder tokens of an image in place of what the vision tower made of it."""
    return with_draft_images(lambda images: replace(images, embeddings=None))(seams)


@drafted_fault(
    "draft-continues-from-last-axis",
    "lightseekorg/tokenspeed pull request 236 (review): text goes on from last_position[0] + 1, where it should from "
    "the maximum of all axes",
    "an image that is wider or higher than it has frames, and a draft with positions on three axes",
)
def from_last_axis(seams: Seams) -> Seams:
    """The text behind an image goes on, in the draft, from the last image token's position in time."""

    def change(images: Axes) -> Axes:
        return replace(images, delta=int(images.image_positions[0, -1]) + 1 - images.image_positions.shape[1])

    return with_draft_images(change)(seams)


class FirstEmbeddings(ImageEmbeddings):
    """Embeddings of images of which every forward behind the first one takes the first ones."""

    def of_columns(self, columns: Tensor) -> ImageRows | None:
        images = super().of_columns(columns)
        # The first row of a head holds the token of column 1.
        if images is None or int(columns[0]) <= 1:
            return images
        return replace(images, embeddings=self.embeddings[: len(images.rows)])


def beginning_anew(images: Axes) -> Axes:
    """`images` whose embeddings begin anew with each forward of the prompt."""
    embeddings = images.embeddings
    anew = None if embeddings is None else FirstEmbeddings(embeddings.columns, embeddings.embeddings)
    return replace(images, embeddings=anew)


@drafted_fault(
    "draft-image-begins-anew",
    "family of kekzl/imp pull request 1184: the k-th image token is found among the tokens of a chunk, so that a "
    "second chunk takes the first embeddings again",
    "an image with embeddings of its own behind a chunk of the prompt or known pages, and a draft that sees images",
)
def begins_anew(seams: Seams) -> Seams:
    """A chunk of the prompt, or what follows known pages, takes the first embeddings of an image in the draft."""
    return with_draft_images(beginning_anew)(seams)


class NodesAtTokenCount(HeadDraft):
    """A head whose nodes have the positions of their columns."""

    def node_positions(self, positions: Tensor) -> Tensor:
        return positions


class PromptRows(HeadDraft):
    """A head whose rows of a prompt hold other embeddings than they should, up to the end of its last image.

    Attributes:
        text: The tokens so far.
    """

    text: list[int]

    def catch_up(self, tokens: list[int], hidden: Tensor) -> Tensor:
        self.text = tokens
        return super().catch_up(tokens, hidden)

    def seen_rows(self, rows: HeadRows) -> SeenRows | None:
        seen = super().seen_rows(rows)
        if seen is None or self.images is None or rows.first >= self.images.image_positions.shape[1]:
            return seen
        return replace(seen, images=self.wrong_images(rows, seen))

    def wrong_images(self, rows: HeadRows, seen: SeenRows) -> ImageRows | None:
        """The rows whose tokens have another embedding than their own."""
        return seen.images


class OwnColumns(PromptRows):
    """Rows embed the token of their own column; the last one, its token."""

    def wrong_images(self, rows: HeadRows, seen: SeenRows) -> ImageRows | None:
        count = len(rows.tokens) - 1
        if not self.lead or self.images is None or count < 1:
            return seen.images
        columns = torch.arange(rows.first, rows.first + count)
        embedded = self.head.embedding.detach().cpu()[torch.tensor(self.text)[columns]].double()
        images = self.images.images_at(columns)
        return ImageRows(torch.arange(count), embedded if images is None else images.put_into(embedded))


class StatesForEmbeddings(PromptRows):
    """Rows embed the target's last state at their own column; the last one, its token."""

    def wrong_images(self, rows: HeadRows, seen: SeenRows) -> ImageRows | None:
        count = len(rows.tokens) - 1
        if self.words.reads.place != "normed" or count < 1:
            return seen.images
        return ImageRows(torch.arange(count), rows.hidden[:count].detach().cpu().double())


@drafted_fault(
    "draft-nodes-at-token-count",
    "TheTom/llama-cpp-turboquant pull request 344: draft() places its rows at n_past, the count of tokens, which is "
    "not the next position behind an image",
    "an image whose delta is not 0, and a head with positions on three axes that runs nodes",
)
def at_token_count(seams: Seams) -> Seams:
    """The nodes of a head's tree are numbered by the count of tokens before them, as if no image stood there."""
    return with_seeing_heads(NodesAtTokenCount)(seams)


@drafted_fault(
    "draft-embeddings-not-rotated",
    "sgl-project/sglang issue 35440: input_ids are rotated left by one and mm_input_embeds is not, so that every "
    "prefix slot is off by one",
    "an image, and a head that sees images whose rows hold the token behind their state",
)
def not_rotated(seams: Seams) -> Seams:
    """A head embeds, in the rows of a prompt with an image, the tokens of the states in place of those behind them."""
    return with_seeing_heads(OwnColumns)(seams)


@drafted_fault(
    "draft-embeds-target-states",
    "sgl-project/sglang issue 35440: mm_input_embeds refers to a tensor that the target overwrites in place, so that "
    "the draft reads the target's final hidden states",
    "an image, and a head that sees images and reads the last norm's output",
)
def states_for_embeddings(seams: Seams) -> Seams:
    """A head reads the target's last states in place of embeddings, in the rows of a prompt with an image."""
    return with_seeing_heads(StatesForEmbeddings)(seams)
