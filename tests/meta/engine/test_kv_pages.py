"""The allocator, block tables, the prefix cache and the arena: no page is lost, and no sharer sees another's writes."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specverify.backends import faults
from specverify.backends.base import StageFailure
from specverify.backends.compositions import open_cpu
from specverify.backends.engine.kv.arena import LARGE, Arena, CacheLease, CacheNeeds
from specverify.backends.engine.kv.base import CacheSpec, KvCache, OutOfPages
from specverify.backends.engine.kv.pages import Blocks, Pages
from specverify.backends.engine.kv.prefix import PrefixCache, SecondTier
from specverify.backends.engine.reach import Reach
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Stops
from specverify.reference.trace import Stage
from specverify.reference.tree import Tree
from specverify.setup.subjects import subject_of
from tests.corruption import BY_NAME, ORACLE
from tests.models import LLAMA


class Anything:
    """A model of two layers that only has a room."""

    def room(self, capacity: int, rows: int) -> CacheSpec:
        return CacheSpec((Reach(), Reach(window=3)), 1, 2, capacity, rows, torch.device("cpu"), torch.float64)


class Pool(RuleBasedStateMachine):
    """Requests with target and draft caches over one pool that is too small, prefixes kept, everything poisoned."""

    @initialize(
        size=st.sampled_from((1, 2, 3, 5, 16)),
        pages=st.integers(2, 14).flatmap(lambda count: st.permutations(range(count))),
        overhang=st.sampled_from((0, 0, 1, 4)),
        tiers=st.sampled_from(((0, 0), (0, 2), (1, 1), (1, 30), (3, 30))),
        draft_size=st.sampled_from((0, 0, 1, 2, 3, 16)),
    )
    def begin(self, size: int, pages: list[int], overhang: int, tiers: tuple[int, int], draft_size: int) -> None:
        first, second = tiers
        layout = KvLayout(
            kind="prefix",
            page_size=size,
            pages=tuple(pages),
            overhang=overhang,
            poison="large",
            first_tier=first,
            second_tier=second,
            draft_page_size=draft_size,
        )
        self.arena = Arena(layout)
        self.target, self.drafts = Anything(), [None, Anything(), Anything()]
        self.leases: list[CacheLease] = []
        self.tokens: list[list[int]] = []

    def _write_missing(self, cache: KvCache, tokens: list[int]) -> None:
        """Commit what `cache` lacks: column c of a run of tokens holds that run's own number, in every layer."""
        missing = range(cache.length, len(tokens))
        if missing:
            cache.open(len(missing))
            for layer in range(cache.layers):
                new = torch.tensor([self._number(cache, tokens, column) + layer for column in missing]).expand(1, 2, -1)
                cache.write(layer, new.transpose(1, 2).double(), -new.transpose(1, 2).double())
            cache.commit(list(range(len(missing))))

    def _number(self, cache: KvCache, tokens: list[int], column: int) -> float:
        return hash((tuple(tokens[: column + 1]), cache.pool is self._draft_pool(cache))) % 9973  # type: ignore[attr-defined]

    def _draft_pool(self, cache: KvCache) -> object:
        return next((lease.draft.pool for lease in self.leases if lease.draft is cache), None)  # type: ignore[attr-defined]

    def _grow(self, index: int, more: list[int]) -> None:
        lease, tokens = self.leases[index], self.tokens[index] + more
        try:
            for blocks, committed in lease.tables:
                blocks.reserve(len(tokens))
                blocks.copy_on_write(committed, len(tokens))
        except OutOfPages:
            return
        self.tokens[index] = tokens
        for cache in lease.caches:
            self._write_missing(cache, tokens)

    some = st.lists(st.integers(0, 1), min_size=1, max_size=7)

    @rule(tokens=some, draft=st.integers(0, 2))
    def add(self, tokens: list[int], draft: int) -> None:
        lease = self.arena.lease(CacheNeeds(self.target, self.drafts[draft], 64, 8, tuple(tokens)))
        for cache in lease.caches:
            is_apart = lease.draft_blocks is not None and cache is lease.draft
            assert is_apart or cache.length == lease.reused, "a hit reaches caches on one table alike"
            assert cache.length <= len(tokens)
        known = max(cache.length for cache in lease.caches)
        self.leases.append(lease)
        self.tokens.append(tokens[:known])
        self._grow(len(self.leases) - 1, tokens[known:])

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 99), more=some)
    def grow(self, index: int, more: list[int]) -> None:
        self._grow(index % len(self.leases), more)

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 99), rows=st.integers(1, 5))
    def reject(self, index: int, rows: int) -> None:
        """A block is written and nothing of it kept."""
        lease = self.leases[index % len(self.leases)]
        for cache in lease.caches:
            try:
                cache.open(rows)
            except OutOfPages:
                continue
            for layer in range(cache.layers):
                cache.write(layer, *torch.full((2, 1, rows, 2), LARGE, dtype=torch.float64))
            cache.commit([])

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 99), draft=st.integers(0, 2))
    def fork(self, index: int, draft: int) -> None:
        index %= len(self.leases)
        twin = self.arena.fork(self.leases[index], CacheNeeds(self.target, self.drafts[draft], 64, 8))
        self.leases.append(twin)
        self.tokens.append(list(self.tokens[index]))
        self._grow(len(self.leases) - 1, [])

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 99), draft=st.integers(0, 2))
    def switch(self, index: int, draft: int) -> None:
        index %= len(self.leases)
        self.leases[index] = self.arena.with_draft(
            self.leases[index], CacheNeeds(self.target, self.drafts[draft], 64, 8)
        )
        self._grow(index, [])

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 99), is_kept=st.booleans())
    def end(self, index: int, is_kept: bool) -> None:
        index %= len(self.leases)
        lease, tokens = self.leases.pop(index), self.tokens.pop(index)
        self.arena.give_back(lease, tuple(tokens) if is_kept else ())
        assert not any(blocks.table for blocks, _ in lease.tables)

    @rule()
    def poison(self) -> None:
        self.arena.poison(self.leases)

    @invariant()
    def no_page_is_lost(self) -> None:
        pools = ((self.arena.pages, self.arena.prefix), (self.arena.draft_pages, self.arena.draft_prefix))
        for pages, prefix in pools if self.arena.layout.draft_page_size else pools[:1]:
            assert prefix is not None
            tables = [blocks for lease in self.leases for blocks, _ in lease.tables if blocks.pages is pages]
            holders = Counter(page for blocks in tables for page in blocks.table)
            holders.update(prefix.cached_pages)
            assert holders == pages.holder_counts
            assert sorted([*pages.free, *pages.holder_counts]) == list(range(pages.total))
            for blocks in tables:
                blocks.check()

    @invariant()
    def the_second_tier_keeps_to_its_room(self) -> None:
        prefix, layout = self.arena.prefix, self.arena.layout
        assert prefix is not None
        assert (prefix.tier is None) == (layout.second_tier == 0)
        if prefix.tier is not None:
            slots = list(prefix.tier.slots.values())
            assert len(slots) == len(set(slots)) <= layout.second_tier

    @invariant()
    def a_kept_page_can_be_found(self) -> None:
        prefix, size = self.arena.prefix, self.arena.layout.page_size
        assert prefix is not None
        keys = list(prefix.entries)
        for place, (owner, tokens) in enumerate(keys):
            if len(tokens) > size:
                before = (owner, tokens[:-size])
                assert before in keys[place + 1 :], "its predecessor is kept, and was used no earlier"

    @invariant()
    def every_column_is_its_own(self) -> None:
        for lease, tokens in zip(self.leases, self.tokens, strict=True):
            for cache in lease.caches:
                numbers = [self._number(cache, tokens, column) for column in range(cache.length)]
                for layer in range(cache.layers):
                    _, keys, values = cache.committed_columns(layer)
                    assert keys[0, :, 0].tolist() == [number + layer for number in numbers]
                    assert values[0, :, 1].tolist() == [-number - layer for number in numbers]


