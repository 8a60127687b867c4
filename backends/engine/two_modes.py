"""The modes of a fused backend: `performance`, `reference` and `eager-aligned`.

`performance` runs the fused attention of the backend. `reference` runs its eager attention in place of the fused one.
`eager-aligned` is `reference` in the engine, and says of a bench that its other ways run eager attention too.
"""

from dataclasses import dataclass, is_dataclass, replace

from torch import Tensor

from specverify.backends.engine.attention.eager import eager
from specverify.backends.engine.columns import Attend, AttentionInputs
from specverify.backends.engine.seams import Seams
from specverify.backends.flags import Mode

EAGER_TREE = "eager attention for several rows over a prefix, as the mode says"
"""The reason that TreesEager announces, so that the calls that ran fused can be counted."""


def in_mode(seams: Seams, mode: Mode) -> Seams:
    """The seams with every fused attention, of target and draft, replaced as `mode` demands; eager ones stay."""
    if mode == Mode():  # the default is full performance: nothing to replace
        return seams
    return replace(
        seams,
        attend=_in_mode(seams.attend, mode),
        draft_attend=_in_mode(seams.draft_attend, mode),
        prefill_attend=seams.prefill_attend and _in_mode(seams.prefill_attend, mode),
        # Eager attention reads a dense mask.
        kv=replace(seams.kv, lanes=getattr(seams.kv.lanes, "dense", seams.kv.lanes)),
    )


def _in_mode(attend: Attend, mode: Mode) -> Attend:
    if not is_dataclass(attend):  # a fused attention is an object, an eager one a function
        return attend
    # A path that reads pages has an eager attention that gathers them first.
    plain: Attend = getattr(attend, "eager", eager)
    return TreesEager(attend, plain) if mode.fused else plain


@dataclass(frozen=True)
class TreesEager:
    """Fused attention, except for forwards of several rows over a committed prefix, which run eager attention."""

    fused: Attend
    eager: Attend

    def __call__(self, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        """See `columns.Attend`."""
        tree = query.shape[2] > 1 and bool(columns.prefix.any())
        if tree:
            columns.announce(EAGER_TREE)
        return (self.eager if tree else self.fused)(query, columns, scaling)
