"""Rows of padding without a finite number: they reach no other row, in any layout or family, and faults let them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specverify.backends.compositions import open_engine
from specverify.backends.engine.kv.base import CacheSpec
from specverify.backends.engine.kv.contiguous import Static
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.reach import Reach
from specverify.backends.registry import open_backend
from specverify.properties.invariants import ALL
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.layout import KINDS, KvLayout
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Trace
from specverify.reference.tree import RankTree, Tree
from specverify.setup.subjects import open_planted, subject_of

TREE = Scripted((Tree((0, 0, 0, 1), (0, 3, 1, 2)),))
FAMILIES = {arch.family: arch for arch in GALLERY if arch.vocab_size > 4}
PLAIN = FAMILIES["llama"]


def batch(arch: Architecture, layout: KvLayout) -> Case:
    """Two requests of unequal trees in one forward, both padded: one with a script, one with a draft model."""
    drafted = LanguageModel(Seeded(PLAIN if arch.vocab_size == PLAIN.vocab_size else arch, 2), RankTree((0, 0), (0, 0)))
    mates = (Mate((3, 1), drafted, stops=Stops(4)),)
    steps = (Action("step", (0, 1)), Action("step", (1, 0)), Action("step", (0, 1), bare=(1,)))
    session = Session(mates, (Action("add", (0,)), Action("add", (1,)), *steps))
    return Case(Seeded(arch, 1), (2, 1, 3, 0), TREE, layout, stops=Stops(4), dtype="float64", session=session)


def numbers(trace: Trace) -> list[np.ndarray]:
    """The logits and the outputs of attention of every step of every request."""
    assert trace.shared is not None
    runs = [run for run in trace.shared.requests if run is not None]
    stages = [stage for run in runs for step in run.steps for stage in (step.scored, step.attended)]
    assert all(stage is not None for stage in stages)
    return [stage.logits if hasattr(stage, "logits") else stage.output for stage in stages]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_padding_reaches_no_other_row_in_any_layout(kind: str) -> None:
    plain = KvLayout(kind=kind, page_size=2 if KINDS[kind].pages else 0, padded_nodes=7)
    engine = open_engine("cpu-eager")
    for layout in (plain, replace(plain, left_pad=2)):
        right, spoiled = (numbers(engine.run(batch(PLAIN, replace(layout, poison=value)))) for value in ("", "nan"))
        assert len(right) == len(spoiled) >= 8
        assert all(np.array_equal(*pair) for pair in zip(right, spoiled, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_reaches_no_other_row_in_any_family(family: str) -> None:
    layout = KvLayout(kind="static", padded_nodes=5)
    engine = open_engine("cpu-eager")
    right, spoiled = (
        numbers(engine.run(batch(FAMILIES[family], replace(layout, poison=value)))) for value in ("", "nan")
    )
    assert all(np.isfinite(part).all() for part in spoiled)
    assert all(np.abs(first - second).max() < 1e-9 for first, second in zip(right, spoiled, strict=True))


@pytest.mark.parametrize("context", [15, 16])
def test_padding_reaches_no_other_row_in_bfloat16(context: int) -> None:
    # An odd number of columns: a row of weights is multiplied together with the number behind it.
    prompt = (*(token % PLAIN.vocab_size for token in range(context)), 0)
    layout = KvLayout(kind="static", padded_nodes=24, poison="nan")
    case = Case(Seeded(PLAIN, 1), prompt, TREE, layout, stops=Stops(3), dtype="bfloat16")
    steps = open_engine("cpu-eager").run(case).steps
    assert all(np.isfinite(step.scored.logits).all() for step in steps if step.scored is not None)


def test_columns_of_padding_are_zero() -> None:
    cache = Static(CacheSpec((Reach(),), 1, 2, 6, 3, torch.device("cpu"), torch.float32))
    cache.open(2)
    lanes = BatchCache([cache], [2])
    rows = torch.full((1, 1, 2, 2), torch.nan)
    rows[:, :, 0] = 1.0
    lanes.filled = [1]
    keys, values = lanes.update(rows, rows, 0)
    assert keys[0, 0, :2].tolist() == values[0, 0, :2].tolist() == [[1.0, 1.0], [0.0, 0.0]]
    lanes.filled = None
    assert lanes.update(rows, rows, 0)[0][0, 0, 1].isnan().all()


FAULTS = (
    "values-of-padding-under-mask", "scale-over-padded-batch", "tile-scale-zero-of-padding",
    "warp-maximum-over-two-rows",
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_lets_padding_out_is_found(fault: str) -> None:
    case = Case(Seeded(PLAIN, 1), (2, 0), TREE, KvLayout(padded_nodes=5, poison="nan"), stops=Stops(2), dtype="float64")
    verdict = judge(case, ALL, Oracle(), subject_of(open_planted("cpu-eager", fault)))
    assert verdict.findings
    assert not judge(case, ALL, Oracle(), subject_of(open_backend("cpu-eager"))).findings
    finite = replace(case, layout=replace(case.layout, poison=""))
    turns = tuple(invariant for invariant in ALL if invariant.name != "cache.stale-unreachable")
    assert not judge(finite, turns, Oracle(), subject_of(open_planted("cpu-eager", fault))).findings
