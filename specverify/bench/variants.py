"""The forms in which a bench times one draft: kinds of weights, and tokens that it can name."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from specverify.bench.turn import STORED, Way
from specverify.bench.vocabularies import with_vocabulary
from specverify.checkpoints.given_draft import given_draft
from specverify.checkpoints.opening import directory_of
from specverify.checkpoints.prompts import read_prompts, tokenizer_of
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Checkpoint
from specverify.reference.draft import Draft
from specverify.setup.errors import UnusableInput
from specverify.training.vocabulary import count_tokens


@dataclass(frozen=True)
class Variant:
    """One form of a draft; as it is where neither is given.

    Attributes:
        weights: Kind of quantised weights; empty for the stored ones.
        vocabulary: Number of tokens that it can name; None for all of its own.
    """

    weights: str = ""
    vocabulary: int | None = None

    def named(self, way: Way) -> Way:
        """`way` of the draft in this form, with a name of its own."""
        name = " ".join([way.name, self.weights, f"v{self.vocabulary}" if self.vocabulary else ""])
        return replace(way, name=" ".join(name.split()), weights=self.weights, vocabulary=self.vocabulary)


@dataclass(frozen=True)
class Forms:
    """The forms of each draft of a bench.

    Attributes:
        weights: Kinds of weights, STORED or one of QUANTISED; empty for the stored ones.
        vocabularies: Numbers of tokens, beside all of them.
        counts: How often texts use each token, by which the tokens are chosen.
    """

    weights: tuple[str, ...]
    vocabularies: tuple[int, ...]
    counts: Counter[int]

    def drafts(self, name: str, checkpoint: Checkpoint, within: Abilities) -> Iterator[tuple[Variant, Draft | None]]:
        """The forms of the draft that `--draft` names, with the draft in each; one for a draft without weights.

        Raises:
            UnusableInput: As `given_draft` and `with_vocabulary`, or the draft has no weights to vary.
        """
        for kind in self.weights or (STORED,):
            weights = "" if kind == STORED else kind
            draft = given_draft(name, checkpoint, within, weights)
            if draft is None and (self.weights or self.vocabularies):
                option = "--draft-weights" if self.weights else "--draft-vocabulary"
                raise UnusableInput(f"bench decode {option}: {name} has no weights; name a head, or model:DIR")
            yield Variant(weights), draft
            for size in self.vocabularies:
                fewer = with_vocabulary(
                    name, draft, size, counts=self.counts, checkpoint=checkpoint, within=within, weights=weights
                )
                yield Variant(weights, size), fewer


def token_counts(sources: Sequence[str], prompts: Sequence[tuple[int, ...]], model: str) -> Counter[int]:
    """How often each token occurs in the prompt files `sources`; in the prompts where there are none."""
    if not sources:
        return count_tokens(prompts)
    tokenizer = tokenizer_of(directory_of(model))
    texts = [text for source in sources for text in read_prompts(source)]
    return count_tokens(tokenizer(text).input_ids for text in texts)
