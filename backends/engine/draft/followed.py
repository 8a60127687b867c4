"""The draft of a request on a rank without it: it keeps the length of the draft's cache alone."""

import torch

from specverify.backends.engine.draft.base import OwnRows, Proposal
from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.sampling.step import StepSampling
from specverify.reference.draft.hidden import HiddenStates


class FollowedDraft(OwnRows):
    """A draft that other ranks run; `ranks.draft_ranks` brings their tree, and the columns that a step leaves.

    Attributes:
        cache: The cache of an `AbsentModel`, of the length of the draft's; None for a draft without a cache.
        calls: 0.
        reads: The hidden states that the draft reads on its ranks.
    """

    calls = 0

    def __init__(self, reads: HiddenStates | None, cache: KvCache | None, zero: torch.Tensor) -> None:
        self.reads = reads
        self.cache = cache
        self.own_rows = []
        self._zero = zero

    def propose(
        self, tokens: list[int], chance: StepSampling | None = None, hidden: torch.Tensor | None = None
    ) -> Proposal:
        """Raise RuntimeError: the draft is asked on its own ranks alone."""
        raise RuntimeError("a rank without the draft was asked for a tree")

    def settle(self, rows: list[int]) -> None:
        """Do nothing: `take_columns` says what is left."""

    def resume(self, cache: KvCache | None) -> None:
        """See `Draft`."""
        self.cache = cache
        self.own_rows = []

    def abandon(self) -> None:
        """Do nothing: no row is open here."""

    def follow(self, predecessor: OwnRows) -> None:
        """See `OwnRows`."""
        self.own_rows = [row for row in predecessor.own_rows if self.cache is not None and row < self.cache.length]

    def take_columns(self, length: int, first_own: int) -> None:
        """Bring the cache to `length` columns; `first_own` is the first row of the head's own, or -1."""
        if self.cache is None:
            return
        if length < self.cache.length:
            self.cache.crop(length)
        while self.cache.length < length:
            missing = length - self.cache.length
            rows = min(missing, self.cache.most_rows or missing)
            self.cache.open(rows)
            for layer in range(self.cache.layers):
                self.cache.write(layer, *(self._zero.expand(1, rows, 1) for _ in range(2)))
            self.cache.commit(list(range(rows)))
        self.own_rows = [] if first_own < 0 else [first_own]
