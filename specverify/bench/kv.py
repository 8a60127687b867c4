"""The command `bench kv`: the cost of verify and commit in each KV layout.

It measures how the cost grows with prefix length, page size and accepted length. No model runs: verify is one block
written and read in every layer.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from specverify.backends.engine.kv.arena import Arena, CacheNeeds
from specverify.backends.engine.kv.base import CacheSpec, KvCache
from specverify.backends.engine.reach import Reach
from specverify.reference.layout import KINDS, KvLayout

PREFIXES = (128, 512, 2048, 8192)
"""Committed columns."""

PAGES = (1, 16, 128)
"""Page sizes, in columns."""

ACCEPTED = (1, 4, 8)
"""Rows that a commit keeps."""

ROWS = 16
"""Rows of the verified block."""

REPETITIONS = 9
"""Timed repetitions of each cell."""

WINDOW = 256
"""The window of layout `sliding`, whose rings would be plain buffers without one."""

LAYERS, HEADS, DIM = 2, 4, 64
"""Layers, KV heads and head dimension of the caches."""


@dataclass(frozen=True)
class Cell:
    """One combination that is timed: a layout, a number of committed columns, and a number of accepted rows."""

    layout: KvLayout
    prefix: int
    accepted: int

    @property
    def name(self) -> str:
        """The name of the layout, with the way to commit if the layout has several."""
        kind = self.layout.kind
        return f"{kind} {self.layout.commit}" if len(self.layout.traits.commits) > 1 else kind

    @property
    def smallest(self) -> "Cell":
        """The same cell with the shortest prefix, by whose times this cell's are divided."""
        return replace(self, prefix=PREFIXES[0])


@dataclass(frozen=True)
class CacheModel:
    """A stand-in for a model that gives the arena the sizes of a cache, and nothing else."""

    reach: Reach

    def room(self, capacity: int, rows: int) -> CacheSpec:
        """See `arena.Model`."""
        return CacheSpec((self.reach,) * LAYERS, HEADS, DIM, capacity, rows, torch.device("cpu"), torch.float32)


def cells(kind: str | None) -> Iterator[Cell]:
    """Every cell of layout `kind`, or of all layouts: each page size or way to commit, prefix and accepted length."""
    for name in [kind] if kind else KINDS:
        if KINDS[name].pages:
            ways = [KvLayout(kind=name, page_size=size) for size in PAGES]
        else:
            ways = [KvLayout(kind=name, commit=way) for way in KINDS[name].commits]
        for layout in ways:
            for prefix in PREFIXES:
                for accepted in ACCEPTED:
                    yield Cell(layout, prefix, accepted)


def _opened(cell: Cell) -> KvCache:
    """A cache with the cell's prefix committed."""
    layout, capacity = cell.layout, cell.prefix + 2 * ROWS
    pages = layout.pages_for(capacity) if layout.traits.pages else 0
    reach = Reach(window=WINDOW if layout.traits.ring else 0)
    cache = Arena(layout, pages).lease(CacheNeeds(CacheModel(reach), None, capacity, ROWS)).target
    # A ring takes at most `most_rows` rows at once, so that the prefix is committed in blocks.
    width = min(cell.prefix, cache.most_rows or cell.prefix)
    for column in range(0, cell.prefix, width):
        rows = min(width, cell.prefix - column)
        cache.open(rows)
        for layer in range(LAYERS):
            cache.write(layer, *torch.randn(2, HEADS, rows, DIM))
        cache.commit(list(range(rows)))
    return cache


def _step(cache: KvCache, cell: Cell, keys: torch.Tensor) -> tuple[float, float]:
    """Seconds for one block written and read in every layer, and for its commit; the cache is then cropped back."""
    # A path out of row order makes the commit move columns; some ways to commit admit row order alone.
    ordered = cell.layout.commit == "length" or cell.layout.traits.in_place
    path = list(range(cell.accepted)) if ordered else [0, *range(2, cell.accepted + 1)]
    _evict_caches()
    began = time.perf_counter()
    cache.open(ROWS)
    tensors = []  # keeps the tensors of verify alive, so that the timed commit does not free them
    for layer in range(LAYERS):
        cache.write(layer, keys[0], keys[1])
        tensors.append(cache.read(layer))
    verified = time.perf_counter()
    _evict_caches()
    again = time.perf_counter()
    cache.commit(path)
    committed = time.perf_counter()
    cache.crop(cell.prefix)
    return verified - began, committed - again


_EVICTION_BUFFER = torch.zeros(4 * 2**20)


def _evict_caches() -> None:
    """Evict the processor's caches, as a long prefix would by itself: else a short prefix is timed on warm caches."""
    _EVICTION_BUFFER.add_(1)


def measure(kind: str | None, repetitions: int, seconds: Callable[..., Any] = _step) -> dict[str, Any]:
    """Time every cell; each repetition visits all cells of one layout in random order, so that ratios are fair.

    Returns:
        rows: for each cell its name, page_size, prefix, accepted, verify_us and commit_us (medians in microseconds),
        and verify_ratio and commit_ratio over the cell with the shortest prefix; repetitions, block, layers.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keys = torch.randn(2, HEADS, ROWS, DIM)
    order = random.Random(0)
    rows: list[dict[str, Any]] = []
    groups: dict[KvLayout, list[Cell]] = {}
    for cell in cells(kind):
        groups.setdefault(cell.layout, []).append(cell)
    for group in groups.values():
        caches = {cell: _opened(cell) for cell in group}
        times: dict[Cell, list[tuple[float, float]]] = {cell: [] for cell in group}
        for repetition in range(repetitions + 2):
            for cell in order.sample(group, len(group)):
                step_times = seconds(caches[cell], cell, keys)
                if repetition >= 2:  # the first two warm up
                    times[cell].append(step_times)
        medians = {
            cell: list(map(statistics.median, zip(*step_times, strict=True))) for cell, step_times in times.items()
        }
        for cell, (verify, commit) in medians.items():
            first_verify, first_commit = medians[cell.smallest]
            rows.append(
                {
                    "layout": cell.name,
                    "page_size": cell.layout.page_size,
                    "prefix": cell.prefix,
                    "accepted": cell.accepted,
                    "verify_us": verify * 1e6,
                    "commit_us": commit * 1e6,
                    "verify_ratio": verify / first_verify,
                    "commit_ratio": commit / first_commit,
                }
            )
    return {"rows": rows, "repetitions": repetitions, "block": ROWS, "layers": LAYERS, "smallest_prefix": PREFIXES[0]}
