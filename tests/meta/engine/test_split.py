"""Split attention equals the dense mask; what rows see is packed without loss, and what cannot be read is refused."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from specverify.backends.base import StageFailure
from specverify.backends.compositions import open_engine
from specverify.backends.engine.attention.compact import MOST_WIDTH, compact, pack
from specverify.backends.engine.attention.eager import eager
from specverify.backends.engine.attention.gathered import eager_gathered
from specverify.backends.engine.attention.split import Split, merge
from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.kv.paged import Paged
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.layout import KINDS, KvLayout
from specverify.reference.sampling import Stops
from specverify.reference.tree import RankTree, Tree
from tests.models import LLAMA
from tests.treeattention import FACTOR, UNIT, Scene, constant, hidden_changed, scene

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SPLIT = Split()


def run(drawn_scene: Scene) -> Tensor:
    return SPLIT(drawn_scene.query, drawn_scene.columns, drawn_scene.scaling)


def dense(drawn_scene: Scene) -> Tensor:
    return eager_gathered(drawn_scene.query, drawn_scene.columns, drawn_scene.scaling)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_split_is_the_truth_within_the_bound(dtype: torch.dtype) -> None:
    """Within 64 roundings of the largest value where sums are in the working precision, 1.5 where rounded once."""
    for nodes in (1, 2, 31, 32, 33, 65, 128):
        for prefix in (0, 1, 64, 257):
            drawn_scene = scene(((prefix, nodes),), dtype=dtype, seed=nodes + prefix)
            assert drawn_scene.error(run(drawn_scene)) <= 1, (nodes, prefix)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_split_is_the_dense_mask_for_every_size(dtype: torch.dtype) -> None:
    """M from 1 to 128, prefixes from 0 to 4096; to the dense mask in float64, on the same numbers."""
    worst = 0.0
    for nodes in range(1, 129):
        for prefix in (0, 1, 15, 16, 127, 128, 1000, 2048, 4096):
            drawn_scene = scene(((prefix, nodes),), dtype=dtype, seed=nodes + prefix)
            exact = replace(
                drawn_scene.columns, key=drawn_scene.columns.key.double(), value=drawn_scene.columns.value.double()
            )
            truth = eager(drawn_scene.query.double(), exact, drawn_scene.scaling)
            bound = FACTOR[dtype] * UNIT[dtype] * float(exact.value.abs().max())
            worst = max(worst, float((run(drawn_scene).double() - truth).abs().max()) / bound)
    assert 0 < worst <= 1, worst


@pytest.mark.parametrize("page", [0, 1, 3, 16])
def test_lanes_windows_pages_and_groups(page: int) -> None:
    for lanes in (((7, 5), (0, 9), (30, 1)), ((33, 2), (16, 16))):
        for heads, kv_heads in ((4, 4), (6, 2), (4, 1)):
            for window in (0, 4):
                drawn_scene = scene(lanes, heads, kv_heads, 6, page=page, window=window)
                assert drawn_scene.error(run(drawn_scene)) <= 1, (lanes, heads, kv_heads, window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_and_gathered_columns_give_the_same_bits(dtype: torch.dtype) -> None:
    """Of a lane alone; in a batch padding rows make the gathered block wider."""
    for lane in ((7, 5), (0, 9), (30, 1), (257, 33)):
        assert torch.equal(run(scene((lane,), dtype=dtype)), run(scene((lane,), dtype=dtype, page=3))), lane


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page", [0, 5])
def test_equal_scores_give_the_mean_of_what_is_seen(dtype: torch.dtype, page: int) -> None:
    drawn_scene = constant(scene(((20, 40), (3, 7)), dtype=dtype, page=page))
    assert drawn_scene.error(run(drawn_scene)) <= 1
    assert float(run(drawn_scene).abs().max()) > 1


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    drawn_scene = scene(((4, 3),))
    visible = drawn_scene.columns.visible.clone()
    visible[0, 0, 1] = False
    out = run(replace(drawn_scene, columns=replace(drawn_scene.columns, visible=visible)))
    assert torch.equal(out[0, :, 1], torch.zeros_like(out[0, :, 1]))
    assert torch.equal(out[0, :, 0], run(drawn_scene)[0, :, 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_one_side_may_dominate(dtype: torch.dtype) -> None:
    """Scores of one side are thousands above or below the other's: nothing overflows, and the other has weight 0."""
    drawn_scene = scene(((12, 6),), dtype=dtype)
    for side in (slice(0, 12), slice(12, None)):
        for size in (1e4, -1e4):
            key = torch.zeros_like(drawn_scene.columns.key)
            key[:, :, side] = size
            dominated_scene = replace(
                drawn_scene, query=torch.ones_like(drawn_scene.query), columns=replace(drawn_scene.columns, key=key)
            )
            assert dominated_scene.error(run(dominated_scene)) <= 1, (side, size)


