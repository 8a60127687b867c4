"""Batches that are padded on the left: no number depends on the dead columns, and what reads them is found."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specverify.backends.compositions import open_engine
from specverify.backends.engine.kv.base import CacheSpec
from specverify.backends.engine.kv.contiguous import Static
from specverify.backends.engine.kv.lanes import DEAD, LeftPadded, with_front
from specverify.backends.engine.reach import Reach
from specverify.properties.strategies.models import GALLERY
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.layout import KINDS, KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Trace
from specverify.reference.tree import RankTree, Tree

TREE = Scripted((Tree((0, 0, 0, 1), (0, 3, 1, 2)),))
WINDOWED = next(arch for arch in GALLERY if any(arch.windows) and arch.vocab_size > 8 and not arch.recurrent)


def batch(layout: KvLayout, arch: Architecture = WINDOWED) -> Case:
    """Requests of unequal length in one forward: one with a tree of a script, one with a model's."""
    drafted = LanguageModel(Seeded(arch, 2), RankTree((0, 0, 1), (0, 1, 0)))
    mates = (Mate((3, 1), drafted, stops=Stops(5)), Mate((4,), stops=Stops(5)))
    steps = (Action("step", (0, 1)), Action("step", (1, 2, 0)), Action("step", (2, 1)), Action("step", (0, 1, 2)))
    session = Session(mates, (*[Action("add", (request,)) for request in range(3)], *steps))
    prompt = (2, 1, 1, 3, 1, 2, 4, 0)
    return Case(Seeded(arch, 1), prompt, TREE, layout, stops=Stops(5), dtype="float64", session=session)


def compare_traces(trace: Trace, twin_trace: Trace) -> int:
    assert trace.shared is not None
    assert twin_trace.shared is not None
    num_steps = 0
    for request, twin_request in zip(trace.shared.requests, twin_trace.shared.requests, strict=True):
        assert request is not None
        assert twin_request is not None
        assert request.output == twin_request.output
        for step, twin_step in zip(request.steps, twin_request.steps, strict=True):
            assert step.scored is not None
            assert twin_step.scored is not None
            assert np.abs(step.scored.logits - twin_step.scored.logits).max() < 1e-9
            num_steps += 1
    return num_steps


@pytest.mark.parametrize("front", [1, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_dead_columns_change_no_number_in_any_layout(kind: str, front: int) -> None:
    plain = KvLayout(kind=kind, page_size=2 if KINDS[kind].pages else 0, prefill_chunk=3)
    case = batch(plain)
    engine = open_engine("cpu-eager")
    assert compare_traces(engine.run(case), engine.run(replace(case, layout=replace(plain, left_pad=front)))) >= 8


def test_lanes_end_at_one_column_behind_closed_dead_ones() -> None:
    room = CacheSpec((Reach(),), 1, 2, 6, 3, torch.device("cpu"), torch.float32)
    caches = [Static(room), Static(replace(room, capacity=4))]
    for cache in caches:
        cache.open(1)
    lanes = with_front(LeftPadded, 2)(list(caches), [1, 1])
    rows = torch.ones(2, 1, 1, 2)
    keys, _ = lanes.update(rows, rows, 0)
    assert keys.shape == (2, 1, 8, 2)
    assert (keys[0, :, :2] == DEAD).all()
    assert (keys[1, :, :4] == DEAD).all()
    assert (keys[1, :, 4] == 1).all()
    mask = lanes.masks(0, [torch.ones(1, 1, dtype=torch.bool)] * 2)
    assert mask[:, 0, 0].int().tolist() == [[0, 0, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0, 0]]
    assert with_front(LeftPadded, 2) is type(lanes)


def test_a_negative_number_is_refused_and_an_engine_without_it_declines() -> None:
    with pytest.raises(Malformed, match="left_pad: -1 is negative"):
        KvLayout(left_pad=-1)
    case = Case(Seeded(WINDOWED, 1), (1, 0), layout=KvLayout(left_pad=1), dtype="float64")
    able = Abilities(dtypes=("float64",), drafts=("scripted",))
    assert able.outside(case) is None
    assert replace(able, layout_settings=()).outside(case) == "KV layout with left_pad"
    assert "left_pad" not in open_engine("cpu-split").declaration.layout_settings
