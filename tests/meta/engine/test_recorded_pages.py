"""Recorded verify forwards over pages: one recording serves other steps, other pages and other requests."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specverify.backends.compositions import open_cpu
from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.kv.base import CacheSpec, KvCache
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.kv.paged import Paged, Pool
from specverify.backends.engine.kv.pages import Blocks, Pages
from specverify.backends.engine.model.graphs import Graphs, Inputs
from specverify.backends.engine.model.recording.operators import OperatorRecorder
from specverify.backends.engine.reach import Reach
from specverify.reference.layout import KvLayout
from tests.meta.engine.test_graphs import CASE, OperatorGraphs, assert_same_output, run
from tests.tiers import first

LAYERS, HEADS, WIDTH, SIZE = 2, 2, 4, 4
REACH = Reach()


def attend(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    scores = (query @ columns.key.transpose(-1, -2) * scaling).masked_fill(~columns.visible, float("-inf"))
    return scores.softmax(-1) @ columns.value


def forward(inputs: Inputs, lanes: BatchCache, attended: object) -> Tensor:
    """Two layers of attention without weights, over keys and values made from the tokens."""
    rows = torch.stack([(inputs["input_ids"] * (place + 1)).sin() for place in range(WIDTH)], -1)
    hidden = rows[:, None].expand(-1, HEADS, -1, -1).contiguous()
    for layer in range(LAYERS):
        key, value = lanes.update(hidden, hidden.cos(), layer)
        columns = lanes.columns(layer, key, value, inputs["attention_mask"])
        hidden = hidden + attended(hidden, columns, 0.5)  # type: ignore[operator]
    return hidden[:, 0]


class Room:
    """A pool whose free cells hold NaN, and what is recorded over it."""

    def __init__(self, exact: bool, pages: int = 32) -> None:
        spec = CacheSpec((REACH,) * LAYERS, HEADS, WIDTH, 0, 0, torch.device("cpu"), torch.float64)
        self.pages = Pages(range(pages))
        self.pages.exact = exact
        self.pool = Pool(spec, pages, SIZE)
        self.pool.fill(list(range(pages)), float("nan"))
        self.graphs = Graphs(OperatorRecorder())

    def cache(self, columns: int, seed: int) -> Paged:
        cache = Paged(self.pool, Blocks(self.pages, SIZE))
        cache.open(columns)
        numbers = torch.randn(LAYERS, 2, HEADS, columns, WIDTH, generator=torch.manual_seed(seed), dtype=torch.float64)
        for layer in range(LAYERS):
            cache.write(layer, numbers[layer, 0], numbers[layer, 1])
        cache.commit(list(range(columns)))
        return cache

    def check(self, caches: list[Paged], rows: list[int], seed: int) -> float:
        """Run one forward recorded and unrecorded; return how far logits, heads and written rows differ at most."""
        tokens = torch.randint(1, 99, (len(caches), max(rows)), generator=torch.manual_seed(seed)).double()
        lanes: list[KvCache] = [*caches]
        for cache, count in zip(caches, rows, strict=True):
            cache.open(count)
        batch = BatchCache(lanes, rows, 3e4)
        masks = [causal_rows(cache.length, count) for cache, count in zip(caches, rows, strict=True)]
        inputs: Inputs = {"input_ids": tokens, "attention_mask": batch.masks(0, masks)}
        outputs = self.graphs.run(forward, inputs, batch, attend)
        assert not isinstance(outputs, str), outputs
        written = [cache.block(layer) for cache in caches for layer in range(LAYERS)]
        heads: list[Tensor] = []

        def watch_attention(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
            heads.append(attend(query, columns, scaling))
            return heads[-1]

        logits = forward(inputs, batch, watch_attention)
        again = [cache.block(layer) for cache in caches for layer in range(LAYERS)]
        pairs = [(outputs[0], logits), *zip(outputs[1], heads, strict=True)]
        pairs += [both for old, new in zip(written, again, strict=True) for both in zip(old, new, strict=True)]
        assert not any(actual.isnan().any() for actual, _ in pairs)
        return max(float((actual - expected).abs().max()) for actual, expected in pairs)


def causal_rows(length: int, rows: int) -> Tensor:
    return torch.ones(rows, length + rows, dtype=torch.bool).tril(length)


def test_one_recording_serves_steps_within_a_rounded_number_of_pages() -> None:
    room = Room(exact=False)
    cache = room.cache(17, 1)
    for step in range(5):  # columns 20 to 32, over two borders of pages; five to eight pages are read as eight
        assert room.check([cache], [3], step) < 1e-12
        cache.commit([0, 2, 1])
    assert len(room.graphs.recordings) == 1
    assert room.check([cache], [3], 9) < 1e-12
    assert len(room.graphs.recordings) == 2


def test_where_bits_are_promised_exactly_the_columns_are_read() -> None:
    room = Room(exact=True)
    for seed in range(3):  # three requests of the same lengths, in other pages
        cache = room.cache(6, seed)
        for step in range(3):
            assert room.check([cache], [3], step) == 0.0
            cache.commit([0, 2])
        if seed:
            room.cache(5, 7)
            cache.release()
    assert len(room.graphs.recordings) == 3


@pytest.mark.parametrize("exact", [False, True])
def test_lanes_of_other_requests_and_pages_share_the_recording(exact: bool) -> None:
    room = Room(exact)
    first, second, third = room.cache(9, 1), room.cache(6, 2), room.cache(9, 3)
    bound = 0.0 if exact else 1e-12
    assert room.check([first, second], [3, 2], 1) <= bound
    for cache in (first, second):
        cache.commit([])
    assert room.check([third, second], [3, 2], 2) <= bound
    assert len(room.graphs.recordings) == 1


def test_a_request_that_was_evicted_and_restored_reads_its_new_pages() -> None:
    room = Room(exact=False)
    cache = room.cache(10, 1)
    assert room.check([cache], [3], 1) < 1e-12
    old = list(cache.blocks.table)
    cache.release()
    other_cache = room.cache(13, 5)
    room.pool.fill(old, float("nan"))
    again = room.cache(10, 1)
    assert set(again.blocks.table).isdisjoint(old)
    assert room.check([again], [3], 2) < 1e-12
    assert len(room.graphs.recordings) == 1
    assert other_cache.length == 13


def test_a_recording_goes_with_its_pool() -> None:
    room = Room(exact=False)
    room.check([room.cache(5, 1)], [2], 1)
    graphs = room.graphs
    assert len(graphs.recordings) == 1
    del room
    assert not graphs.recordings


@pytest.mark.parametrize("kind", ["static", "paged"])
def test_lanes_padded_on_the_left_are_not_recorded(kind: str) -> None:
    case = replace(CASE, layout=KvLayout(kind=kind, page_size=4 if kind == "paged" else 0, left_pad=1))
    trace = run(case, recorder := OperatorGraphs())
    assert_same_output(trace, open_cpu().run(case))
    (why,) = trace.fallbacks
    assert "without left padding" in why
    assert recorder.recorded == 0


@pytest.mark.parametrize("poison", first(["nan", "others", ""], 1))
def test_an_engine_in_pages_runs_recorded(poison: str) -> None:
    paged = replace(CASE, layout=KvLayout(kind="paged", page_size=4, poison=poison))
    trace = run(paged, OperatorGraphs())
    assert_same_output(trace, open_cpu().run(paged))
    assert trace.fallbacks == {}
    prefix = replace(CASE, layout=KvLayout(kind="prefix", page_size=4, poison=poison))
    trace = run(prefix, recorder := OperatorGraphs())
    assert trace.output == open_cpu().run(prefix).output
    assert trace.fallbacks == {}
    assert 0 < recorder.recorded < recorder.replayed
