"""Faults of the draft model's KV cache, which must keep step with the target's."""

from dataclasses import replace

from torch import Tensor

from specverify.backends.engine.draft.base import Proposal
from specverify.backends.engine.draft.language_model import ModelDraft
from specverify.backends.engine.kv.arena import Arena, CacheLease, CacheNeeds, Model
from specverify.backends.engine.kv.base import KvCache, Pair
from specverify.backends.engine.kv.paged import Paged, Pool
from specverify.backends.engine.kv.prefix import PrefixCache
from specverify.backends.engine.sampling.step import StepSampling
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import (
    committed_fault,
    drafted_fault,
    in_place_of,
    in_place_of_draft,
    lowered_fault,
)


@drafted_fault(
    "draft-fed-its-own-guess",
    "catalogue BZ-011: KV corruption in the draft cache with and without a bonus token",
    "a draft model whose accepted path ends in a leaf, and a bonus that it would not have guessed",
)
@in_place_of_draft
class GuessingDraft(ModelDraft):
    """After full acceptance the draft is fed its own best token where the bonus stands, and its KV stays."""

    def catch_up(self, tokens: list[int]) -> Tensor:
        if not 0 < self.cache.length == len(tokens) - 2:
            return super().catch_up(tokens)
        # The accepted leaf and the bonus are missing: it was not told of the bonus yet.
        ahead = super().catch_up(tokens[:-1])
        guess = int(self.named_ids[int(ahead[0].argmax())])
        return super().catch_up([*tokens[:-1], guess])


@drafted_fault(
    "unverified-rows-restored",
    "catalogue BZ-036: unverified drafts stay in the draft's KV across a transfer",
    "a draft model; a rejected inner node beside an accepted leaf; then evict, restore and step",
)
@in_place_of_draft
class SavingDraft(ModelDraft):
    """The draft's cache is restored with the rows of its last block as valid, verified or not.

    The cache is saved before the roll-back removes the rejected rows, and is restored from that copy.
    """

    _saved_pairs: tuple[Pair, ...] = ()

    def settle(self, kept_nodes: list[int]) -> None:
        self._saved_pairs = tuple(self.cache.read(layer) for layer in range(self.cache.layers))
        super().settle(kept_nodes)

    def resume(self, cache: KvCache | None) -> None:
        super().resume(cache)
        columns = min((keys.shape[-2] for keys, _ in self._saved_pairs), default=0)
        # A cache with a limit of open rows cannot take all saved columns at once.
        if columns and not self.cache.length and not self.cache.most_rows:
            self.cache.open(columns)
            for layer, (keys, values) in enumerate(self._saved_pairs):
                self.cache.write(layer, keys[:, :columns], values[:, :columns])
            self.cache.commit(list(range(columns)))

    def catch_up(self, tokens: list[int]) -> Tensor:
        if self.cache.length > len(tokens):
            # The restored rows may be more than the tokens that are committed now.
            self.cache.crop(len(tokens))
        return super().catch_up(tokens)


@drafted_fault(
    "root-scores-survive-restart",
    "catalogue BZ-170: speculated future tokens survive a restart",
    "a draft model; a step, then evict, restore and step",
)
@in_place_of_draft
class RememberingDraft(ModelDraft):
    """Scores of the root that the draft remembers survive a restart."""

    _stale: Tensor | None = None

    def resume(self, cache: KvCache | None) -> None:
        self._stale = self.root_scores
        super().resume(cache)

    def catch_up(self, tokens: list[int]) -> Tensor:
        right = super().catch_up(tokens)
        stale = self._stale
        self._stale = None
        return right if stale is None else stale


@drafted_fault(
    "accepted-leaf-fed-as-bonus",
    "family of catalogue BZ-167: a hole in the draft's KV after full acceptance",
    "a draft model whose accepted path ends in a leaf",
)
@in_place_of_draft
class Short(ModelDraft):
    """Of the tokens that the draft lacks only the last is handed over, in the place of all of them."""

    def catch_up(self, tokens: list[int]) -> Tensor:
        num_cached = self.cache.length
        if num_cached:
            tokens = [*tokens[:num_cached], *tokens[-1:] * (len(tokens) - num_cached)]
        return super().catch_up(tokens)