Pool.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPool = Pool.TestCase


def test_a_page_is_handed_out_in_the_order_of_the_free_list() -> None:
    pages = Pages((2, 0, 3, 1))
    assert pages.take(2) == [2, 0]
    pages.drop(2)
    assert (pages.free, pages.holder_counts) == ((3, 1, 2), {0: 1})
    with pytest.raises(OutOfPages, match="4 pages are needed, 3 of 4 are free"):
        pages.take(4)
    assert pages.free == (3, 1, 2), "all or none"


def test_what_nobody_holds_is_neither_freed_nor_shared() -> None:
    pages = Pages((0, 1))
    (page,) = pages.take(1)
    pages.share(page)
    pages.drop(page)
    assert pages.free == (1,)
    pages.drop(page)
    with pytest.raises(ValueError, match="page 0 is freed twice"):
        pages.drop(page)
    with pytest.raises(ValueError, match="page 0 is shared, but belongs to nobody"):
        pages.share(page)
    with pytest.raises(ValueError, match="a page stands twice in the free list"):
        Pages((1, 1))


def test_a_table_reserves_all_or_nothing() -> None:
    pages = Pages(range(3))
    blocks = Blocks(pages, 4, overhang=3)
    blocks.reserve(5)
    assert (blocks.table, blocks.allocated) == ([0, 1], 8)
    with pytest.raises(OutOfPages, match="2 pages are needed, 1 of 3 are free"):
        blocks.reserve(13)
    assert (blocks.table, pages.free) == ([0, 1], (2,))
    blocks.release()
    assert pages.free == (2, 1, 0), "the overhang first"


