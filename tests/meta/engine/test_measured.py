"""Attention whose way is chosen by measured times: the choice, its bits, its refusals, and its faults."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specverify.backends import faults
from specverify.backends.base import Unavailable, Unsupported, WrongFlag
from specverify.backends.compositions import open_engine
from specverify.backends.engine.attention.gathered import gather_columns
from specverify.backends.engine.attention.measured.choosing import DRAWN, MeasuredAttention, measured_attention
from specverify.backends.engine.attention.measured.table import (
    Shape,
    Sizes,
    device_name,
    nearest,
    nearest_width_scene,
    read_table,
    table_of,
)
from specverify.backends.engine.attention.measured.ways import ON_CPU, ways_on
from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.columns import AttentionInputs, Paging
from specverify.backends.faults.attention import measured_ways
from specverify.backends.faults.fault import faults_in
from specverify.backends.flags import ATTENTION_TABLE
from specverify.properties.strategies.models import GALLERY
from specverify.properties.tally import Tally, nothing_fused
from specverify.reference.architecture import Seeded
from specverify.reference.case import DTYPES, Case
from specverify.reference.draft import Scripted
from specverify.reference.layout import KINDS, KvLayout
from specverify.reference.sampling import Stops
from specverify.reference.trace import CHOSEN
from specverify.reference.tree import Tree
from specverify.reports.counts import fallback_counts, way_rows

FORK = Tree((0, 0, 0, 1, 1), (6, 1, 2, 3, 1))
MODEL = Seeded(next(arch for arch in GALLERY if arch.layers > 1 and arch.vocab_size > 16), 0)


def table(*shapes: dict[str, Any], device: str | None = None, kind: str = "cpu") -> dict[str, Any]:
    return {
        "attention_table": 1, "kind": kind, "device": device or device_name("cpu"), "threads": 1,
        "versions": {"specverify": "1", "torch": "2"}, "repetitions": 1, "absent": {}, "shapes": [*shapes],
    }  # fmt: skip


def shape(model: Seeded, *scenes: tuple[int, int, int, dict[str, float]], dtype: str = "float32") -> dict[str, Any]:
    arch = model.architecture
    listed = [{"batch": batch, "prefix": prefix, "nodes": nodes, "us": us} for batch, prefix, nodes, us in scenes]
    return {"dtype": dtype, "heads": arch.heads, "kv_heads": arch.kv_heads, "head_dim": arch.head_dim, "scenes": listed}


def backend_with_table(monkeypatch: pytest.MonkeyPatch, folder: Path, content: dict[str, Any]) -> EngineBackend:
    (folder / "table.json").write_text(json.dumps(content))
    monkeypatch.setenv(ATTENTION_TABLE, str(folder / "table.json"))
    return open_engine("cpu-measured")


def case_of(kind: str = "branch", model: Seeded = MODEL) -> Case:
    layout = KvLayout(kind=kind, page_size=2 if KINDS[kind].pages else 0)
    return Case(model, (3, 1, 2, 2, 1, 2, 6), Scripted((FORK,)), layout, stops=Stops(6))


def ways_of(case: Case, backend: EngineBackend) -> dict[str, int]:
    fallbacks = backend.run(case).fallbacks
    return {why[len(CHOSEN) :]: count for why, count in fallbacks.items() if why.startswith(CHOSEN)}


def inputs(batch: int, prefix: int, rows: int, paged: bool, messages: list[str]) -> tuple[Tensor, AttentionInputs]:
    """A call with random numbers, 4 query heads on 2 KV heads of 8, its columns gathered or in pages of 3."""
    generator = torch.Generator().manual_seed(batch * 1000 + prefix)
    width, size = prefix + rows, 3
    count = -(-width // size)
    query = torch.randn(batch, 4, rows, 8, generator=generator)
    keys, values = (torch.randn(batch * count, size, 2, 8, generator=generator) for _ in range(2))
    order = torch.randperm(batch * count, generator=generator).int().view(batch, count)
    lengths = torch.full((batch,), width, dtype=torch.int32)
    causal = torch.ones(rows, width, dtype=torch.bool).tril(prefix).expand(batch, 1, rows, width).contiguous()
    row_keys, row_values = (torch.randn(batch, 2, rows, 8, generator=generator) for _ in range(2))
    ends = torch.full((batch,), prefix, dtype=torch.int32)
    paging = Paging(keys, values, order, lengths)
    columns = AttentionInputs(row_keys, row_values, causal, ends, paging, messages.append)
    return query, columns if paged else replace(gather_columns(columns), paging=None)


@pytest.mark.parametrize("way", ON_CPU)
@pytest.mark.parametrize("paged", [False, True])
def test_the_chosen_way_gives_its_own_bits(way: str, paged: bool) -> None:
    scenes = [
        (batch, prefix, 4, {name: 2.0 - (name == way) for name in ON_CPU}) for batch in (1, 3) for prefix in (2, 9)
    ]
    shape_fields = {"dtype": "float32", "heads": 4, "kv_heads": 2, "head_dim": 8}
    listed = [{"batch": batch, "prefix": prefix, "nodes": nodes, "us": us} for batch, prefix, nodes, us in scenes]
    attend = MeasuredAttention(table_of(table({**shape_fields, "scenes": listed})), ways_on("cpu"))
    alone = next(choice for choice in ways_on("cpu") if choice.name == way)
    for batch, prefix in ((1, 2), (3, 9)):
        messages: list[str] = []
        query, columns = inputs(batch, prefix, 4, paged, messages)
        right = alone.attend(query, columns if alone.in_pages else gather_columns(columns), 0.3)
        assert attend(query, columns, 0.3).numpy().tobytes() == right.numpy().tobytes()
        assert messages[-1] == f"{CHOSEN}{way}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("way", "twin"), [("eager", "cpu-eager"), ("sdpa", "cpu-fused"), ("split", "cpu-split")])
def test_a_run_by_one_way_agrees_with_its_backend(
    kind: str, way: str, twin: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = case_of(kind)
    backend = backend_with_table(monkeypatch, tmp_path, table(shape(MODEL, (1, 4, 4, {way: 1.0}))))
    trace, twin_trace = backend.run(case), open_engine(twin).run(case)
    assert trace.output == twin_trace.output
    assert trace.fallbacks[f"{CHOSEN}{way}"] == trace.attention_calls
    assert not fallback_counts(trace.fallbacks)
    for step, twin_step in zip(trace.steps, twin_trace.steps, strict=True):
        assert step.scored is not None
        assert twin_step.scored is not None
        if KINDS[kind].pages and way != "split":
            # Gathered from pages, columns have other strides than stacked ones.
            np.testing.assert_allclose(step.scored.logits, twin_step.scored.logits, atol=1e-4, rtol=1e-4)
        else:
            assert step.scored.logits.tobytes() == twin_step.scored.logits.tobytes()


def test_the_way_follows_the_sizes_of_each_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scenes = ((1, 0, 7, {"sdpa": 1.0, "eager": 2.0}), (1, 7, 5, {"split": 1.0, "sdpa": 2.0}))
    backend = backend_with_table(monkeypatch, tmp_path, table(shape(MODEL, *scenes)))
    trace = backend.run(case_of())
    layers = MODEL.architecture.layers
    # The prompt's prefill is near to the first scene; every tree is near to the second.
    assert trace.fallbacks == {
        f"{CHOSEN}sdpa": layers,
        f"{CHOSEN}split": trace.attention_calls - layers,
    }


def test_a_way_that_does_not_take_the_inputs_is_left_to_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for sort, lacking in (("sinks", "sinks"), ("cap", "soft caps")):
        model = next(
            Seeded(arch, 0) for arch in GALLERY if (arch.family == "gpt_oss" if sort == "sinks" else arch.score_cap)
        )
        backend = backend_with_table(monkeypatch, tmp_path, table(shape(model, (1, 4, 4, {"sdpa": 1.0, "eager": 2.0}))))
        trace = backend.run(case_of(model=model))
        calls = trace.attention_calls
        reason = f"sdpa, the fastest measured way, takes no {lacking}: the next fastest ran"
        assert trace.fallbacks == {reason: calls, f"{CHOSEN}eager": calls}
        alone = backend_with_table(monkeypatch, tmp_path, table(shape(model, (1, 4, 4, {"sdpa": 1.0})))).run(
            case_of(model=model)
        )
        assert alone.fallbacks["no measured way takes these inputs: written-out attention ran"] == calls
        assert alone.output == trace.output


def test_every_drawn_model_was_measured() -> None:
    drawn_table = read_table(DRAWN)
    assert drawn_table.kind == "cpu"
    for dtype in DTYPES:
        for arch in GALLERY:
            assert Shape(dtype, arch.heads, arch.kv_heads, arch.head_dim) in drawn_table.shapes
    firsts = {scene.fastest_first[0] for scenes in drawn_table.shapes.values() for scene in scenes}
    assert len(firsts) > 1, "a table in which one way is always the fastest would judge no choice"


def test_a_target_that_was_not_measured_is_declined_and_its_draft_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backend = backend_with_table(monkeypatch, tmp_path, table(shape(MODEL, (1, 4, 4, {"sdpa": 1.0}), dtype="float64")))
    with pytest.raises(Unsupported, match=r"the table of attention times has none for float32, .* bench attention"):
        backend.run(case_of())
    messages: list[str] = []
    query, columns = inputs(1, 2, 4, True, messages)
    lenient = backend.seams.draft_attend
    assert torch.equal(lenient(query, columns, 0.3), measured_attention("cpu", None).eager(query, columns, 0.3))
    assert messages == ["no attention times for float32, 4 heads on 2 KV of 8: written-out attention ran"]


def test_the_shipped_table_takes_drawn_heads_of_any_width() -> None:
    drawn_table = read_table(DRAWN)
    for heads, kv_heads, width, measured_width in ((2, 1, 100, 16), (2, 1, 5, 6), (4, 2, 7, 8)):
        scene = nearest_width_scene(drawn_table, Shape("float32", heads, kv_heads, width), Sizes(1, 8, 1))
        assert scene is not None
        assert scene is nearest(drawn_table, Shape("float32", heads, kv_heads, measured_width), Sizes(1, 8, 1))
    assert nearest_width_scene(drawn_table, Shape("float32", 9, 3, 64), Sizes(1, 8, 1)) is None
    assert measured_attention("cpu", None).nearest is nearest_width_scene


Change = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda content: {**content, "device": "another processor"},
            "measured on cpu, another processor, and this is cpu",
        ),
        (lambda content: {**content, "kind": "cuda"}, "measured on cuda, "),
        (lambda content: {**content, "threads": 0}, "threads: 0 is less than the minimum of 1"),
        (
            lambda content: {**content, "shapes": [shape(MODEL, (1, 4, 4, {"triton": 1.0}))]},
            "triton is no way of attention on cpu",
        ),
    ],
)
def test_a_table_of_another_device_is_refused(
    change: Change, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backend_with_table(monkeypatch, tmp_path, table(shape(MODEL, (1, 4, 4, {"sdpa": 1.0}))))
    with pytest.raises(WrongFlag) as error:
        backend_with_table(monkeypatch, tmp_path, change(table(shape(MODEL, (1, 4, 4, {"sdpa": 1.0})))))
    assert f"{ATTENTION_TABLE}={tmp_path / 'table.json'}: {why}" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_gpu_has_no_shipped_table() -> None:
    with pytest.raises(Unavailable, match=f"{ATTENTION_TABLE} is not set: on cuda attention is chosen by a table"):
        measured_attention("cuda", None)


def test_choices_are_told_apart_from_fallbacks() -> None:
    counts = {f"{CHOSEN}sdpa": 3, f"{CHOSEN}eager": 5, "sdpa takes no sinks": 2}
    assert way_rows(counts) == [("ways", "chosen by measured times, with the calls of each: eager 5, sdpa 3")]
    assert fallback_counts(counts) == [("sdpa takes no sinks", 2)]
    assert way_rows({"sdpa takes no sinks": 2}) == []
    tally = Tally("cpu-measured", attention_calls=8)
    tally.fallbacks.update(counts)
    assert nothing_fused(tally) is None
    tally.fallbacks.clear()
    tally.fallbacks["no attention times"] = 8
    assert nothing_fused(tally) is not None


@pytest.mark.parametrize("fault", faults_in(measured_ways), ids=lambda fault: fault.name)
def test_a_fault_needs_attention_that_chooses(fault: faults.fault.Fault) -> None:
    with pytest.raises(Unsupported, match="plant it in cpu-measured"):
        faults.plant(open_engine("cpu-eager"), fault)
