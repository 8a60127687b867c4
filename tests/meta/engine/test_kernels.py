"""Every attention of the engine against the softmax in float64: designed inputs, hidden columns, telling shapes."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from specverify.backends.engine.attention import flex
from specverify.backends.engine.attention.eager import eager
from specverify.backends.engine.attention.flex import STEPWISE, Flex
from specverify.backends.engine.attention.sdpa import Sdpa
from specverify.backends.engine.attention.split import Split
from specverify.backends.engine.columns import Attend
from tests.treeattention import UNIT, Scene, constant, hidden_changed, scene

ATTENDS: dict[str, Attend] = {"eager": eager, "sdpa": Sdpa(), "flex": Flex(), "split": Split()}
PAGED = ("split",)
"""Those that read pages where they lie; Triton's kernel has tests of its own under the interpreter."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

ROUNDINGS = {torch.float64: 10.0, torch.float32: 10.0, torch.bfloat16: 1.5, torch.float16: 1.5}
"""Largest error admitted, in unit roundoffs of the largest value.

Measured over 30 scenes of each attention (prefix 0 to 2048, 1 to 64 rows, heads 4/2, 4/1, 3/3, head_dim 8 to 64; torch
2.13, one CPU core): float64 3.1, float32 2.7, bfloat16 0.80, float16 0.80 at most.
"""

each = pytest.mark.parametrize("name", ATTENDS)
in_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def run(name: str, drawn_scene: Scene) -> torch.Tensor:
    return ATTENDS[name](drawn_scene.query, drawn_scene.columns, drawn_scene.scaling)


def roundings(name: str, drawn_scene: Scene) -> float:
    """The largest error over rows that are no padding, in unit roundoffs of the largest value."""
    out, truth, (_, values) = run(name, drawn_scene), drawn_scene.truth, drawn_scene.keys
    assert out.dtype == drawn_scene.query.dtype
    assert out.shape == drawn_scene.query.shape
    worst = max(
        float((out[lane, :, :rows].double() - truth[lane, :, :rows]).abs().max())
        for lane, (_, rows) in enumerate(drawn_scene.lanes)
    )
    return worst / (UNIT[out.dtype] * float(values.double().nan_to_num().abs().max()))


@each
@in_each_dtype
def test_equal_scores_give_the_mean_of_the_visible_rows(name: str, dtype: torch.dtype) -> None:
    """Queries and keys of zero, a value of its own in every column: one column more or less moves the mean."""
    for lanes, window in ((((5, 7), (0, 3)), 0), (((40, 20),), 0), (((40, 20),), 7), (((130, 9),), 0)):
        drawn_scene = constant(scene(lanes, dtype=dtype, window=window))
        assert roundings(name, drawn_scene) <= ROUNDINGS[dtype]


@each
@in_each_dtype
def test_one_column_more_or_less_stands_out_of_the_bound(name: str, dtype: torch.dtype) -> None:
    """So that the test above can fail: a mean over 48 columns still moves by more than the bound in 16 bits."""
    drawn_scene = constant(scene(((40, 8),), dtype=dtype))
    for row, column in ((3, 0), (0, 41), (7, 42)):
        visible = drawn_scene.columns.visible.clone()
        visible[0, 0, row, column] = ~visible[0, 0, row, column]
        changed_scene = replace(drawn_scene, columns=replace(drawn_scene.columns, visible=visible))
        moved = float((run(name, changed_scene)[0, :, row].double() - drawn_scene.truth[0, :, row]).abs().max())
        _, values = drawn_scene.keys
        assert moved > ROUNDINGS[dtype] * UNIT[dtype] * float(values.double().abs().max()), (row, column)


@each
@in_each_dtype
def test_what_is_hidden_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    """Finite garbage, at most 300 so that no product overflows float16, in every column that a row may not see."""
    pages = (0, 5) if name in PAGED else (0,)
    for page, lanes in product(pages, (((9, 24), (5, 3)), ((130, 6),))):
        drawn_scene = scene(lanes, dtype=dtype, page=page)
        base = run(name, drawn_scene)
        assert torch.equal(run(name, drawn_scene), base), "the same input twice must give the same bits"
        for row, by in product((0, 3, 5), (-300.0, 7.0, 300.0)):
            changed = run(name, hidden_changed(drawn_scene, row, by))
            assert torch.equal(changed[0, :, row], base[0, :, row]), (row, by)
            assert not torch.equal(changed[0], base[0])
            assert torch.equal(changed[1:], base[1:])


@pytest.mark.parametrize("name", PAGED)
@in_each_dtype
def test_cells_beyond_the_declared_lengths_are_not_read(name: str, dtype: torch.dtype) -> None:
    """They hold NaN, which no weight of zero hides."""
    for page in (1, 3, 16, 128):
        drawn_scene = scene(((9, 24), (0, 1), (16, 16)), dtype=dtype, page=page)
        _, paging = drawn_scene.columns, drawn_scene.columns.paging
        assert paging is not None
        assert bool(paging.key_cells.isnan().any())
        assert roundings(name, drawn_scene) <= ROUNDINGS[dtype]


@each
def test_a_row_that_sees_nothing_spoils_no_other(name: str) -> None:
    drawn_scene = scene(((4, 5), (3, 2)))
    visible = drawn_scene.columns.visible.clone()
    visible[0, 0, 2] = False
    out, base = (
        run(name, replace(drawn_scene, columns=replace(drawn_scene.columns, visible=visible))),
        run(name, drawn_scene),
    )
    other_rows = [0, 1, 3, 4]
    assert torch.equal(out[0, :, other_rows], base[0, :, other_rows])
    assert torch.equal(out[1], base[1])
    if name == "eager":  # what others are compared with says it loudest
        assert bool(out[0, :, 2].isnan().all())
    else:
        assert torch.equal(out[0, :, 2], torch.zeros_like(out[0, :, 2]))


