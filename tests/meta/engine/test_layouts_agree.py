"""One case under every KV layout: the same tokens, the same bits where the same operations ran, else within the bound.

The table is in `docs/explanation/layouts.md`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from specverify.backends.compositions import open_cpu
from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.kv.contiguous import Scratch
from specverify.backends.engine.kv.seams import KvSeams
from specverify.properties.strategies.cases import single_cases
from specverify.properties.strategies.models import GALLERY
from specverify.properties.tolerance.closeness import noise, rows_beyond
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Draft, LanguageModel, Ngram, Scripted
from specverify.reference.layout import KvLayout
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Array, Trace
from specverify.reference.tree import RankTree, Tree
from specverify.setup.subjects import subject_of
from tests.tiers import each, first

SAME_BITS = {
    "branch by path": KvLayout(),
    "branch, fast": KvLayout(commit="fast"),
    "branch by length": KvLayout(commit="length"),
    "overwrite": KvLayout(kind="overwrite"),
    "scratch": KvLayout(kind="scratch"),
    "pages of 1": KvLayout(kind="paged", page_size=1, overhang=3),
    "pages of 5": KvLayout(kind="paged", page_size=5),
    "pages of 128": KvLayout(kind="paged", page_size=128),
    "prefix, cold": KvLayout(kind="prefix", page_size=4),
}
"""Attention reads the same columns in the same order, whatever they lie in."""

OTHER_SHAPES = {"static": KvLayout(kind="static"), "sliding": KvLayout(kind="sliding")}
"""Attention reads more columns (static), or fewer, and the prefill runs in other pieces (sliding)."""

TREE = Tree((0, 3, 0, 0, 1, 2), (1, 2, 0, 2, 2, 1))
BACKEND = open_cpu()
ORACLE = Oracle()
SUBJECT = subject_of(BACKEND)


def under(case: Case, layout: KvLayout) -> Case:
    """`case` in another layout; what is not where keys and values lie stays as it is."""
    old = case.layout
    return replace(
        case,
        layout=replace(
            layout,
            padded_nodes=old.padded_nodes,
            prefill_chunk=old.prefill_chunk,
            draft_sync=old.draft_sync,
            stay_in_chunk=old.stay_in_chunk,
            poison=old.poison,
        ),
    )


def arrays(trace: Trace) -> Iterator[tuple[str, Array]]:
    """What a run reveals of its numbers, kind by kind, step by step."""
    for step in trace.steps:
        assert step.scored is not None
        assert step.committed is not None
        assert step.committed.after is not None
        yield "logits", step.scored.logits
        yield "keys", step.committed.after.keys
        yield "values", step.committed.after.values
        if step.committed.draft is not None:
            yield "draft", step.committed.draft.keys


def differences(trace: Trace, twin_trace: Trace) -> int:
    """Arrays that do not agree bit for bit."""
    pairs = list(zip(arrays(trace), arrays(twin_trace), strict=True))
    return sum(not np.array_equal(array, other_array, equal_nan=True) for (_, array), (_, other_array) in pairs)


def too_far(case: Case, trace: Trace, twin_trace: Trace) -> list[str]:
    """Kinds of arrays that lie farther apart than two runs of this backend may."""
    allowed = noise(case, ORACLE, SUBJECT)
    far_kinds = []
    for (kind, array), (_, other_array) in zip(arrays(trace), arrays(twin_trace), strict=True):
        assert array.shape == other_array.shape
        if kind == "logits" and list(rows_beyond(array, other_array, allowed.logits_limit(pair=True))):
            far_kinds.append(kind)
        for layer in range(len(array) if kind in ("keys", "values") else 0):
            # A ring no longer holds all columns.
            column_mask = ~np.isnan(array[layer]) & ~np.isnan(other_array[layer])
            a, b = (np.where(column_mask, side[layer], 0.0) for side in (array, other_array))
            if list(rows_beyond(a, b, allowed.inner_limit(kind, layer))):
                far_kinds.append(kind)
    return far_kinds


def hold_to_each_other(case: Case) -> None:
    first = BACKEND.run(under(case, KvLayout()))
    for name, layout in SAME_BITS.items():
        trace = BACKEND.run(under(case, layout))
        assert (trace.output, trace.finish) == (first.output, first.finish), name
        assert differences(first, trace) == 0, name
    for name, layout in OTHER_SHAPES.items():
        trace = BACKEND.run(under(case, layout))
        assert (trace.output, trace.finish) == (first.output, first.finish), name
        assert not too_far(case, first, trace), name
        if name == "sliding" and not _short_sighted(case):
            assert differences(first, trace) == 0, "without a window or chunks, a ring is a plain buffer"


def _short_sighted(case: Case) -> bool:
    """Whether a layer of the target or its draft sees only so far back."""
    models = [case.model, *([case.draft.model] if isinstance(case.draft, LanguageModel) else [])]
    every = [model.architecture for model in models if isinstance(model, Seeded)]
    return any(any((*arch.windows, *arch.chunks)) for arch in every)


@pytest.mark.parametrize("number", first(range(4), 1))
def test_drawn_cases(number: int) -> None:
    @seed(40 + number)
    @settings(max_examples=8, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(single_cases(("float32", "float64"), (), "branch"), st.sampled_from(("", "large")))
    def run(case: Case, poison: str) -> None:
        hold_to_each_other(replace(case, layout=replace(case.layout, poison=poison)))

    run()


WINDOWED = next(arch for arch in GALLERY if any(arch.windows))
DRAFTS: dict[str, Callable[[Architecture], Draft]] = {
    "unordered": lambda arch: Scripted((TREE,)),
    "chain": lambda arch: Scripted(),
    "trie": lambda arch: Ngram(RankTree((0, 0, 0, 1), (0, 0, 1, 0)), 3),
    "model": lambda arch: LanguageModel(Seeded(arch, 9), RankTree((0, 0, 0, 1, 2), (0, 0, 1, 0, 0))),
    "itself": lambda arch: LanguageModel(Seeded(arch, 5), RankTree((0, 0, 1), (0, 0, 0))),
}


@pytest.mark.parametrize(("kind", "dtype", "windowed"), each(product(DRAFTS, ("float32", "float64"), (True, False)), 3))
def test_cases_made_by_hand(kind: str, dtype: str, windowed: bool) -> None:
    """Long enough that every ring turns; a draft that is the target accepts every row and shares its blocks."""
    arch = WINDOWED if windowed else GALLERY[0]
    prompt = (*[(3 * index) % arch.vocab_size for index in range(9)], 1)
    for sync, chunk in (("keep", 0), ("refeed", 4)):
        layout = KvLayout(draft_sync=sync, prefill_chunk=chunk, padded_nodes=7)
        case = Case(Seeded(arch, 5), prompt, DRAFTS[kind](arch), layout, stops=Stops(max_new_tokens=8), dtype=dtype)
        hold_to_each_other(case)


LONG = Case(Seeded(GALLERY[0], 5), (1, 2, 3, 0, 1), Scripted(), stops=Stops(max_new_tokens=12))


class Nudged(Scratch):
    """A commit that rounds what it copies."""

    factor = 1 + 2.0**-22

    def commit(self, path: list[int]) -> str | None:
        for keys, _ in self.scratch:
            keys *= self.factor
        return super().commit(path)


class Far(Nudged):
    factor = 1 + 2.0**-10


def _with(scratch: type[Scratch]) -> EngineBackend:
    backend = open_cpu()
    backend.seams = replace(backend.seams, kv=KvSeams(scratch=scratch))
    return backend


def test_the_comparison_sees_one_bit_and_the_bound_sees_more() -> None:
    """And static does differ in bits, so that the second group is no idle allowance."""
    num_differences = 0
    for arch in GALLERY[:8]:
        case = replace(LONG, model=Seeded(arch, 5), prompt=(1, 0, 1))
        num_differences += differences(BACKEND.run(case), BACKEND.run(under(case, KvLayout(kind="static"))))
    assert num_differences
    first = BACKEND.run(LONG)
    case = under(LONG, KvLayout(kind="scratch"))
    assert differences(first, BACKEND.run(case)) == 0
    nudged = _with(Nudged).run(case)
    assert differences(first, nudged)
    assert not too_far(LONG, first, nudged)
    assert too_far(LONG, first, _with(Far).run(case))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("arch", [GALLERY[0], WINDOWED])
def test_a_warm_prefix_is_a_cold_one(dtype: str, arch: Any) -> None:
    """A request whose prompt is known skips the prefill of whole pages: other shapes, so within the bound."""
    prompt = tuple((3 * index) % arch.vocab_size for index in range(12))
    draft = LanguageModel(Seeded(arch, 9), RankTree((0, 0, 0, 1), (0, 0, 1, 0)))
    case = Case(Seeded(arch, 5), prompt, draft, stops=Stops(max_new_tokens=9), dtype=dtype)
    alone = BACKEND.run(case)
    steps = (Action("step", (0,)),) * 9
    again = Session(
        (Mate(prompt, draft, stops=case.stops),),
        (Action("add", (0,)), *steps, Action("add", (1,)), *(Action("step", (1,)),) * 9),
    )
    layout = KvLayout(kind="prefix", page_size=4, poison="large")
    shared = BACKEND.run(replace(case, layout=layout, session=again)).shared
    assert shared is not None
    cold, warm = shared.requests
    assert cold is not None
    assert warm is not None
    assert cold.output == warm.output == alone.output
    assert differences(alone, cold) == 0
    assert not too_far(case, alone, warm)
    reused = [account for account in shared.accounts if 1 in account.committed]
    assert reused[0].tables[1][:2] == shared.accounts[0].tables[0][:2], "two pages came from the first request"


def test_lanes_of_a_batch_neither_read_nor_write_padding() -> None:
    """Requests of unequal trees and lengths in one forward, each as alone, whatever lies in the padding."""
    arch = WINDOWED
    mates = (
        Mate((1,), Scripted((Tree((0,), (1,)),))),
        Mate(tuple(index % arch.vocab_size for index in range(17)), Ngram(RankTree((0, 0, 0, 1), (0, 0, 1, 0)), 2)),
        Mate((2, 1), Scripted((Tree((0, 0, 1, 2, 3, 4, 5, 6), (1, 2, 0, 1, 2, 0, 1, 2)),))),
    )
    everyone = (2, 0, 3, 1)
    actions = (*(Action("add", (request,)) for request in everyone), *(Action("step", everyone),) * 4)
    for kind in ("branch", "overwrite", "scratch", "static", "sliding", "paged"):
        for poison in ("", "large"):
            layout = KvLayout(kind=kind, poison=poison, page_size=3 * (kind == "paged"))
            case = Case(
                Seeded(arch, 5), (0, 1), Scripted(), layout,
                stops=Stops(max_new_tokens=6), dtype="float64", session=Session(mates, actions),
            )  # fmt: skip
            shared = BACKEND.run(case).shared
            assert shared is not None
            for number, trace in enumerate(shared.requests):
                lone_case = case.alone(number)
                alone = BACKEND.run(replace(lone_case, steps=4))
                assert trace is not None
                assert trace.output == alone.output
                assert not too_far(lone_case, alone, trace), (kind, poison, number)