BAD = {
    "block 1: page 9 is outside the pool of 4": [0, 9],
    "block 0: page -1 is outside the pool of 4": [-1],
    "block 1: page 3 belongs to nobody": [0, 3],
    "a page stands twice in the block table": [1, 0, 1],
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_table_is_refused(message: str) -> None:
    pages = Pages(range(4))
    blocks = Blocks(pages, 4)
    blocks.table = pages.take(2)
    blocks.check()
    blocks.table = BAD[message]
    with pytest.raises(ValueError, match=message):
        blocks.check()


def test_a_shared_page_is_copied_before_it_is_written() -> None:
    pages = Pages(range(4))
    blocks, other_blocks, copied = Blocks(pages, 2), Blocks(pages, 2), []
    blocks.reserve(4)
    other_blocks.adopt(blocks.table)
    other_blocks.copy.append(lambda source, target: copied.append((source, target)))
    other_blocks.copy_on_write(3, 4)
    assert (blocks.table, other_blocks.table, copied) == ([0, 1], [0, 2], [(1, 2)])
    other_blocks.copy_on_write(3, 4)
    other_blocks.copy_on_write(2, 2)
    assert copied == [(1, 2)], "a page of its own is not copied, nor one that is not written"


def cached_pages(cache: PrefixCache, pages: Pages, tokens: tuple[int, ...]) -> list[int]:
    """Insert a request that had `tokens` and is over; the pages it had."""
    blocks = Blocks(pages, 2)
    blocks.adopt(cache.match(None, tokens))
    blocks.reserve(len(tokens))
    cache.insert(None, tokens, blocks.table)
    table = list(blocks.table)
    blocks.release()
    return table


def test_the_least_recently_used_page_goes_first() -> None:
    pages = Pages(range(6))
    cache = PrefixCache(pages, 2)
    first, second = cached_pages(cache, pages, (0, 0, 1, 1)), cached_pages(cache, pages, (5, 5, 6, 6, 7))
    assert (cache.cached_pages, pages.free) == ((first[1], first[0], second[1], second[0]), (5, second[2]))
    assert cache.match(None, (0, 0, 1, 1, 2)) == first
    assert cache.match("another draft", (0, 0, 1, 1, 2)) == []
    assert cache.match(None, (0,)) == []
    pages.take(3)
    assert cache.cached_pages == (second[0], first[1], first[0]), "one page was missing, one went"
    cache.clear()
    assert len(pages.free) == 3


def test_a_page_that_is_in_use_is_not_evicted() -> None:
    pages = Pages(range(3))
    cache = PrefixCache(pages, 2)
    cached_pages(cache, pages, (0, 0, 1, 1))
    user = Blocks(pages, 2)
    user.adopt(cache.match(None, (0, 0)))
    with pytest.raises(OutOfPages, match="3 pages are needed, 2 of 3 are free"):
        pages.take(3)
    assert cache.cached_pages == tuple(user.table)
    assert pages.holder_counts[user.table[0]] == 2


def test_pages_after_an_evicted_one_are_let_go_of_but_stay_with_their_holder() -> None:
    """Two requests compute the same beginning at once; one is kept, the end of the other, and a fork of that other."""
    pages = Pages(range(6))
    cache = PrefixCache(pages, 2)
    short_blocks, long_blocks = Blocks(pages, 2), Blocks(pages, 2)
    short_blocks.reserve(2)
    long_blocks.reserve(4)
    fork = Blocks(pages, 2)
    fork.adopt(long_blocks.table)
    cache.insert(None, (0, 0), short_blocks.table)
    cache.insert(None, (0, 0, 1, 1), long_blocks.table)
    short_blocks.release()
    long_blocks.release()
    assert cache.cached_pages == (2, 0)
    pages.take(4)
    assert not len(cache)
    assert (fork.table, pages.holder_counts[2]) == ([1, 2], 1)


def test_a_prefix_is_kept_only_where_target_and_draft_committed_it() -> None:
    arena = Arena(KvLayout(kind="prefix", page_size=2, pages=tuple(range(8))))
    target, draft = Anything(), Anything()
    lease = arena.lease(CacheNeeds(target, draft, 16, 4))
    assert lease.draft is not None
    for cache, columns in ((lease.target, 6), (lease.draft, 3)):
        cache.open(columns)
        cache.commit(list(range(columns)))
    arena.give_back(lease, (1, 2, 3, 4, 5, 6, 7))
    assert arena.prefix is not None
    assert len(arena.prefix) == 1
    again = arena.lease(CacheNeeds(target, draft, 16, 4, (1, 2, 3, 4, 5, 6)))
    assert [cache.length for cache in again.caches] == [2, 2]
    assert arena.lease(CacheNeeds(target, Anything(), 16, 4, (1, 2, 3, 4))).reused == 0


def test_a_target_that_drafts_for_itself_has_two_caches() -> None:
    model = Anything()
    lease = Arena(KvLayout(kind="paged", page_size=4), 4).lease(CacheNeeds(model, model, 16, 4))
    assert lease.draft is not None
    for number, cache in enumerate(lease.caches):
        cache.open(2)
        for layer in range(2):
            cache.write(layer, *torch.full((2, 1, 2, 2), 1.0 + number, dtype=torch.float64))
    assert [float(cache.block(0)[0][0, 0, 0]) for cache in lease.caches] == [1.0, 2.0]


@pytest.mark.parametrize(("overhang", "columns"), [(2, 21), (6, 12)])
def test_a_request_alone_that_waits_for_pages_is_an_error_with_a_sentence(overhang: int, columns: int) -> None:
    """A reserve handed out in pages empties a pool that is large enough: on the way, or before the first step."""
    prompt = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8)
    layout = KvLayout(kind="paged", page_size=4, overhang=overhang)
    layout = replace(layout, pages=tuple(range(layout.pages_for(len(prompt) + 13))))
    trees = (Tree((0, 0, 1), (prompt[-1], 2, 3)),)
    case = Case(LLAMA, prompt, Scripted(trees), layout, stops=Stops(8))
    assert len(open_cpu().run(case).output) == 8
    starving = open_cpu()
    faults.plant(starving, faults.fault_named("reserve-counted-in-pages"))
    words = f"the request waits for pages that can never come: {columns} columns and"
    with pytest.raises(StageFailure, match=words) as error:
        starving.run(case)
    assert error.value.stage is Stage.COMMITTED
    (finding,) = judge(case, (BY_NAME["lossless.completes"],), ORACLE, subject_of(starving)).findings
    assert (finding.stage, "side" in finding.where) == (Stage.COMMITTED, False)


