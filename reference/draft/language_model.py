"""LanguageModel: a small causal language model that drafts with its own KV cache."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from specverify.reference.architecture import Model, Seeded
from specverify.reference.draft.base import Tokens
from specverify.reference.draft.static import Static
from specverify.reference.draft_trees import DraftTree
from specverify.reference.malformed import Malformed
from specverify.reference.rules import OMIT_DEFAULT


@dataclass(frozen=True)
class LanguageModel(Static):
    """A small causal model with a KV cache of its own: node i is the `rank[i]`-th best token after its parent.

    Attributes:
        model: The draft's own weights; its vocabulary size is the target's.
        shape: The tree that it fills, static or dynamic.
        vocabulary: Target ids that the draft's head can name, ascending (EAGLE-3's reduced vocabulary: draft id d
            means target id `vocabulary[d]`); empty means all of them.
        sees_images: Whether the model reads the images of the prompt, by embeddings of its own width and by positions
            on three axes, as a pair of Qwen2-VL models does; else it reads the prompt's tokens as text.
    """

    TAG = "model"
    WORD = "model"
    has_law = True

    model: Model
    shape: DraftTree
    vocabulary: tuple[int, ...] = ()
    sees_images: bool = field(default=False, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if self.sees_images and not isinstance(self.model, Seeded):
            raise Malformed("sees_images", "only built-in models see images")
        if self.sees_images and isinstance(self.model, Seeded) and not self.model.architecture.words.three_axes:
            raise Malformed("sees_images", f"{self.model.architecture.family} numbers its tokens on one axis")
        if any(a >= b for a, b in zip(self.vocabulary, self.vocabulary[1:], strict=False)):
            raise Malformed("vocabulary", "target ids must ascend")
        self.check_rank(len(self.vocabulary) or self.model.vocab_size)
        self.check_stop()

    @property
    def description(self) -> str:
        """See `Draft`."""
        kind = self.model.quantised
        weights = f", weights in {kind}" if kind else ""
        return f"{super().description}{weights}{', sees images' if self.sees_images else ''}"

    def with_renamed_tokens(self, rename: Callable[[Tokens], Tokens], relabel: int) -> "LanguageModel":
        """See `Draft`."""
        assert isinstance(self.model, Seeded), "the weights of a checkpoint have no other names"
        # Relabelling permutes embedding and head, so the draft proposes the same tokens under their new ids.
        model = replace(self.model, relabel=relabel)
        # The field must ascend, whatever order the new ids have.
        return replace(self, model=model, vocabulary=tuple(sorted(rename(self.vocabulary))))

    def naming(self, ids: Tokens) -> "LanguageModel":
        """See `Draft`."""
        return replace(self, vocabulary=ids)

    @property
    def as_seeing(self) -> "LanguageModel | None":
        """See `Draft`."""
        model = self.model
        has_axes = isinstance(model, Seeded) and model.architecture.words.three_axes
        return replace(self, sees_images=True) if has_axes else None

    def in_weights(self, kind: str) -> "LanguageModel":
        """The draft with a model of weights of `kind`, one of QUANTISED, or as they are if it is empty."""
        return replace(self, model=replace(self.model, quantised=kind))

    def simpler(self) -> Iterator["LanguageModel"]:
        """The draft with a smaller dynamic tree, with all ids, without images, and without quantised weights."""
        yield from super().simpler()
        yield from self.with_defaults("vocabulary", "sees_images")
        if self.model.quantised:
            yield self.in_weights("")