def sweep(every: int = 1) -> Iterator[Scene]:
    """Shapes that past faults ask for: 1 to 8 rows, 1 to 4 lanes, lengths around tiles and pages, and any grouping."""
    edges = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
    heads = ((1, 1, 4), (4, 2, 6), (6, 3, 8), (4, 1, 64))
    for number, (rows, lanes, total) in enumerate(product(range(1, 9), range(1, 5), edges)):
        if number % every == 0 and total >= rows:
            shorter = [(max(0, total - rows - 3 * lane), max(1, rows - lane)) for lane in range(lanes)]
            yield scene(tuple(shorter), *heads[number % len(heads)], dtype=DTYPES[number // 3 % 4], seed=number)
    for lanes_of in (((0, 17),), ((100, 33),), ((15, 64), (129, 20)), ((0, 128),)):
        for dtype in DTYPES:
            yield scene(lanes_of, 4, 2, 8, dtype=dtype)


@each
def test_shapes_of_past_faults(name: str) -> None:
    for drawn_scene in sweep(every=9 if name == "flex" else 5):
        assert roundings(name, drawn_scene) <= ROUNDINGS[drawn_scene.query.dtype], (
            drawn_scene.lanes,
            drawn_scene.query.shape,
            drawn_scene.query.dtype,
        )


@pytest.mark.slow
@each
def test_all_shapes_of_past_faults_and_long_contexts(name: str) -> None:
    worst: dict[torch.dtype, float] = dict.fromkeys(DTYPES, 0.0)
    for drawn_scene in sweep():
        worst[drawn_scene.query.dtype] = max(worst[drawn_scene.query.dtype], roundings(name, drawn_scene))
    for dtype, prefix, rows in product(DTYPES, (2047, 2048), (1, 16, 64)):
        worst[dtype] = max(worst[dtype], roundings(name, scene(((prefix, rows),), 4, 2, 64, dtype=dtype, seed=rows)))
    assert all(0 < worst[dtype] <= ROUNDINGS[dtype] for dtype in DTYPES), worst


# What only SDPA and FlexAttention have.


@pytest.mark.parametrize("before", [False, True])
def test_flex_uncompiled_leaves_torch_as_it_found_it(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, STEPWISE, before)
    run("flex", scene())
    assert getattr(flex_attention, STEPWISE) is before


def test_flex_goes_on_uncompiled_where_torch_has_recompiled_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise FailOnRecompileLimitHit("the limit")

    monkeypatch.setattr(flex, "_compiled_functions", [refuses])
    monkeypatch.setattr(flex, "_failures", {})
    drawn_scene = scene()
    for _ in range(2):
        messages: list[str] = []
        out = Flex(compiled=True)(
            drawn_scene.query, replace(drawn_scene.columns, announce=messages.append), drawn_scene.scaling
        )
        assert drawn_scene.error(out) <= 1
        assert messages == ["FlexAttention was recompiled as often as torch allows"]


def test_flex_is_compiled_for_more_families_of_shapes_than_torch_allows_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[int] = []

    def compiled(query: Tensor, *_: Any, **__: Any) -> Tensor:
        limits.append(torch._dynamo.config.recompile_limit)
        return query

    monkeypatch.setattr(flex, "_compiled_functions", [compiled])
    before = torch._dynamo.config.recompile_limit
    drawn_scene = scene()
    Flex(compiled=True)(drawn_scene.query, drawn_scene.columns, drawn_scene.scaling)
    assert limits == [flex.COMPILATIONS]
    assert torch._dynamo.config.recompile_limit == before < flex.COMPILATIONS


def test_flex_says_that_float64_does_not_compile() -> None:
    messages: list[str] = []
    drawn_scene = scene(dtype=torch.float64)
    attend = Flex(compiled=True)
    out = attend(drawn_scene.query, replace(drawn_scene.columns, announce=messages.append), drawn_scene.scaling)
    assert drawn_scene.error(out) <= 1
    assert messages == ["FlexAttention does not compile for float64"]


def test_sdpa_says_where_torch_has_no_fused_kernel() -> None:
    """Head sizes of a GPU's kernels are limited; on the CPU, the switch of the fused ones stands in for them."""
    messages: list[str] = []
    drawn_scene = scene()
    columns = replace(drawn_scene.columns, announce=messages.append)
    with sdpa_kernel(SDPBackend.MATH):
        out = Sdpa()(drawn_scene.query, columns, drawn_scene.scaling)
    assert drawn_scene.error(out) <= 1
    assert messages == ["SDPA has no fused kernel for float32, head_dim 8: torch runs it as math"]


COMPILED = """
import torch
from specverify.backends.engine.attention.flex import Flex
from tests.treeattention import scene
attend, said = Flex(compiled=True), []
for prefix, rows in ((5, 7), (12, 3)):
    made = scene(((prefix, rows),))
    assert made.error(attend(made.query, made.columns, made.scaling)) <= 1  # a scene's announce raises
print("compiled")
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch._inductor") is None, reason="torch has no Inductor")
def test_flex_compiled_is_right_where_it_compiles() -> None:
    """In a process of its own, where no warning of the compiler's own code is an error."""
    ended = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.strip() == "compiled"
