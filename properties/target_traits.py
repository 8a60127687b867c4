"""Traits of a model: the blocks of its architecture under which faults show, by name.

Coverage counts them, and a swarm draws models by them: both need a class of models, not one family.
"""

from collections.abc import Callable, Mapping

from specverify.reference.architecture import Architecture, Model, Seeded


def has_recurrent_state(model: Model | None) -> bool:
    """Whether a built-in model, of a target or of a draft, has a recurrent state; False for None and a checkpoint."""
    return isinstance(model, Seeded) and bool(model.architecture.recurrent)


def _has_full_attention(architecture: Architecture) -> bool:
    attended = set(range(architecture.layers)) - set(architecture.unattended)
    reaches = enumerate(architecture.reaches)
    return any(not window and not chunk for layer, (window, chunk) in reaches if layer in attended)


TRAITS: Mapping[str, Callable[[Architecture], bool]] = {
    "full attention": _has_full_attention,
    "window": lambda architecture: any(architecture.windows),
    "chunk": lambda architecture: any(architecture.chunks),
    "no rotary": lambda architecture: bool(architecture.unrotated),
    "soft cap": lambda architecture: architecture.score_cap > 0,
    "sinks": lambda architecture: architecture.words.sinks,
    "indexed columns": lambda architecture: architecture.words.indexed,
    "latent attention": lambda architecture: architecture.words.projections is not None,
    "experts": lambda architecture: architecture.mixes_rows,
    "recurrent state": lambda architecture: bool(architecture.recurrent),
    "norms of queries and keys": lambda architecture: architecture.qk_norm,
    "three axes": lambda architecture: architecture.words.three_axes,
    "tied": lambda architecture: architecture.tied,
}
"""Each trait, and whether an architecture has it."""
