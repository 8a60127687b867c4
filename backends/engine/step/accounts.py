"""The account of an arena, which says who holds each page of the pool."""

from specverify.backends.engine.kv.arena import Arena, CacheLease
from specverify.reference.session import Account


def account_of(arena: Arena, leases: dict[int, CacheLease]) -> Account:
    """The state of the page pool of `arena`, of which the requests with these numbers hold `leases`."""
    tables = {number: lease.blocks for number, lease in leases.items() if lease.blocks is not None}
    tier = None if arena.prefix is None else arena.prefix.tier
    return Account(
        free=arena.pages.free,
        total=arena.pages.total,
        tables={number: tuple(blocks.table) for number, blocks in tables.items()},
        kept=arena.prefix.cached_pages if arena.prefix is not None else (),
        committed={number: lease.target.length for number, lease in leases.items()},
        allocated={number: blocks.allocated for number, blocks in tables.items()},
        stored=0 if tier is None else len(tier.slots),
        brought=() if tier is None else tier.take_brought(),
    )
