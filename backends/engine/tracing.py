"""Copies engine state out of torch into the words of a Trace."""

import numpy as np
import torch
from torch import Tensor

from backends.engine.draft.base import Proposal
from backends.engine.kv.base import KvCache
from backends.engine.lower_tree import TreeTensors
from reference.trace import Array, Attended, Drafted, Kv, Lowered, Scored, frozen

BUDGET_BYTES = 256 * 2**20
"""Copies of KV and attention outputs kept per trace; later steps of a longer run do not reveal them."""


def array(tensor: Tensor) -> Array:
    """A read-only NumPy copy; bfloat16, which NumPy lacks, is widened to float32 without loss."""
    host = tensor.detach().cpu()
    return frozen(host.float().numpy() if host.dtype == torch.bfloat16 else host.numpy())


class Revealer:
    """Copies state while its budget lasts; what it no longer copies is None, hence unobserved."""

    def __init__(self, budget: int = BUDGET_BYTES) -> None:
        self._left = budget

    def attended(self, heads: list[Tensor], tensors: TreeTensors) -> Attended | None:
        """Attention outputs of a forward, by layer [heads, R, head_dim], as one row per node."""
        rows = tensors.retrieve_index.to(heads[0].device)
        if not self._spend(sum(output.nbytes for output in heads)):
            return None
        return Attended(frozen(np.stack([array(output[:, rows]) for output in heads])))

    def drafted(self, proposal: Proposal, told: Tensor | None) -> Drafted:
        """The proposed tree with the scores that ranked it, and what the verifier was told."""
        logits = None if proposal.logits is None else array(proposal.logits)
        return Drafted(proposal.tree, logits, proposal.draft_ids, None if told is None else array(told))

    def lowered(self, tensors: TreeTensors) -> Lowered:
        """The index tensors as arrays; layers of equal window keep sharing one mask."""
        masks = {id(mask): array(mask) for mask in tensors.visible}
        fields = {name: array(getattr(tensors, name)) for name in Lowered.__dataclass_fields__ if name != "visible"}
        return Lowered(**fields, visible=tuple(masks[id(mask)] for mask in tensors.visible))

    def scored(self, logits: Tensor, law: Tensor | None, hidden: Tensor | None = None) -> Scored:
        """The logits, the law made of them, and the hidden states that a draft reads, one row per node."""
        return Scored(array(logits), None if law is None else array(law), None if hidden is None else array(hidden))

    def kv(self, cache: KvCache | None) -> Kv | None:
        """A copy of a cache, [layers, kv_heads, length, head_dim]; None for no cache, an empty one, or no budget.

        Columns that a layer no longer holds are NaN, and `Kv.first` says where each layer begins.
        """
        if cache is None or not cache.length:
            return None
        held = [cache.held(layer) for layer in range(cache.layers)]
        if not self._spend(sum(2 * keys.nbytes for _, keys, _ in held)):
            return None
        first = tuple(begin for begin, _, _ in held)
        keys = np.stack([_padded(columns, begin) for begin, columns, _ in held])
        values = np.stack([_padded(columns, begin) for begin, _, columns in held])
        return Kv(frozen(keys), frozen(values), first if any(first) else ())

    def _spend(self, nbytes: int) -> bool:
        self._left = self._left - nbytes if nbytes <= self._left else 0
        return self._left > 0


def _padded(columns: Tensor, first: int) -> Array:
    """[heads, columns, head_dim] with `first` columns of NaN in front."""
    return np.pad(array(columns), ((0, 0), (first, 0), (0, 0)), constant_values=np.nan)
