"""The second tier of the prefix cache: pages come back as they left, and no more of them than there is room for."""

from dataclasses import replace

import pytest
import torch

from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.kv.arena import Arena, CacheLease, CacheNeeds
from specverify.backends.engine.kv.base import CacheSpec
from specverify.backends.engine.reach import Reach
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.tree import RankTree

ARCHITECTURE = Architecture("llama", 8, 8, 8, 2, 1, 4, (0, 0))
SIZE = 2
PROMPT = (1, 2, 3, 1, 2, 3, 2, 1, 3)


class Anything:
    """A model of one layer that only has a room."""

    def room(self, capacity: int, rows: int) -> CacheSpec:
        return CacheSpec((Reach(),), 1, 2, capacity, rows, torch.device("cpu"), torch.float32)


TARGET, DRAFT = Anything(), Anything()


def lease_tokens(arena: Arena, tokens: tuple[int, ...]) -> CacheLease:
    """A request of `tokens`, whose columns hold a number of target or draft and of the column."""
    lease = arena.lease(CacheNeeds(TARGET, DRAFT, 32, 4, tokens))
    assert lease.blocks is not None
    lease.blocks.reserve(len(tokens))
    for which, cache in enumerate(lease.caches):
        missing = range(cache.length, len(tokens))
        if missing:
            cache.open(len(missing))
            cells = torch.tensor([[[100.0 * which + column] * 2 for column in missing]])
            cache.write(0, cells, -cells)
            cache.commit(list(range(len(missing))))
    return lease


def test_pages_of_target_and_draft_leave_together_and_come_back_as_they_were() -> None:
    arena = Arena(KvLayout(kind="prefix", page_size=SIZE, first_tier=1, second_tier=8, poison="large"), 8)
    tokens = (5, 6, 7, 8, 9, 1)
    arena.give_back(lease_tokens(arena, tokens), tokens)
    assert arena.prefix is not None
    assert arena.prefix.tier is not None
    assert (len(arena.prefix), len(arena.prefix.tier.slots)) == (1, 2)
    arena.poison()
    lease = arena.lease(CacheNeeds(TARGET, DRAFT, 32, 4, tokens))
    assert (lease.reused, len(arena.prefix.tier.take_brought())) == (6, 2)
    for which, cache in enumerate(lease.caches):
        _, keys, values = cache.committed_columns(0)
        assert keys[0, :, 0].tolist() == [100.0 * which + column for column in range(6)]
        assert torch.equal(keys, -values)
    assert arena.prefix.tier.take_brought() == ()


def test_the_copy_that_was_used_least_gives_its_slot() -> None:
    arena = Arena(KvLayout(kind="prefix", page_size=SIZE, first_tier=1, second_tier=1), 8)
    tokens = (5, 6, 7, 8, 9, 1)
    arena.give_back(lease_tokens(arena, tokens), tokens)
    assert arena.prefix is not None
    assert arena.prefix.tier is not None
    assert [key[1] for key in arena.prefix.tier.slots] == [tokens[:4]], "the last page left first"  # type: ignore[index]
    lease = arena.lease(CacheNeeds(TARGET, DRAFT, 32, 4, tokens))
    assert lease.reused == 4


def test_a_page_that_finds_no_room_in_the_pool_stays_away() -> None:
    arena = Arena(KvLayout(kind="prefix", page_size=SIZE, first_tier=1, second_tier=8, pages=(2, 0, 1)))
    tokens = (5, 6, 7, 8)
    arena.give_back(lease_tokens(arena, tokens), tokens)
    other_lease = lease_tokens(arena, (1, 1, 1, 1))
    lease = arena.lease(CacheNeeds(TARGET, DRAFT, 32, 4, tokens))
    assert lease.reused == SIZE
    for holder in (other_lease, lease):
        arena.give_back(holder)
    assert sorted([*arena.pages.free, *arena.pages.holder_counts]) == [0, 1, 2]


def test_an_evicted_request_finds_its_pages_in_the_second_tier() -> None:
    model = Seeded(ARCHITECTURE, 3)
    draft = LanguageModel(Seeded(ARCHITECTURE, 4), RankTree((0, 0, 0), (0, 0, 1)))
    actions = [Action(kind, (0,)) for kind in ("add", "step", "evict", "restore", "step", "step")]
    layout = KvLayout(kind="prefix", page_size=SIZE, first_tier=1, second_tier=16)
    case = Case(model, PROMPT, draft, layout, stops=Stops(12), session=Session((Mate((1,)),), tuple(actions)))
    backend = EngineBackend("eager", "cpu")
    trace, plain = backend.run(case), backend.run(replace(case, layout=KvLayout()))
    assert trace.output == plain.output
    assert trace.shared is not None
    assert [len(account.brought) for account in trace.shared.accounts] == [0, 0, 0, 3, 0, 0]
    assert trace.shared.accounts[3].stored == 3


@pytest.mark.parametrize("name", ["first_tier", "second_tier"])
def test_only_a_prefix_cache_has_tiers(name: str) -> None:
    with pytest.raises(Malformed, match=f"{name}: paged keeps no prefixes"):
        KvLayout(kind="paged", page_size=1, **{name: 1})  # type: ignore[arg-type]
    with pytest.raises(Malformed, match=f"{name}: -1 is negative"):
        KvLayout(kind="prefix", page_size=1, **{name: -1})  # type: ignore[arg-type]
    with pytest.raises(Malformed, match=f"{name}: 65537 pages; at most 65536"):
        KvLayout(kind="prefix", page_size=1, **{name: 65537})  # type: ignore[arg-type]
