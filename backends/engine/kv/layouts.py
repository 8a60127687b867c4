"""The functions that make a request's cache, one per layout without pages.

The traits of a layout are in `specverify.reference.layout.KINDS`. Layouts with pages share `Paged`, which the arena
makes.
"""

from collections.abc import Callable
from dataclasses import replace

from specverify.backends.engine.kv.base import CacheSpec, KvCache
from specverify.backends.engine.kv.seams import KvSeams
from specverify.reference.layout import KvLayout

CACHES: dict[str, Callable[[KvSeams, CacheSpec, KvLayout], KvCache]] = {
    "branch": lambda seams, room, layout: (
        seams.branches(room, layout.commit, layout.branches) if layout.branches else seams.branch(room, layout.commit)
    ),
    "overwrite": lambda seams, room, layout: seams.overwrite(room),
    # A prefill is a block too and need not be split, so the scratch buffer has room for all columns.
    "scratch": lambda seams, room, layout: seams.scratch(replace(room, rows=room.capacity)),
    "static": lambda seams, room, layout: seams.static(room),
    "sliding": lambda seams, room, layout: seams.sliding(room),
}
"""For each layout without pages, a function that makes the cache of one request."""