def test_a_page_whose_last_row_holds_the_next_token_leads_on_to_that_token_alone() -> None:
    pages = Pages(range(8))
    cache = PrefixCache(pages, 2)
    first, second = Blocks(pages, 2), Blocks(pages, 2)
    first.reserve(2)
    second.reserve(4)
    cache.insert(None, (1, 2), first.table, (1, 2, 3))
    cache.insert(None, (1, 2, 7, 8), second.table, (1, 2, 7, 8))
    assert cache.match(None, (1, 2, 7, 8, 9)) == first.table, "the page of another text comes last"
    assert cache.match(None, (1, 2, 3, 4)) == first.table
    cache.insert("plain", (1, 2), first.table)
    cache.insert("plain", (1, 2, 7, 8), second.table)
    assert cache.match("plain", (1, 2, 7, 8, 9)) == [first.table[0], second.table[1]]


def test_a_copy_in_the_second_tier_goes_with_the_token_behind_it() -> None:
    pages = Pages(range(8))
    cache = PrefixCache(pages, 2)
    cache.tier = SecondTier(4, 2, lambda owner: [])
    first, second = Blocks(pages, 2), Blocks(pages, 2)
    first.reserve(2)
    cache.insert(None, (1, 2), first.table, (1, 2, 3))
    first.release()
    cache.evict(1)
    assert cache.tier.has_copy((None, (1, 2)))
    second.reserve(4)
    cache.insert(None, (1, 2, 7, 8), second.table, (1, 2, 7, 8, 9))
    assert not cache.tier.has_copy((None, (1, 2))), "the copy's last row holds another token"
    assert cache.match(None, (1, 2, 7, 8, 9)) == second.table


