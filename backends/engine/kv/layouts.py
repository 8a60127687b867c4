"""Makes the cache of a request, for each layout without pages, by the layout's name.

The traits of a layout stand in `reference.layout.KINDS`. Layouts with pages share `Paged`, which the arena makes.
"""

from collections.abc import Callable
from dataclasses import replace

from backends.engine.kv.base import CacheSpec, KvCache
from backends.engine.kv.seams import KvSeams
from reference.layout import KvLayout

CACHES: dict[str, Callable[[KvSeams, CacheSpec, KvLayout], KvCache]] = {
    "branch": lambda seams, room, layout: seams.branch(room, layout.commit),
    "overwrite": lambda seams, room, layout: seams.overwrite(room),
    # A prefill is a block too, and none of this layout's business is to split it.
    "scratch": lambda seams, room, layout: seams.scratch(replace(room, rows=room.capacity)),
    "static": lambda seams, room, layout: seams.static(room),
    "sliding": lambda seams, room, layout: seams.sliding(room),
}
"""For each layout without pages, the cache of one request."""
