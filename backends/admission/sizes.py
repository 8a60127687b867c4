"""Sizes: the axis lengths that the arrays of one request's trace must have.

The case tells them: tree, model and draft. A length that the case does not tell, such as a checkpoint's number of
layers, is None, and any length is admitted there.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from specverify.backends.admission.arrays import Axis
from specverify.reference.architecture import Architecture, Model, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Draft
from specverify.reference.tape import stride


@dataclass(frozen=True)
class Cache:
    """The axis lengths of a KV cache other than its length; None where the case does not tell them (a checkpoint)."""

    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the cache's keys."""
        sizes = (("layers", self.layers), ("kv_heads", self.kv_heads), ("length", None), ("head_dim", self.head_dim))
        return sizes

    @property
    def value_axes(self) -> tuple[Axis, ...]:
        """The axes of the cache's values, whose heads may have a width of their own (latent attention)."""
        width = self.head_dim if self.value_dim is None else self.value_dim
        return (*self.axes[:-1], ("head_dim", width))


@dataclass(frozen=True)
class Sizes:
    """The sizes that the arrays of one request's trace must have.

    Attributes:
        vocabulary: The size of the vocabulary; token ids are smaller.
        heads: Query heads of the target; None for a checkpoint.
        target: The target's cache.
        draft: The draft model's cache; all None unless all draft models of the request have one cache shape.
        draft_vocabulary: The number of ids that the draft scores; None unless it is one for all draft models.
        coins: The number of coins of one step on the tape; None for a backend that takes no tape.
        hidden: Width of the hidden states that the draft reads.
        attended_width: Width of a head of attention's output; None for a checkpoint.
    """

    vocabulary: int
    heads: int | None
    target: Cache
    draft: Cache
    draft_vocabulary: int | None
    coins: int | None
    hidden: int | None = None
    attended_width: int | None = None

    @property
    def last_token(self) -> int:
        """The largest token id."""
        return self.vocabulary - 1


def sizes_of(case: Case, takes_tape: bool, switched_drafts: tuple[Draft, ...] = ()) -> Sizes:
    """The sizes of the one request of `case`, which must have no session.

    Args:
        case: The request; a request of a session as the case that it would be alone.
        takes_tape: Whether the backend takes its coins from the case's tape.
        switched_drafts: The drafts to which the request switches in its session.
    """
    arch = _architecture(case.model)
    drafts = (case.draft, *switched_drafts)
    cached_drafts = [draft for draft in drafts if draft.model is not None or draft.kv_sizes is not None]
    # A request that switches between models shows caches of different shapes in its steps; then none is checked.
    caches = {_draft_cache(draft, case) for draft in cached_drafts}
    # A draft may score tokens and keep no cache.
    widths = {len(draft.vocabulary) or case.model.vocab_size for draft in drafts if draft.has_law}
    return Sizes(
        vocabulary=case.model.vocab_size,
        heads=arch.heads if arch is not None else None,
        target=_cache(case.model, case.layout.latent),
        draft=caches.pop() if len(caches) == 1 else Cache(),
        draft_vocabulary=widths.pop() if len(widths) == 1 else None,
        coins=stride(case.most_nodes) if takes_tape else None,
        hidden=None if arch is None or case.draft.reads is None else case.draft.reads.parts * arch.hidden_size,
        attended_width=None if arch is None else arch.widest.value_dim,
    )


def _draft_cache(draft: Draft, case: Case) -> Cache:
    """The axes of the cache of a draft of `case` that has one."""
    if draft.model is not None or draft.kv_sizes is None:
        return _cache(draft.model, case.layout.latent)
    layers, kv_heads, head_dim = draft.kv_sizes
    if kv_heads is None:  # layers of the target's family
        return replace(_cache(case.model, case.layout.latent), layers=layers)
    return Cache(layers, kv_heads, head_dim)


def _architecture(model: Model) -> Architecture | None:
    """The architecture of a built-in model; None for a checkpoint, of which the case holds only a digest."""
    return model.architecture if isinstance(model, Seeded) else None


def _cache(model: Model | None, latent: bool) -> Cache:
    """The axes of a model's cache; `latent` asks for latent rows of a model that has them."""
    arch = None if model is None else _architecture(model)
    if arch is not None and latent and arch.settings.latent_rank:
        return Cache(arch.layers, 1, arch.settings.latent_rank + arch.widest.index_dim, arch.rotary_dim)
    if arch is None:
        return Cache()
    return Cache(arch.layers, arch.widest.kv_heads, arch.widest.key_width, arch.widest.value_dim)
