"""Copies of engine state, from torch tensors to the arrays of a Trace."""

from dataclasses import replace

import torch
from torch import Tensor

from backends.engine.draft.base import Proposal
from backends.engine.guided.guide import Masks
from backends.engine.kv.base import KvCache
from backends.engine.kv.recurrent import states_of
from backends.engine.lower_tree import TreeTensors
from reference.draft.hidden import HeadInput, HiddenStates
from reference.family.recurrent import RecurrentState
from reference.trace import Array, Attended, Drafted, Kv, Lowered, Scored, frozen

BUDGET_BYTES = 256 * 2**20
"""Bytes of KV and attention outputs that one trace may hold; once they are spent, later steps reveal neither."""


def array(tensor: Tensor) -> Array:
    """A read-only NumPy copy of `tensor`; bfloat16, which NumPy lacks, is widened to float32 without loss."""
    host = tensor.detach().cpu()
    return frozen(host.float().numpy() if host.dtype == torch.bfloat16 else host.numpy())


class Revealer:
    """Copies engine state of one request until `budget` bytes are spent; later KV and attention outputs are None.

    None means unobserved: invariants that need the state then have no result.
    """

    def __init__(self, budget: int = BUDGET_BYTES) -> None:
        self._left = budget
        self._latest: tuple[Kv, ...] = ()

    def attended(self, heads: list[Tensor], tensors: TreeTensors) -> Attended | None:
        """Attention outputs of a forward, given by layer as [heads, R, head_dim], with one row per node."""
        rows = tensors.retrieve_index.to(heads[0].device)
        if not self._spend(sum(output.nbytes for output in heads)):
            return None
        return Attended(array(torch.stack(heads)[:, :, rows]))

    def drafted(self, proposal: Proposal, told: Tensor | None, reads: HiddenStates | None = None) -> Drafted:
        """The proposed tree with the scores that ranked it, and the proposal `told` to the verifier [nodes, V].

        The rows of a head are shown with the descriptor `reads` of their hidden states.
        """
        logits = None if proposal.logits is None else array(proposal.logits)
        rows, given = proposal.given, None
        if rows is not None and reads is not None:
            given = HeadInput(reads, rows.first, tuple(rows.tokens), array(rows.hidden))
        return Drafted(proposal.tree, logits, proposal.draft_ids, None if told is None else array(told), given)

    def lowered(self, tensors: TreeTensors) -> Lowered:
        """The index tensors as arrays; layers that share one mask tensor share one array."""
        visible = tensors.masks
        masks = {id(mask): array(mask) for mask in visible}
        fields = {name: array(getattr(tensors, name)) for name in Lowered.__dataclass_fields__ if name != "visible"}
        return Lowered(**fields, visible=tuple(masks[id(mask)] for mask in visible))

    def scored(
        self,
        logits: Tensor,
        law: Tensor | None,
        hidden: Tensor | None = None,
        masks: Masks | None = None,
        routed: Tensor | None = None,
    ) -> Scored:
        """The logits, their law, the hidden states that the draft reads, and the grammar's masks: one row per node.

        `routed` holds the experts of the rows of the context, and then of the nodes.
        """
        shown = (None, None) if masks is None else (array(masks.legal), array(masks.refused))
        told = (None if one is None else array(one) for one in (law, hidden))
        experts = None if routed is None else array(routed)
        return replace(Scored(array(logits), *told, *shown), routed=experts)

    def kv(self, cache: KvCache | None) -> Kv | None:
        """A copy of a cache, [layers, kv_heads, length, head_dim].

        None if there is no cache, if it is empty, or if the budget is spent. Columns that a layer no longer holds are
        NaN, and `Kv.first` is the first held column of each layer. A copy with the bits of one of the last two is that
        one: a step begins with the columns that the last one committed, and three copies of them would be sent.
        """
        # A spent budget is asked first: a run that reveals nothing must not copy its caches to find their size.
        if cache is None or not cache.length or self._left <= 0:
            return None
        held = [cache.held(layer) for layer in range(cache.layers)]
        if not self._spend(sum(keys.nbytes + values.nbytes for _, keys, values in held)):
            return None
        first = tuple(begin for begin, _, _ in held)
        keys = _stacked([columns for _, columns, _ in held], first)
        values = _stacked([columns for _, _, columns in held], first)
        copy = Kv(keys, values, first if any(first) else ())
        copy = next((one for one in self._latest if _same_bits(one, copy)), copy)
        self._latest = copy, *(one for one in self._latest if one is not copy)
        self._latest = self._latest[:2]
        return copy

    def recurrent(self, cache: KvCache) -> RecurrentState | None:
        """A copy of the recurrent states beside `cache`; None for a model without such layers, or before they ran."""
        states = states_of(cache)
        if states is None or not states.committed:
            return None
        held = [states.committed[layer] for layer in sorted(states.committed)]
        if not self._spend(sum(one.nbytes for pair in held for one in pair)):
            return None
        windows, memories = zip(*held, strict=True)
        return RecurrentState(tuple(array(one) for one in windows), tuple(array(one) for one in memories))

    def _spend(self, nbytes: int) -> bool:
        # One copy that does not fit ends the budget for good: no later, smaller copy is revealed after a gap.
        self._left = self._left - nbytes if nbytes <= self._left else 0
        return self._left > 0


def _same_bits(one: Kv, two: Kv) -> bool:
    """Whether keys and values have the same shapes and bits; NaN equals NaN here."""
    pairs = ((one.keys, two.keys), (one.values, two.values))
    return all(a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


def _stacked(layers: list[Tensor], first: tuple[int, ...]) -> Array:
    """Columns by layer as one read-only copy [layers, heads, length, head_dim]; NaN stands before each layer's first.

    Args:
        layers: Held columns of each layer, [heads, length - first, head_dim].
        first: The first held column of each layer.
    """
    if not any(first):
        return array(torch.stack(layers))
    heads, held, width = layers[0].shape
    whole = torch.full((len(layers), heads, first[0] + held, width), torch.nan, dtype=layers[0].dtype)
    for layer, (begin, columns) in enumerate(zip(first, layers, strict=True)):
        whole[layer, :, begin:] = columns
    return array(whole)