def test_merging_with_nothing_changes_no_bit() -> None:
    out, lse = torch.randn(2, 5, 4), torch.randn(2, 5)
    nothing = torch.zeros(2, 5, 4), torch.full((2, 5), float("-inf"))
    assert torch.equal(merge([(out, lse), nothing]), out)
    assert torch.equal(merge([nothing, (out, lse)]), out)
    assert torch.equal(merge([nothing, nothing]), nothing[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page", [0, 4])
def test_what_a_row_may_not_see_changes_no_bit_of_it(dtype: torch.dtype, page: int) -> None:
    """Unowned cells of pages hold NaN throughout."""
    drawn_scene = scene(((9, 40), (5, 3)), dtype=dtype, page=page)
    base = run(drawn_scene)
    assert bool(base.isfinite().all())
    for row in (0, 3, 31, 33, 39):
        for by in (7.0, 30000.0):
            changed = run(hidden_changed(drawn_scene, row, by))
            assert torch.equal(changed[0, :, row], base[0, :, row]), row
            assert not torch.equal(changed[0], base[0])
            assert torch.equal(changed[1], base[1])


# The compact encoding.


@pytest.mark.parametrize("nodes", [1, 31, 32, 33, 63, 64, 65])
def test_bits_are_the_mask(nodes: int) -> None:
    drawn_scene = scene(((5, nodes),), window=3)
    packed = compact(drawn_scene.query, drawn_scene.columns)
    assert packed.bits.dtype == packed.first.dtype == torch.int32
    assert packed.bits.shape == (1, nodes, -(-nodes // 32))
    assert torch.equal(packed.block(0), drawn_scene.columns.visible[0, 0, :, 5:])
    assert torch.equal(packed.prefix_rows(0), drawn_scene.columns.visible[0, 0, :, :5])


def test_bits_by_hand() -> None:
    """Row 1 sees the last prefix column, and block columns 0, 31 and 32."""
    visible = torch.zeros(1, 1, 2, 36, dtype=torch.bool)
    visible[0, 0, 1, [2, 3, 34, 35]] = True
    packed = pack(visible, torch.tensor([3], dtype=torch.int32))
    assert packed.first.tolist() == [[3, 2]]
    assert packed.bits.tolist() == [[[0, 0], [1 - 2**31, 1]]]
    assert packed.lanes == ((3, 33, True),)


def test_a_mask_is_packed_once_for_all_layers() -> None:
    drawn_scene = scene(((5, 4),))
    first = compact(drawn_scene.query, drawn_scene.columns)
    assert compact(drawn_scene.query, replace(drawn_scene.columns, key=drawn_scene.columns.key.clone())) is first
    shorter = replace(drawn_scene.columns, prefix=torch.tensor([4], dtype=torch.int32))
    assert compact(drawn_scene.query, shorter) is not first


def test_columns_that_cannot_be_read_are_refused() -> None:
    drawn_scene = scene(((5, 4), (2, 3)), page=2)
    columns, paging = drawn_scene.columns, drawn_scene.columns.paging
    assert paging is not None

    def pages(**fields: Tensor) -> AttentionInputs:
        return replace(columns, paging=replace(paging, **fields))

    def table(value: int) -> Tensor:
        changed = paging.table.clone()
        changed[1, 0] = value
        return changed

    hole = columns.visible.clone()
    hole[0, 0, 2, 3] = False
    flat = scene(((5, 4), (2, 3))).columns
    lengths = {
        "lengths .11, 5. outside a block table with room for 10": [11, 5],
        "prefixes of .5, 2. columns in pages that hold .4, 5.": [4, 5],
    }
    cells = paging.key_cells, paging.value_cells
    refused: list[tuple[str, AttentionInputs]] = [
        ("lane 0, row 2: the prefix is not seen in one unbroken run", replace(columns, visible=hole)),
        ("block table is torch.int64", pages(table=paging.table.long())),
        ("the block table is not contiguous", pages(table=paging.table.T.contiguous().T)),
        ("lane 1, block 0: page 99 is outside the pool of", pages(table=table(99))),
        ("lane 1, block 0: page -1 is outside the pool of", pages(table=table(-1))),
        ("the block table is torch.int32 .1, 5., not int32 with 2 lanes", pages(table=paging.table[:1])),
        *((why, pages(lengths=torch.tensor(length, dtype=torch.int32))) for why, length in lengths.items()),
        ("the lengths is torch.int64", pages(lengths=paging.lengths.long())),
        ("3 KV heads", _both(columns, *(cell[:, :, [0, 1, 1]] for cell in cells))),
        (r"keys are .*, values", pages(value_cells=paging.value_cells[:, :, :1])),
        ("queries have 8 numbers a head, keys 4", _both(columns, *(cell[..., :4] for cell in cells))),
        ("queries are torch.float32, keys torch.float64", pages(key_cells=paging.key_cells.double())),
        ("the mask is torch.float32", replace(columns, visible=columns.visible.float())),
        ("prefix lengths are torch.int64", replace(columns, prefix=columns.prefix.long())),
        ("prefix lengths .5, 20. outside", replace(flat, prefix=torch.tensor([5, 20], dtype=torch.int32))),
        ("the mask has 2 lanes of 9 columns", replace(flat, key=flat.key[:, :, 1:], value=flat.value[:, :, 1:])),
    ]
    for why, wrong in refused:
        with pytest.raises(ValueError, match=why) as caught:
            compact(drawn_scene.query, wrong)
        assert "\n" not in str(caught.value)


def _both(columns: AttentionInputs, key: Tensor, value: Tensor) -> AttentionInputs:
    assert columns.paging is not None
    return replace(columns, paging=replace(columns.paging, key_cells=key, value_cells=value))


def test_a_block_too_wide_is_refused() -> None:
    visible = torch.ones(1, 1, 1, MOST_WIDTH + 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="lane 0: a block of 16385 columns, and at most 16384 are packed"):
        pack(visible, torch.zeros(1, dtype=torch.int32))


# In the engine.

FORK = Tree((0, 0, 3, 0, 1), (6, 1, 2, 3, 1))


def in_pages(model: Seeded, **fields: object) -> Case:
    drawn = Case(model, (3, 1, 2, 2, 6), Scripted((FORK,)), KvLayout(kind="paged", page_size=2), stops=Stops(6))
    return replace(drawn, **fields)  # type: ignore[arg-type]


def test_pages_are_never_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LLAMA
    draft = LanguageModel(model, RankTree((0, 0, 0, 1), (0, 1, 0, 0)))
    right = [open_engine("cpu-split").run(in_pages(model, draft=drafter)) for drafter in (Scripted((FORK,)), draft)]

    def read(self: Paged, layer: int) -> None:
        raise AssertionError("gathered")

    monkeypatch.setattr(Paged, "read", read)
    again = [open_engine("cpu-split").run(in_pages(model, draft=drafter)) for drafter in (Scripted((FORK,)), draft)]
    assert [trace.output for trace in again] == [trace.output for trace in right]
    assert all(trace.output for trace in right)


def test_every_layout_gives_one_output() -> None:
    model = LLAMA
    layouts = [KvLayout(kind=kind, page_size=2 if KINDS[kind].pages else 0) for kind in KINDS]
    outputs = {open_engine("cpu-split").run(in_pages(model, layout=layout)).output for layout in layouts}
    assert len(outputs) == 1


def test_what_is_refused_names_the_stage() -> None:
    backend = open_engine("cpu-split")

    def broken(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        return SPLIT(query, replace(columns, prefix=columns.prefix.long()), scaling)

    backend.seams = replace(backend.seams, attend=broken, prefill_attend=SPLIT)
    with pytest.raises(StageFailure, match=r"ValueError: prefix lengths are torch\.int64") as caught:
        backend.run(in_pages(LLAMA))
    assert caught.value.stage.name == "ATTENDED"


@pytest.mark.parametrize("page", [0, 3])
def test_what_is_written_in_place_is_packed_anew(page: int) -> None:
    """Recorded forwards refill the same tensors: what was packed for the step before must not be found again."""
    drawn_scene, other_scene = scene(((7, 5),), page=page, seed=1), scene(((7, 5),), page=page, seed=2)
    assert drawn_scene.error(SPLIT(drawn_scene.query, drawn_scene.columns, drawn_scene.scaling)) <= 1
    drawn_scene.columns.visible.copy_(other_scene.columns.visible)
    assert drawn_scene.error(SPLIT(drawn_scene.query, drawn_scene.columns, drawn_scene.scaling)) <= 1
    if drawn_scene.columns.paging is not None:
        drawn_scene.columns.paging.table.fill_(10_000)
        with pytest.raises(ValueError, match="page 10000 is outside the pool"):
            SPLIT(drawn_scene.query, drawn_scene.columns, drawn_scene.scaling)


def test_standing_aside_reads_pages_too() -> None:
    drawn_scene = scene(((7, 5), (0, 9)), page=3)
    assert drawn_scene.error(dense(drawn_scene)) <= 1
    flat = scene(((7, 5), (0, 9)))
    assert drawn_scene.error(partial(eager, flat.query, flat.columns)(flat.scaling)) <= 1