@committed_fault(
    "rejected-rows-rewritten",
    "catalogue BZ-032: padding tokens keep real slots",
    "a draft model; a rejected inner node before an accepted one",
)
@in_place_of("roll_back")
def rejected_rewritten(seams: Seams, cache: KvCache, rows_fed: list[int]) -> None:
    """Rejected rows stay in the draft's batch as padding with real slots, over what was moved there."""
    padding = [row for row in range(len(rows_fed)) if row not in rows_fed]
    rows = [row if row in padding else rows_fed[row] for row in range(len(rows_fed))]
    seams.roll_back(cache, rows)


@lowered_fault(
    "one-cache-for-target-and-draft",
    "catalogue BZ-112: the main model's past_key_values passed to the assistant",
    "a target that drafts for itself",
)
def one_cache(seams: Seams) -> Seams:
    """The draft is given the target's own cache object.

    Only a target that drafts for itself can share its cache object with the draft.
    """

    class OneCacheArena(Arena):
        def lease(self, needs: CacheNeeds) -> CacheLease:
            lease = super().lease(needs)
            return replace(lease, draft=lease.target) if needs.draft is needs.target else lease

    class LodgingDraft(ModelDraft):
        def propose(
            self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None
        ) -> Proposal:
            proposal = super().propose(tokens, chance, hidden)
            self.cache.commit(list(range(self.cache.rows)))  # the target knows of no rows that are not its own
            return proposal

        def settle(self, kept_nodes: list[int]) -> None:
            pass  # the target's commit was the cache's

    plant = in_place_of_draft(LodgingDraft, lambda lease: lease.draft is lease.target)
    return plant(replace(seams, arena=OneCacheArena))


@committed_fault(
    "draft-in-targets-pool",
    "catalogue BZ-085: draft attention metadata refers to the target's KV pool",
    "pages; a target that drafts for itself; rows that do not lie as the draft's do",
)
@in_place_of("arena")
class OnePool(Arena):
    """The draft's cache lies in the target's pool."""

    def pool(self, model: Model, role: str, needs: CacheNeeds) -> Pool:
        return super().pool(model, "target", needs)


@drafted_fault(
    "fork-marks-draft-complete",
    "family of catalogue BZ-170: draft cache length not synchronised when a prefix is reused",
    "pages; a fork of a request with a draft model that has not been fed everything",
)
@in_place_of("arena")
class Complete(Arena):
    """A fork marks as many columns of the draft's cache as filled as of the target's."""

    def fork(self, source: CacheLease, needs: CacheNeeds) -> CacheLease:
        lease = super().fork(source, needs)
        if isinstance(lease.draft, Paged):
            lease.draft.length = lease.target.length
        return lease


@drafted_fault(
    "prefix-kept-without-draft",
    "family of catalogue BZ-170: draft cache length not synchronised when a prefix is reused",
    "a prefix cache; a request with a draft model that lags behind at its end, and one that begins alike",
)
@in_place_of("arena")
class TargetOnly(Arena):
    """Pages are kept that the draft never wrote: the next request finds its cache uninitialised."""

    def give_back(self, lease: CacheLease, tokens: tuple[int, ...] = ()) -> None:
        if lease.draft is not None and tokens:
            lease.draft.length = lease.target.length
        super().give_back(lease, tokens)


@drafted_fault(
    "draft-pages-shared-one-token-short",
    "catalogue BZ-063: prefix hit shifts the draft's inputs",
    "a prefix cache; two requests with a draft model that part at the last token of a page",
)
@in_place_of("arena")
class Nearly(Arena):
    """A kept page's draft KV is shared with a request whose tokens differ in the last one that it depends on."""

    def paged(self, needs: CacheNeeds) -> CacheLease:
        lease = super().paged(needs)
        page = None if self.prefix is None else self._near(self.prefix, needs.draft, needs.tokens, lease.reused)
        if page is None or not isinstance(lease.draft, Paged):
            return lease
        copied_cells = [
            tuple(cells[page].transpose(0, 1).clone() for cells in pair) for pair in lease.draft.pool.layers
        ]
        lease.draft.open(self.layout.page_size)
        for layer, (keys, values) in enumerate(copied_cells):
            lease.draft.write(layer, keys, values)
        lease.draft.commit(list(range(self.layout.page_size)))
        return lease

    def _near(self, prefix: PrefixCache, draft: Model | None, tokens: tuple[int, ...], reused: int) -> int | None:
        end = reused + self.layout.page_size
        for (owner, known_tokens), page in prefix.entries.items() if end <= len(tokens) else ():
            if owner is draft and len(known_tokens) == end and known_tokens[:-1] == tokens[: end - 1]:
                return page
        return None
