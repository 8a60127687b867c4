"""Copies of engine state, from torch tensors to the arrays of a Trace."""

import torch
from torch import Tensor

from specverify.backends.engine.draft.base import Proposal
from specverify.backends.engine.guided.guide import Masks
from specverify.backends.engine.kv.base import KvCache, held_columns
from specverify.backends.engine.kv.recurrent import states_of
from specverify.backends.engine.kv.state_slots import LayerStates
from specverify.backends.engine.lower_tree import TreeTensors
from specverify.backends.engine.uploads import upload
from specverify.reference.draft.hidden import HeadInput, HiddenStates
from specverify.reference.family.recurrent import RecurrentState
from specverify.reference.trace import Array, Attended, Drafted, Kv, Lowered, Scored, frozen

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
        self._bytes_left = budget
        self._latest: tuple[Kv, ...] = ()
        self._latest_states: tuple[RecurrentState, ...] = ()

    def attended(self, heads: list[Tensor], tensors: TreeTensors) -> Attended | None:
        """Attention outputs of a forward, given by layer as [heads, R, head_dim], with one row per node."""
        rows = upload(tensors.retrieve_index, heads[0].device)
        if not self._spend(sum(output.nbytes for output in heads)):
            return None
        return Attended(_stack([output[:, rows] for output in heads], (0,) * len(heads)))

    def drafted(self, proposal: Proposal, verifier_law: Tensor | None, reads: HiddenStates | None = None) -> Drafted:
        """The proposed tree with the scores that ranked it, and the proposal `verifier_law` to the verifier [nodes, V].

        The rows of a head are shown with the descriptor `reads` of their hidden states.
        """
        logits = None if proposal.logits is None else array(proposal.logits)
        rows = proposal.head_rows
        head_input = None
        if rows is not None and reads is not None:
            states = array(rows.hidden)
            head_input = HeadInput(reads, rows.first, tuple(rows.tokens), states, rows.adopted, rows.own_rows)
        confidence = None if proposal.confidence is None else array(proposal.confidence)
        law = None if verifier_law is None else array(verifier_law)
        return Drafted(proposal.tree, logits, proposal.draft_ids, law, head_input, confidence)

    def lowered(self, tensors: TreeTensors, axes: Tensor | None = None) -> Lowered:
        """The index tensors as arrays; layers that share one mask tensor share one array.

        `axes` [3, C] holds the positions of all columns on three axes, for a target that has these.
        """
        visible = tensors.masks
        masks = {id(mask): array(mask) for mask in visible}
        apart = ("visible", "axes")
        fields = {name: array(getattr(tensors, name)) for name in Lowered.__dataclass_fields__ if name not in apart}
        by_column = None if axes is None else array(axes)
        return Lowered(**fields, visible=tuple(masks[id(mask)] for mask in visible), axes=by_column)

    def scored(
        self,
        logits: Tensor,
        law: Tensor | None,
        hidden: Tensor | None = None,
        masks: Masks | None = None,
        routed: Tensor | None = None,
        indexed: Tensor | None = None,
        stored: Tensor | None = None,
    ) -> Scored:
        """The logits, their law, the hidden states that the draft reads, and the grammar's masks: one row per node.

        `routed` holds the experts of the rows of the context, and then of the nodes, `indexed` their columns, `stored`
        their codes.
        """
        mask_arrays = (None, None) if masks is None else (array(masks.legal), array(masks.refused))
        arrays = (None if tensor is None else array(tensor) for tensor in (law, hidden))
        choices = (None if tensor is None else array(tensor) for tensor in (routed, indexed, stored))
        return Scored(array(logits), *arrays, *mask_arrays, *choices)

    def kv(self, cache: KvCache | None) -> Kv | None:
        """A copy of a cache, [layers, kv_heads, length, head_dim].

        None if there is no cache, if it is empty, or if the budget is spent. Columns that a layer no longer holds are
        NaN, and `Kv.first` is the first held column of each layer. A copy with the bits of one of the last two is that
        one: a step begins with the columns that the last one committed, and three copies of them would be sent.
        """
        # A spent budget is asked first: a run that reveals nothing must not copy its caches to find their size.
        if cache is None or not cache.length or self._bytes_left <= 0:
            return None
        columns_by_layer = [held_columns(cache, layer) for layer in range(cache.layers)]
        if not self._spend(sum(keys.nbytes + values.nbytes for _, keys, values in columns_by_layer)):
            return None
        first = tuple(begin for begin, _, _ in columns_by_layer)
        keys = _stack([columns for _, columns, _ in columns_by_layer], first)
        values = _stack([columns for _, _, columns in columns_by_layer], first)
        copy = Kv(keys, values, first if any(first) else ())
        copy = next((earlier for earlier in self._latest if _same_bits(earlier, copy)), copy)
        self._latest = copy, *(earlier for earlier in self._latest if earlier is not copy)
        self._latest = self._latest[:2]
        return copy

    def recurrent(self, cache: KvCache) -> RecurrentState | None:
        """A copy of the recurrent states beside `cache`; None for a model without such layers, or before they ran."""
        states = states_of(cache)
        return None if states is None or not states.length else self._copy_of(states.committed)

    def recurrent_root(self, cache: KvCache) -> RecurrentState | None:
        """A copy of the recurrent states after row 0 of the open rows; None for a model without such layers."""
        states = states_of(cache)
        if states is None:
            return None
        return self._copy_of({layer: by_row[0] for layer, by_row in states.rows.items() if 0 in by_row})

    def _copy_of(self, layer_states: LayerStates) -> RecurrentState | None:
        """A copy of the states by layer, None without any or without budget; one of the last two with its bits is it.

        A step without accepted nodes ends with the state after its root, and the next step begins with that.
        """
        if not layer_states or self._bytes_left <= 0:
            return None
        windows, memories = zip(*(layer_states[layer] for layer in sorted(layer_states)), strict=True)
        copy = RecurrentState(tuple(array(tensor) for tensor in windows), tuple(array(tensor) for tensor in memories))
        earlier = next((earlier for earlier in self._latest_states if _same_states(earlier, copy)), None)
        if earlier is None and not self._spend(sum(part.nbytes for part in (*copy.windows, *copy.memories))):
            return None
        copy = earlier or copy
        self._latest_states = (copy, *(state for state in self._latest_states if state is not copy))[:2]
        return copy

    def _spend(self, nbytes: int) -> bool:
        # One copy that does not fit ends the budget for good: no later, smaller copy is revealed after a gap.
        self._bytes_left = self._bytes_left - nbytes if nbytes <= self._bytes_left else 0
        return self._bytes_left > 0