def evict_by_definition(cache: PrefixCache, count: int) -> None:
    """Evict from `cache` with a look at every entry for each of the sentences in `PrefixCache.evict`."""
    for key in list(cache.entries):
        page = cache.entries.get(key)
        num_entries = sum(entry_page == page for entry_page in cache.entries.values())
        if count > 0 and page is not None and cache.pages.holder_counts[page] == num_entries:
            behind = [other for other in cache.entries if other[0] == key[0] and other[1][: len(key[1])] == key[1]]
            for other in behind:
                other_page = cache.entries.pop(other)
                cache.pages.drop(other_page)
                count -= other_page not in cache.pages.holder_counts


@pytest.mark.parametrize("seed", range(12))
def test_an_eviction_drops_what_its_definition_says_and_in_that_order(seed: int) -> None:
    caches = [PrefixCache(Pages(range(60)), 2) for _ in range(2)]
    for cache in caches:
        rng = np.random.default_rng(seed)
        for _ in range(8):
            tokens = tuple(rng.integers(0, 2, 2 * rng.integers(1, 6)).tolist())
            owner, second_owner = rng.integers(3, size=2).tolist()
            blocks = Blocks(cache.pages, 2)
            blocks.reserve(len(tokens))
            cache.insert(owner, tokens, blocks.table)
            cache.insert(second_owner, tokens, blocks.table)
            if rng.random() < 0.7:
                blocks.release()
    before = len(caches[0])
    for count in (1, 3, 5):
        caches[0].evict(count)
        evict_by_definition(caches[1], count)
        assert list(caches[0].entries.items()) == list(caches[1].entries.items())
        assert caches[0].pages.free == caches[1].pages.free
    assert len(caches[0]) < before
