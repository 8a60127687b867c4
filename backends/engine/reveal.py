"""What a run reveals: engine state copied out of torch into the words of a Trace."""

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from backends.engine.attention import Attend
from backends.engine.draft.base import Proposal
from backends.engine.tensorise import TreeTensors
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
        self._heads: list[Tensor] = []

    def watching(self, attend: Attend) -> Attend:
        """`attend`, with each layer's output noted for `attended`."""

        def watched(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float) -> Tensor:
            output = attend(query, key, value, visible, scaling)
            self._heads.append(output)
            return output

        return watched

    def attended(self, tensors: TreeTensors) -> Attended | None:
        """Attention outputs of the last forward, one row per node, and forget them."""
        heads, self._heads = self._heads, []
        rows = tensors.retrieve_index.to(heads[0].device)
        if not self._spend(sum(output.nbytes for output in heads)):
            return None
        return Attended(frozen(np.stack([array(output[0][:, rows]) for output in heads])))

    def drafted(self, proposal: Proposal, told: Tensor | None) -> Drafted:
        """The proposed tree with the scores that ranked it, and what the verifier was told."""
        logits = None if proposal.logits is None else array(proposal.logits)
        return Drafted(proposal.tree, logits, proposal.draft_ids, None if told is None else array(told))

    def lowered(self, tensors: TreeTensors) -> Lowered:
        """The index tensors as arrays; layers of equal window keep sharing one mask."""
        masks = {id(mask): array(mask) for mask in tensors.visible}
        fields = {name: array(getattr(tensors, name)) for name in Lowered.__dataclass_fields__ if name != "visible"}
        return Lowered(**fields, visible=tuple(masks[id(mask)] for mask in tensors.visible))

    def scored(self, logits: Tensor, law: Tensor | None) -> Scored:
        """The logits and the law made of them, one row per node."""
        return Scored(array(logits), None if law is None else array(law))

    def kv(self, cache: DynamicCache | None) -> Kv | None:
        """A copy of a cache, [layers, kv_heads, length, head_dim]; None for no cache or no budget."""
        if cache is None or not cache.layers:
            return None
        if not self._spend(sum(2 * layer.keys.nbytes for layer in cache.layers)):
            return None
        return Kv(
            frozen(np.stack([array(layer.keys[0]) for layer in cache.layers])),
            frozen(np.stack([array(layer.values[0]) for layer in cache.layers])),
        )

    def _spend(self, nbytes: int) -> bool:
        self._left = self._left - nbytes if nbytes <= self._left else 0
        return self._left > 0