def _same_bits(first: Kv, second: Kv) -> bool:
    """Whether keys and values have the same shapes and bits; NaN equals NaN here."""
    return _equal_arrays((first.keys, first.values), (second.keys, second.values))


def _same_states(first: RecurrentState, second: RecurrentState) -> bool:
    """Whether windows and memories have the same shapes and bits."""
    return _equal_arrays((*first.windows, *first.memories), (*second.windows, *second.memories))


def _equal_arrays(first: tuple[Array, ...], second: tuple[Array, ...]) -> bool:
    return len(first) == len(second) and all(
        a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
        for a, b in zip(first, second, strict=True)
    )


def _stack(layers: list[Tensor], first: tuple[int, ...]) -> Array:
    """Columns by layer as one read-only copy [layers, heads, length, head_dim]; NaN stands before each layer's first.

    Each layer holds the columns from its `first` on, [heads, length - first, head_dim]. The copy has room for the most
    heads of a layer and the widest ones, and zeros behind the sizes of other layers.
    """
    if not any(first) and len({columns.shape for columns in layers}) == 1:
        return array(torch.stack(layers))
    heads, width = (max(columns.shape[axis] for columns in layers) for axis in (0, 2))
    length = first[0] + layers[0].shape[1]
    all_columns = torch.zeros((len(layers), heads, length, width), dtype=layers[0].dtype, device=layers[0].device)
    for layer, (begin, columns) in enumerate(zip(first, layers, strict=True)):
        all_columns[layer, :, :begin] = torch.nan
        all_columns[layer, : columns.shape[0], begin:, : columns.shape[2]] = columns
    return array(all_columns)
