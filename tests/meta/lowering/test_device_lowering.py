"""The lowering by tensor operations agrees with `lower_tree` bit for bit, and reads no number of a tensor."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specverify.backends.base import StageFailure, WrongFlag
from specverify.backends.engine.attention.compact import Compact, Lane, compact, pack, pack_lanes, stand_in
from specverify.backends.engine.columns import AttentionInputs, RowWords
from specverify.backends.engine.lower_tree import TreeTensors, broken_rules, lower_tree, refuse_broken
from specverify.backends.engine.lowering import device as program
from specverify.backends.engine.lowering.device import DeviceLowering
from specverify.backends.engine.reach import Reach
from specverify.backends.flags import DENSE_MASK_BYTES
from specverify.backends.registry import open_backend
from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.layout import KINDS, KvLayout
from specverify.reference.sampling import Stops
from specverify.reference.trace import Trace
from specverify.reference.tree import Tree

DEVICE = DeviceLowering("cpu")
WAITS = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::equal", "aten::is_nonzero"}
"""Operations whose result the host must wait for."""


class Waitless(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses every operation that waits for a device, a boolean index among them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        assert name not in WAITS, f"{name} reads a number of a tensor"
        indices = args[1] if name in ("aten::index", "aten::index_put", "aten::index_put_") else ()
        assert not any(index is not None and index.dtype == torch.bool for index in indices), f"{name} by a mask"
        return func(*args, **(kwargs or {}))


@st.composite
def trees(draw: st.DrawFn, most: int = 70) -> Tree:
    """Trees of up to `most` nodes; nodes follow their parents or come in any order."""
    nodes = draw(st.integers(1, most))
    above = [0, *(draw(st.integers(0, row - 1)) for row in range(1, nodes))]
    order = (
        [0, *(1 + node for node in draw(st.permutations(range(nodes - 1))))] if draw(st.booleans()) else [*range(nodes)]
    )
    parent = [0] * nodes
    for row, up in enumerate(above):
        parent[order[row]] = order[up]
    return Tree(tuple(parent), tuple(range(100, 100 + nodes)))


REACHES = st.lists(
    st.one_of(
        st.just(Reach()), st.builds(Reach, window=st.integers(1, 40)), st.builds(Reach, chunk=st.integers(1, 40))
    ),
    min_size=1, max_size=3,
)  # fmt: skip


@given(trees(), st.integers(0, 40), st.integers(0, 8), REACHES, st.integers(0, 80))
def test_both_lowerings_agree_bit_for_bit(
    tree: Tree, committed: int, ahead: int, reaches: list[Reach], padded: int
) -> None:
    expected = lower_tree(tree, committed, committed + ahead, reaches, padded)
    lowered = DEVICE(tree, committed, committed + ahead, reaches, padded)
    for field in fields(TreeTensors):
        if field.name not in ("visible", "words"):
            expected_field, device_part = getattr(expected, field.name), getattr(lowered, field.name)
            assert (expected_field.dtype, expected_field.tolist()) == (device_part.dtype, device_part.tolist()), (
                field.name
            )
    assert len(lowered.masks) == len(expected.visible)
    assert all(
        torch.equal(expected_mask, device_part)
        for expected_mask, device_part in zip(expected.visible, lowered.masks, strict=True)
    )


@given(st.lists(trees(40), min_size=1, max_size=4))
def test_a_batch_of_trees_is_lowered_as_each_alone(batch: list[Tree]) -> None:
    rows, levels = max(map(len, batch)), max(tree.height for tree in batch)
    parent = torch.tensor([[*tree.parent, *[0] * (rows - len(tree))] for tree in batch])
    valid = torch.arange(rows) < torch.tensor([[len(tree)] for tree in batch])
    node_mask = valid & (torch.arange(rows) > 0)
    lift = program.climb(parent, levels)
    depth = program.depths(lift, valid)
    table = program.ancestors(lift, depth, valid)
    words = program.block_words(table, depth, depth, valid, Reach())
    links = program.first_children(parent, node_mask), program.next_siblings(parent, node_mask)
    for index, tree in enumerate(batch):
        alone = DEVICE(tree, 0, 0, [Reach()], rows)
        assert alone.words is not None
        own_links = alone.next_token.tolist(), alone.next_sibling.tolist()
        assert (depth[index].tolist(), words[index].tolist()) == (alone.depth.tolist(), alone.words[0].bits.tolist())
        assert (links[0][index].tolist(), links[1][index].tolist()) == own_links


@given(
    st.lists(st.tuples(trees(40), st.integers(0, 50), st.integers(0, 60)), min_size=1, max_size=3),
    st.one_of(st.just(Reach()), st.builds(Reach, window=st.integers(1, 60))), st.booleans(), st.integers(0, 9),
)  # fmt: skip
def test_words_give_the_compact_form_that_dense_masks_give(
    batch: list[tuple[Tree, int, int]], reach: Reach, pages: bool, extra_columns: int
) -> None:
    dense_masks, lanes = [], []
    rows = max(max(len(tree), padded) for tree, _, padded in batch)
    for tree, committed, padded in batch:
        tensors = DEVICE(tree, committed, committed, [reach], padded)
        assert tensors.words is not None
        num_rows = len(tensors.token)
        width = committed + num_rows + (0 if pages else extra_columns)
        lanes.append(Lane(tensors.words[0], 0, width, rows - num_rows, not pages))
        visible, spare = tensors.words[0].dense(), rows - num_rows
        mask = torch.nn.functional.pad(visible, (0, width - visible.shape[1] + spare, 0, spare))
        diagonal = torch.arange(spare)
        mask[num_rows + diagonal, width + diagonal] = True
        dense_masks.append(mask)
    widest = max(mask.shape[1] for mask in dense_masks)
    dense = torch.stack([torch.nn.functional.pad(mask, (0, widest - mask.shape[1])) for mask in dense_masks])[:, None]
    prefix = torch.tensor([committed for _, committed, _ in batch], dtype=torch.int32)
    ends = torch.tensor([lane.width for lane in lanes], dtype=torch.int32) if pages else None
    dense_form, tree_form = pack(dense, prefix, ends), pack_lanes(lanes, torch.device("cpu"))
    for name in ("first", "prefix", "widths", "bits"):
        assert getattr(dense_form, name).dtype == getattr(tree_form, name).dtype
        assert torch.equal(getattr(dense_form, name), getattr(tree_form, name)), name
    assert [lane[:2] for lane in dense_form.lanes] == [lane[:2] for lane in tree_form.lanes]
    # The words may say that a row sees the prefix in part where none does: a mask over it then hides nothing.
    assert all(
        tree_flag or not dense_flag
        for (*_, dense_flag), (*_, tree_flag) in zip(dense_form.lanes, tree_form.lanes, strict=True)
    )


def test_no_operation_of_the_lowering_waits_for_the_device() -> None:
    tree = Tree((0, 0, 0, 1, 1, 3), (5, 6, 7, 8, 9, 10))
    reaches = [Reach(), Reach(window=3), Reach(chunk=4)]
    with Waitless():  # type: ignore[no-untyped-call]
        lowered = DEVICE(tree, 7, 7, reaches, 9)
        broken = broken_rules(lowered, 7, 64)
        assert lowered.words is not None
        pack_lanes([Lane(lowered.words[1], 2, 16, 0, True)], torch.device("cpu"))
    refuse_broken(broken)
    with Waitless(), pytest.raises(AssertionError, match="reads a number"):  # type: ignore[no-untyped-call]
        int(lowered.depth.max())
    # On the meta device there is nothing to read: the program runs without any number.
    parent = torch.zeros(2, 9, dtype=torch.int64, device="meta")
    valid = torch.ones(2, 9, dtype=torch.bool, device="meta")
    lift = program.climb(parent, 4)
    depth = program.depths(lift, valid)
    table = program.ancestors(lift, depth, valid)
    ends = torch.zeros(2, dtype=torch.int64, device="meta")
    assert program.block_words(table, depth, depth, valid, Reach(window=3)).shape == (2, 9, 1)
    assert program.first_columns(depth, valid, ends, Reach(window=3)).shape == (2, 9)
    assert program.first_children(parent, valid).shape == program.next_siblings(parent, valid).shape == (2, 9)


def test_a_broken_rule_is_told_by_name_once_it_is_read() -> None:
    lowered = DEVICE(Tree((0, 0), (5, 6)), 3, 3, [Reach()], 0)
    with pytest.raises(StageFailure, match="row 1: position outside the model's context"):
        refuse_broken(broken_rules(lowered, 3, 4))


def test_a_view_of_a_stand_in_is_refused() -> None:
    words = RowWords(torch.zeros(2, dtype=torch.int32), torch.tensor([[1], [3]], dtype=torch.int32), 1, 0, False)
    form = pack_lanes([Lane(words, 0, 3, 0, True)], torch.device("cpu"))
    mask, keys = stand_in(form, 3), torch.zeros(1, 1, 3, 4)
    assert mask.untyped_storage().nbytes() == 1

    def compact_of(visible: Tensor) -> Compact:
        inputs = AttentionInputs(keys, keys, visible, torch.tensor([1], dtype=torch.int32), None, print)
        return compact(torch.zeros(1, 1, 2, 4), inputs)

    assert compact_of(mask) is form
    with pytest.raises(ValueError, match="a view of a stand-in"):
        compact_of(mask[:, :, :, :])


def test_the_flag_of_dense_masks_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DENSE_MASK_BYTES, "many")
    with pytest.raises(WrongFlag, match="SPECVERIFY_DENSE_MASK_BYTES='many': set it to a number of bytes from 0 on"):
        open_backend("cpu-split-words")


FORK = Tree((0, 0, 3, 0, 1), (6, 1, 2, 3, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [0, 9])
def test_a_run_over_words_has_the_bits_of_a_run_over_masks(
    kind: str, padded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Seeded(next(arch for arch in GALLERY if any(arch.windows)), 0)
    layout = KvLayout(kind=kind, padded_nodes=padded, page_size=2 if KINDS[kind].pages else 0)
    case = Case(model, (3, 1, 2, 2, 1, 2, 6), Scripted((FORK,)), layout, stops=Stops(6))
    masks, words = (open_backend(name).run(case) for name in ("cpu-split", "cpu-split-words"))
    assert not words.fallbacks
    same_bits(masks, words)
    monkeypatch.setenv(DENSE_MASK_BYTES, "100000")
    again = open_backend("cpu-split-words").run(case)
    assert {*again.fallbacks} == {"a dense mask: its bytes are within the budget of 100000"}
    assert again.output == words.output


@pytest.mark.parametrize("kind", ["branch", "paged", "sliding"])
def test_our_kernel_reads_the_same_words_from_masks_and_from_trees(kind: str) -> None:
    """Under the interpreter; `cuda-fused-words` is the same composition on a device."""
    pytest.importorskip("triton")
    model = Seeded(next(arch for arch in GALLERY if any(arch.windows)), 0)
    layout = KvLayout(kind=kind, padded_nodes=7, page_size=2 if KINDS[kind].pages else 0)
    case = Case(model, (3, 1, 2, 2, 6), Scripted((FORK,)), layout, stops=Stops(3), dtype="float32")
    masks, words = (open_backend(name).run(case) for name in ("triton-interpreted", "triton-interpreted-words"))
    assert words.fallbacks == masks.fallbacks
    same_bits(masks, words)


def same_bits(first: Trace, second: Trace) -> None:
    """Both runs give the same text, and in every step the same bits of logits."""
    assert first.output == second.output
    for first_step, second_step in zip(first.steps, second.steps, strict=True):
        assert first_step.scored is not None
        assert second_step.scored is not None
        assert first_step.scored.logits.tobytes() == second_step.scored.logits.tobytes()


@pytest.mark.parametrize("kind", ["branch", "paged"])
def test_a_run_that_goes_over_from_words_to_dense_masks_has_the_bits_of_words_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Seeded(next(arch for arch in GALLERY if arch.vocab_size > 6 and not any(arch.windows)), 0)
    layout = KvLayout(kind=kind, page_size=2 if KINDS[kind].pages else 0)
    case = Case(model, (3, 1, 2, 2, 1, 2, 6), Scripted((FORK,)), layout, stops=Stops(6))
    words = open_backend("cpu-split-words").run(case)
    of_first = len(FORK) * (len(case.prompt) - 1 + len(FORK))
    monkeypatch.setenv(DENSE_MASK_BYTES, str(of_first - 1))  # the tree alone is beyond it, and the steps after it fit
    mixed = open_backend("cpu-split-words").run(case)
    (dense,) = mixed.fallbacks.values()
    assert dense == len(mixed.steps) - 1 > 0  # all layers share a mask
    same_bits(mixed, words)
