"""Every layout of the KV cache against plain lists: whatever is done to it, it holds what the lists hold."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specverify.backends.engine.kv.arena import LARGE, Arena, CacheLease, CacheNeeds
from specverify.backends.engine.kv.base import CacheSpec, KvCache, Pair
from specverify.backends.engine.reach import Reach
from specverify.reference.layout import COMMITS, KINDS, KvLayout

CAPACITY, ROWS, HEADS, DIM = 40, 6, 2, 3
REACHES = (Reach(), Reach(window=1), Reach(window=4), Reach(chunk=5))
ROOM = CacheSpec(REACHES, HEADS, DIM, CAPACITY, ROWS, torch.device("cpu"), torch.float64)
NAMES = tuple(f"branch-{how}" for how in COMMITS) + tuple(kind for kind in KINDS if kind != "branch")


@dataclass(frozen=True)
class Anything:
    """A model that only has a room."""

    room_: CacheSpec = ROOM

    def room(self, capacity: int, rows: int) -> CacheSpec:
        return replace(self.room_, capacity=capacity, rows=rows)


@dataclass
class Lists:
    """What a cache must hold: per layer, one number for each committed column and each open row."""

    committed: list[list[float]] = field(default_factory=lambda: [[] for _ in REACHES])
    rows: list[list[float]] = field(default_factory=lambda: [[] for _ in REACHES])


def cells(numbers: list[float]) -> Pair:
    """Keys and values [HEADS, columns, DIM], every cell another number."""
    spread = torch.arange(HEADS, dtype=torch.float64)[:, None, None] / 4 + torch.arange(DIM) / 16
    keys = torch.tensor(numbers, dtype=torch.float64)[None, :, None] + spread
    return keys, -keys - 1000


def has_numbers(pair: Pair, numbers: list[float]) -> bool:
    return all(torch.equal(tensor, cell) for tensor, cell in zip(pair, cells(numbers), strict=True))


class Twin:
    """A cache and its lists, always told the same; every look compares all of both."""

    def __init__(self, name: str, lease: CacheLease, lists: Lists | None = None) -> None:
        self.name, self.lease, self.cache = name, lease, lease.target
        self.lists = lists or Lists()
        self._next = 2048.0 if lists else 0.0

    def fresh(self, rows: int) -> list[float]:
        self._next += rows
        return [self._next + row / 64 for row in range(rows)]

    def open(self, rows: int) -> None:
        self.cache.open(rows)
        new = self.fresh(rows)
        for layer, numbers in enumerate(self.lists.rows):
            numbers += [number + 8192 * layer for number in new]
            self.cache.write(layer, *cells(numbers[len(numbers) - rows :]))

    def amend(self) -> None:
        new = self.fresh(self.cache.rows)
        for layer in range(len(REACHES)):
            self.lists.rows[layer] = [number + 8192 * layer for number in new]
            self.cache.amend(layer, *cells(self.lists.rows[layer]))

    def commit(self, path: list[int]) -> None:
        self.cache.commit(path)
        for numbers, rows in zip(self.lists.committed, self.lists.rows, strict=True):
            numbers += [rows[row] for row in path]
            rows.clear()

    def crop(self, length: int) -> None:
        self.cache.crop(length)
        for numbers, rows in zip(self.lists.committed, self.lists.rows, strict=True):
            del numbers[length:]
            rows.clear()

    def look(self) -> None:
        """Committed columns, open rows, and what a row that sees everything in reach would attend to, in order."""
        for layer, (committed, rows) in enumerate(zip(self.lists.committed, self.lists.rows, strict=True)):
            assert (self.cache.length, self.cache.rows) == (len(committed), len(rows))
            first, *pair = self.cache.committed_columns(layer)
            assert first <= REACHES[layer].first(len(committed)), "a column that a row to come may see is gone"
            assert has_numbers((pair[0], pair[1]), committed[first:])
            assert has_numbers(self.cache.block(layer), rows)
            keys, values = self.cache.read(layer)
            assert keys.shape[1] == values.shape[1]
            reach, columns = REACHES[layer], torch.arange(len(committed) + len(rows))
            everything = torch.ones(1, len(columns), dtype=torch.bool)
            visible = reach.within(everything, torch.tensor([len(committed)]), columns)
            cell_mask = self.cache.cell_mask(layer, visible)
            assert cell_mask.shape == (1, keys.shape[1])
            cell_indices = cell_mask[0].nonzero()[:, 0]
            seen_columns = visible[0].nonzero()[:, 0].tolist()
            assert has_numbers(
                (keys[:, cell_indices], values[:, cell_indices]),
                [[*committed, *rows][column] for column in seen_columns],
            )


def _paged(name: str) -> bool:
    return name in KINDS and KINDS[name].pages


def layout_of(name: str, size: int = 4, pages: tuple[int, ...] = (), overhang: int = 0) -> KvLayout:
    kind, _, how = name.partition("-")
    paged = {"page_size": size, "pages": pages, "overhang": overhang} if _paged(kind) else {}
    return KvLayout(kind=kind, commit=how or "path", **paged)  # type: ignore[arg-type]


@st.composite
def arenas(draw: st.DrawFn, name: str) -> Arena:
    """An arena whose pool holds two requests, with pages of any size in any order."""
    size = draw(st.sampled_from((1, 2, 3, 7, 16, 128)) | st.integers(1, 128))
    overhang = draw(st.sampled_from((0, 1, 5)))
    count = 2 * layout_of(name, size, (), overhang).pages_for(CAPACITY) if _paged(name) else 0
    return Arena(layout_of(name, size, tuple(draw(st.permutations(range(count)))), overhang))


def lease(arena: Arena, model: Anything) -> CacheLease:
    return arena.lease(CacheNeeds(model, None, CAPACITY, ROWS))


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_holds_what_a_list_holds(name: str) -> None:
    """Blocks opened in pieces, unordered paths, crops, poison, amended rows; rings turn several times."""

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def run(data: st.DataObject) -> None:
        twin = Twin(name, lease(data.draw(arenas(name)), Anything()))
        cache = twin.cache
        for _ in range(data.draw(st.integers(1, 14))):
            room = min(ROWS, CAPACITY - cache.length) - cache.rows
            kind = data.draw(st.sampled_from(("open", "open", "commit", "commit", "amend", "crop", "poison")))
            if kind == "open" and room > 0:
                twin.open(data.draw(st.integers(1, room)))
            elif kind == "commit":
                most = data.draw(st.integers(0, cache.rows))
                twin.commit(data.draw(st.permutations(range(cache.rows)))[:most])
            elif kind == "amend" and cache.rows:
                twin.amend()
            elif kind == "crop":
                least = max(0, cache.length - 1) if name == "sliding" else 0
                twin.crop(data.draw(st.sampled_from((least, cache.length)) | st.integers(least, cache.length)))
            elif kind == "poison":
                cache.poison(data.draw(st.sampled_from((LARGE, float("nan")))) if name != "static" else LARGE)
            twin.look()
        cache.release()
        assert (cache.length, cache.rows) == (0, 0)

    run()


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_that_begins_as_another_is_a_copy(name: str) -> None:
    """Neither notices what is done to the other from then on, nor that the other is released and poisoned."""

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def run(data: st.DataObject) -> None:
        arena, model = data.draw(arenas(name)), Anything()
        old = Twin(name, lease(arena, model))
        for _ in range(data.draw(st.integers(0, 3))):
            rows = data.draw(st.integers(1, ROWS))
            old.open(rows)
            old.commit(data.draw(st.permutations(range(rows))))
        shared = arena.fork(old.lease, CacheNeeds(model, None, CAPACITY, ROWS))
        new = Twin(name, shared, Lists([list(numbers) for numbers in old.lists.committed]))
        new.look()
        for twin in (new, old):
            rows = data.draw(st.integers(1, ROWS))
            twin.open(rows)
            twin.commit(data.draw(st.permutations(range(rows)))[: data.draw(st.integers(0, rows))])
            new.look()
            old.look()
        arena.give_back(old.lease)
        arena.poison()
        old.cache.poison(LARGE)
        new.look()
        arena.give_back(new.lease)
        assert len(arena.pages.free) == arena.pages.total

    run()


def blocks_of(twin: Twin, sizes: list[int]) -> Iterator[None]:
    for rows in sizes:
        twin.open(rows)
        twin.commit(list(range(rows)))
        yield


def test_a_ring_is_never_rewound_to_what_it_overwrote() -> None:
    """Crops after rejected blocks, crops and copies: either all that is in reach is there, or ValueError."""

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def run(data: st.DataObject) -> None:
        arena, model = Arena(layout_of("sliding")), Anything()
        twin = Twin("sliding", lease(arena, model))
        for _ in range(data.draw(st.integers(1, 8))):
            rows = data.draw(st.integers(1, ROWS))
            if twin.cache.length + rows <= CAPACITY:
                twin.open(rows)
                twin.commit(list(range(data.draw(st.integers(0, rows)))))
            if data.draw(st.booleans()):
                twin.cache.poison(float("nan"))
            if data.draw(st.integers(0, 3)) == 0:
                copy = arena.fork(twin.lease, CacheNeeds(model, None, CAPACITY, ROWS))
                twin = Twin("sliding", copy, twin.lists)
            length = data.draw(st.integers(0, twin.cache.length))
            with suppress(ValueError):
                twin.crop(length)
            twin.look()

    run()


@pytest.mark.parametrize("poisoned", [False, True])
def test_a_ring_can_always_be_rewound_by_one_column(poisoned: bool) -> None:
    twin = Twin("sliding", lease(Arena(layout_of("sliding")), Anything()))
    for _ in blocks_of(twin, [5, 6, 6, 1, 6, 6]):
        twin.open(ROWS)
        twin.commit([])
        if poisoned:
            twin.cache.poison(float("nan"))
        twin.crop(twin.cache.length - 1)
        twin.look()
    with pytest.raises(ValueError, match="layer 2: a ring without column 11 cannot be rewound to 14 columns"):
        twin.crop(14)


def test_rings_refuse_a_block_they_have_no_cells_for() -> None:
    cache = lease(Arena(layout_of("sliding")), Anything()).target
    cache.open(ROWS)
    with pytest.raises(ValueError, match=f"{ROWS + 1} open rows in rings with cells for {ROWS}"):
        cache.open(1)
    assert cache.rows == ROWS


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_holds_no_poison_where_it_is_shown(name: str) -> None:
    """Every cell that is shown is a committed column or an open row; with NaN everywhere else, none is NaN."""
    twin = Twin(name, lease(Arena(layout_of(name, 4, tuple(range(24)) if _paged(name) else ())), Anything()))
    for _ in blocks_of(twin, [6, 6, 6, 5]):
        twin.cache.poison(float("nan"))
    twin.open(3)
    twin.cache.poison(float("nan"))
    twin.look()
    cells_read = [torch.isnan(keys).any().item() for keys, _ in map(twin.cache.read, range(len(REACHES)))]
    assert cells_read == [name == "static"] * len(REACHES), "static alone reads what it does not hold"


WRONG: dict[str, Callable[[KvCache], Callable[[list[int]], str | None]]] = {
    "keeps one row less": lambda cache: lambda path: type(cache).commit(cache, path[:-1]),
    "keeps rows in row order": lambda cache: lambda path: type(cache).commit(cache, sorted(path)),
    "keeps the first rows": lambda cache: lambda path: type(cache).commit(cache, list(range(len(path)))),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_commit_shows(name: str, wrong: str) -> None:
    twin = Twin(name, lease(Arena(layout_of(name, 4, tuple(range(24)) if _paged(name) else ())), Anything()))
    list(blocks_of(twin, [3]))
    twin.open(4)
    twin.cache.commit = WRONG[wrong](twin.cache)  # type: ignore[method-assign, assignment]
    twin.commit([0, 3, 1])
    with pytest.raises(AssertionError):
        twin.look()


def test_bits_are_kept_in_every_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = Anything(replace(ROOM, dtype=dtype))
        draw = torch.Generator().manual_seed(5)
        rows: Tensor = torch.randn(2, HEADS, 6, DIM, generator=draw).to(dtype)
        for name in NAMES:
            cache = lease(Arena(layout_of(name, 4, tuple(range(24)) if _paged(name) else ())), model).target
            cache.open(6)
            for layer in range(cache.layers):
                cache.write(layer, rows[0], rows[1])
            cache.commit([0, 2, 5])
            first, keys, values = cache.committed_columns(0)
            assert first == 0
            assert torch.equal(keys, rows[0][:, [0, 2, 5]])
            assert torch.equal(values, rows[1][:, [0, 2, 5]])
