"""LanguageModel: a small causal language model that drafts with its own KV cache."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from specverify.reference.architecture import Model, Seeded
from specverify.reference.draft.base import Tokens
from specverify.reference.draft.static import Static
from specverify.reference.draft_trees import DraftTree
from specverify.reference.malformed import Malformed


@dataclass(frozen=True)
class LanguageModel(Static):
    """A small causal model with a KV cache of its own: node i is the `rank[i]`-th best token after its parent.

    Attributes:
        model: The draft's own weights; its vocabulary size is the target's.
        shape: The tree that it fills, static or dynamic.
        vocabulary: Target ids that the draft's head can name, ascending (EAGLE-3's reduced vocabulary: draft id d
            means target id `vocabulary[d]`); empty means all of them.
    """

    TAG = "model"
    WORD = "model"
    has_law = True

    model: Model
    shape: DraftTree
    vocabulary: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(a >= b for a, b in zip(self.vocabulary, self.vocabulary[1:], strict=False)):
            raise Malformed("vocabulary", "target ids must ascend")
        self.check_rank(len(self.vocabulary) or self.model.vocab_size)
        self.check_stop()

    @property
    def description(self) -> str:
        """See `Draft`."""
        kind = self.model.quantised
        return f"{super().description}, weights in {kind}" if kind else super().description

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

    def in_weights(self, kind: str) -> "LanguageModel":
        """The draft with a model of weights of `kind`, one of QUANTISED, or as they are if it is empty."""
        return replace(self, model=replace(self.model, quantised=kind))

    def simpler(self) -> Iterator["LanguageModel"]:
        """The draft with a smaller dynamic tree, without a reduced vocabulary, and without quantised weights."""
        yield from super().simpler()
        yield from self.with_defaults("vocabulary")
        if self.model.quantised:
            yield self.in_weights("")
