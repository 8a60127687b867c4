"""The seams of the KV cache, which are the classes of layouts, pages and batches.

A composition or a planted fault replaces one of them by its name.
"""

from dataclasses import dataclass, replace

from specverify.backends.engine.kv.branch import Branch, Branches
from specverify.backends.engine.kv.codec import KvCodec
from specverify.backends.engine.kv.contiguous import Overwrite, Scratch, Static
from specverify.backends.engine.kv.lanes import BatchCache, LeftPadded, with_front
from specverify.backends.engine.kv.paged import Paged
from specverify.backends.engine.kv.pages import Blocks, Pages
from specverify.backends.engine.kv.prefix import PrefixCache, SecondTier
from specverify.backends.engine.kv.recurrent import RecurrentStates
from specverify.backends.engine.kv.sliding import Sliding
from specverify.backends.engine.kv.state_pages import StatePages
from specverify.backends.engine.kv.state_slots import Checkpoints, RecurrentPool, StateSlots


@dataclass(frozen=True)
class KvSeams:
    """One class per part of the KV cache; a fault replaces a class by a subclass with one wrong method.

    Attributes:
        branch, overwrite, scratch, static, sliding, paged: A request's cache in each layout.
        branches: The cache of layout `branch` with several branches.
        pages: The page allocator.
        blocks: A request's block table.
        prefix: The prefix cache.
        tier: The second tier of the prefix cache.
        lanes: The caches of a batch as one cache, for verify forwards.
        single: The same for forwards of one request: prefills and draft forwards.
        left_padded: The caches of a batch padded on the left, in place of `lanes` and `single` if the layout says so.
        states: The recurrent states that stand beside a cache.
        slots: The slots of recurrent states.
        recurrent_pool: The cells of these slots for one model.
        checkpoints: The slot of one request.
        state_pages: The hidden states of a request in pages that carry them.
        codec: The codes and scales that a cache stores in place of keys and values.
    """

    branch: type[Branch] = Branch
    branches: type[Branches] = Branches
    overwrite: type[Overwrite] = Overwrite
    scratch: type[Scratch] = Scratch
    static: type[Static] = Static
    sliding: type[Sliding] = Sliding
    paged: type[Paged] = Paged
    pages: type[Pages] = Pages
    blocks: type[Blocks] = Blocks
    prefix: type[PrefixCache] = PrefixCache
    tier: type[SecondTier] = SecondTier
    lanes: type[BatchCache] = BatchCache
    single: type[BatchCache] = BatchCache
    left_padded: type[LeftPadded] = LeftPadded
    states: type[RecurrentStates] = RecurrentStates
    slots: type[StateSlots] = StateSlots
    recurrent_pool: type[RecurrentPool] = RecurrentPool
    checkpoints: type[Checkpoints] = Checkpoints
    state_pages: type[StatePages] = StatePages
    codec: type[KvCodec] = KvCodec

    def with_left_pad(self, left_pad: int) -> "KvSeams":
        """These seams for a layout with `left_pad`."""
        if not left_pad:
            return self
        lanes = with_front(self.left_padded, left_pad)
        return replace(self, lanes=lanes, single=lanes)
