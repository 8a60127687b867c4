"""Sizes: the lengths that the axes of an answer to one request have, as far as its case alone tells them."""

from dataclasses import dataclass
from functools import cached_property

from backends.admission.arrays import Axis
from reference.architecture import Architecture, Model, Seeded
from reference.case import Case
from reference.draft import Draft
from reference.tape import stride


@dataclass(frozen=True)
class Cache:
    """The axes of a cache of keys and values but its length; None where the case does not tell, as of a checkpoint."""

    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of its keys, and of its values."""
        sizes = (("layers", self.layers), ("kv_heads", self.kv_heads), ("length", None), ("head_dim", self.head_dim))
        return sizes


@dataclass(frozen=True)
class Sizes:
    """The sizes that the arrays of one request's trace must have.

    Attributes:
        vocabulary: Token ids are below it.
        heads: Query heads of the target; None for a checkpoint.
        target: The target's cache.
        draft: The draft model's cache; all None where the request may draft with several models, or with none.
        draft_vocabulary: Ids that the draft scores; None where it is not a single model.
        coins: Coins of one step on the tape; None for a backend that takes no tape.
        hidden: Width of the hidden states that the draft reads.
    """

    vocabulary: int
    heads: int | None
    target: Cache
    draft: Cache
    draft_vocabulary: int | None
    coins: int | None
    hidden: int | None = None

    @property
    def last_token(self) -> int:
        """The largest token id."""
        return self.vocabulary - 1


def sizes_of(case: Case, takes_tape: bool, switched: tuple[Draft, ...] = ()) -> Sizes:
    """The sizes of `case`, which has no session, or of the request that it is alone.

    Args:
        case: The request.
        takes_tape: Whether the backend's coins are those of the case's tape.
        switched: Drafts that the request switches to in its session.
    """
    arch = _architecture(case.model)
    drafting = [(one.model, len(one.vocabulary)) for one in (case.draft, *switched) if one.model is not None]
    caches = {_cache(model) for model, _ in drafting}
    widths = {named or model.vocab_size for model, named in drafting}
    return Sizes(
        vocabulary=case.model.vocab_size,
        heads=arch.heads if arch is not None else None,
        target=_cache(case.model),
        draft=caches.pop() if len(caches) == 1 else Cache(),
        draft_vocabulary=widths.pop() if len(widths) == 1 else None,
        coins=stride(case.most_nodes) if takes_tape else None,
        hidden=None if arch is None or case.draft.reads is None else case.draft.reads.parts * arch.hidden_size,
    )


def _architecture(model: Model) -> Architecture | None:
    """The architecture of a built-in model; None for a checkpoint, whose case holds a digest alone."""
    return model.architecture if isinstance(model, Seeded) else None


def _cache(model: Model) -> Cache:
    """The axes of a model's cache."""
    arch = _architecture(model)
    return Cache() if arch is None else Cache(arch.layers, arch.kv_heads, arch.head_dim)
