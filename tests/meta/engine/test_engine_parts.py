"""The engine's parts one by one, against statements of what each must do."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specverify.backends.base import StageFailure, Unsupported
from specverify.backends.compositions import open_cpu
from specverify.backends.engine import stops
from specverify.backends.engine.attention.eager import eager
from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.kv.base import CacheSpec, KvCache
from specverify.backends.engine.kv.branch import Branch, cannot_share
from specverify.backends.engine.lower_tree import TreeTensors, check_structure, lower_tree
from specverify.backends.engine.model.built_in import config_of
from specverify.backends.engine.model.causal_lm import Rows
from specverify.backends.engine.model.float64_modules import inverse_frequencies
from specverify.backends.engine.model.models import ModelCache
from specverify.backends.engine.reach import Reach
from specverify.properties.strategies.models import GALLERY, ROPES
from specverify.reference.architecture import Architecture, Rope, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.layout import FAST_SWITCH, KvLayout
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.trace import Stage
from specverify.reference.tree import RankTree, Tree
from tests.models import LARGE_LLAMA, TINY_LLAMA
from tests.tiers import first

# Two branches, a twin, a parent after its child.
TREE = Tree((0, 3, 0, 0, 1, 2), (1, 2, 0, 2, 2, 1))
CONTEXT, PADDED, POSITIONS = 5, 8, 64
ROPE_CASES = {**ROPES, "longrope": Rope(1e4, "longrope", 4.0, 64, short_factor=(1.0, 1.5), long_factor=(2.0, 3.0))}


def lowered_tensors(windows: tuple[int, ...] = (0, 3), padded: int = PADDED) -> TreeTensors:
    return lower_tree(TREE, CONTEXT, CONTEXT, [Reach(window) for window in windows], padded)


def with_entry(tensor: Tensor, row: int, value: int) -> Tensor:
    changed = tensor.clone()
    changed[row] = value
    return changed


def test_the_lowered_tree() -> None:
    """Written down by hand."""
    tensors = lowered_tensors()
    assert tensors.token.tolist() == [1, 2, 0, 2, 2, 1, 0, 0]
    assert tensors.parent.tolist() == [0, 3, 0, 0, 1, 2, 0, 0]
    assert tensors.depth.tolist() == [0, 2, 1, 1, 3, 2, 0, 0]
    assert tensors.position.tolist() == [5, 7, 6, 6, 8, 7, 5, 5]
    assert tensors.valid.tolist() == [True] * 6 + [False] * 2
    assert tensors.ancestor[:6, :4].tolist() == [
        [0, 0, 0, 0], [0, 3, 1, 0], [0, 2, 0, 0], [0, 3, 0, 0], [0, 3, 1, 4], [0, 2, 5, 0],
    ]  # fmt: skip
    assert not tensors.ancestor[6:].any()
    assert tensors.slot.tolist() == list(range(5, 13))
    assert tensors.next_token.tolist() == [2, 4, 5, 1, 0, 0, 0, 0]
    assert tensors.next_sibling.tolist() == [0, 0, 3, 0, 0, 0, 0, 0]
    assert tensors.retrieve_index.tolist() == list(range(6))
    visible_columns = [[int(column) for column in mask[4].nonzero()[:, 0]] for mask in tensors.visible]
    assert visible_columns == [[0, 1, 2, 3, 4, 5, 6, 8, 9], [6, 8, 9]]
    assert [[int(column) for column in mask[7].nonzero()[:, 0]] for mask in tensors.visible] == [[12], [12]]


BROKEN: dict[str, Callable[[TreeTensors], TreeTensors]] = {
    "parent outside the tree": lambda tensors: replace(tensors, parent=with_entry(tensors.parent, 2, PADDED)),
    "depth is not its parent's plus one": lambda tensors: replace(tensors, depth=with_entry(tensors.depth, 5, 1)),
    "valid row under an invalid parent": lambda tensors: replace(tensors, valid=with_entry(tensors.valid, 3, 0)),
    "ancestor outside the tree": lambda tensors: replace(tensors, ancestor=with_entry(tensors.ancestor, 4, -1)),
    "ancestor table does not end at the row itself": lambda tensors: replace(
        tensors, ancestor=with_entry(tensors.ancestor, 5, 2)
    ),
    "position outside the model's context": lambda tensors: replace(
        tensors, position=with_entry(tensors.position, 1, POSITIONS)
    ),
    "slot outside the branch cache": lambda tensors: replace(tensors, slot=with_entry(tensors.slot, 0, CONTEXT - 1)),
}
ALSO_BROKEN: dict[str, Callable[[TreeTensors], TreeTensors]] = {
    "parent outside the tree": lambda tensors: replace(tensors, parent=with_entry(tensors.parent, 2, -1)),
    "position outside the model's context": lambda tensors: replace(
        tensors, position=with_entry(tensors.position, 1, -1)
    ),
    "slot outside the branch cache": lambda tensors: replace(
        tensors, slot=with_entry(tensors.slot, 0, CONTEXT + PADDED)
    ),
    "ancestor outside the tree": lambda tensors: replace(tensors, ancestor=with_entry(tensors.ancestor, 0, PADDED)),
}


@pytest.mark.parametrize(("rule", "corrupt"), [*BROKEN.items(), *ALSO_BROKEN.items()])
def test_each_structural_rule_stops_the_run(rule: str, corrupt: Callable[[TreeTensors], TreeTensors]) -> None:
    sound = lowered_tensors()
    check_structure(sound, CONTEXT, POSITIONS)
    with pytest.raises(StageFailure, match=rule) as stopped:
        check_structure(corrupt(sound), CONTEXT, POSITIONS)
    assert stopped.value.stage == Stage.LOWERED


def test_the_structural_check_guards_the_engine() -> None:
    backend = open_cpu()
    plain = backend.seams.lower_tree

    def broken(*arguments: Any) -> TreeTensors:
        tensors = plain(*arguments)
        return replace(tensors, slot=tensors.slot - 1)

    backend.seams = replace(backend.seams, lower_tree=broken)
    with pytest.raises(StageFailure, match="row 0: slot outside the branch cache") as stopped:
        backend.run(Case(TINY_LLAMA, (1, 2)))
    assert stopped.value.stage == Stage.LOWERED


ROOM = CacheSpec((Reach(), Reach()), 2, 4, 16, 8, torch.device("cpu"), torch.float32)


def noise(cache: KvCache, rows: int, seed: int) -> None:
    """Open `rows` rows and write random keys and values to every layer."""
    draw = torch.Generator().manual_seed(seed)
    cache.open(rows)
    for layer in range(cache.layers):
        cache.write(layer, *torch.randn(2, 2, rows, 4, generator=draw))


def fill_branch(how: str) -> Branch:
    """Three committed columns under four open rows."""
    cache = Branch(ROOM, how)
    noise(cache, 3, 1)
    cache.commit([0, 1, 2])
    noise(cache, 4, 2)
    return cache


@pytest.mark.parametrize("how", ["path", "fast", "length"])
@pytest.mark.parametrize("path", [[0], [0, 1, 2], [0, 2], [0, 3, 1]])
def test_commit_keeps_the_path(how: str, path: list[int]) -> None:
    cache = fill_branch(how)
    columns = [0, 1, 2, *(3 + row for row in path)]
    expected_tensors = [tensor[:, columns].clone() for pair in cache.branch for tensor in pair]
    branch = [tensor for pair in cache.branch for tensor in pair]
    why = cache.commit(path)
    assert cache.length == 3 + len(path)
    assert not cache.rows
    assert all(
        torch.equal(tensor, expected_tensor)
        for tensor, expected_tensor in zip(chain(*cache.committed_pairs), expected_tensors, strict=True)
    )
    in_place = path == list(range(len(path)))
    assert why == (None if how != "length" or in_place else "the accepted path is not a prefix of the row order")
    # What was kept shares nothing with the branch, whose rows the next step overwrites.
    for tensor in branch:
        tensor.fill_(7.0)
    assert all(
        torch.equal(tensor, expected_tensor)
        for tensor, expected_tensor in zip(chain(*cache.committed_pairs), expected_tensors, strict=True)
    )


def _inconsistent(kind: str) -> Branch:
    cache = fill_branch("fast")
    (keys, values), *other_pairs = cache.committed_pairs
    if kind == "layers":
        cache.committed_pairs = other_pairs
    elif kind == "lengths":
        cache.committed_pairs = [other_pairs[0], (keys[:, :2], values[:, :2])]
    elif kind == "heads":
        cache.committed_pairs = [(keys[:1], values[:1]), *other_pairs]
    elif kind == "dtype":
        cache.branch = [(keys.double(), values.double()) for keys, values in cache.branch]
    return cache


INCONSISTENT = {
    "layers": "1 committed layers under 2 of the branch",
    "lengths": "layer 1 holds 2 columns, the cache 3",
    "heads": "layer 0 of the branch has another shape or dtype",
    "dtype": "layer 0 of the branch has another shape or dtype",
}


@pytest.mark.parametrize("kind", INCONSISTENT)
def test_fast_commit_falls_back_with_its_reason(kind: str) -> None:
    cache = _inconsistent(kind)
    expected_tensors = [tensor[:, [0, 1, 2, 3, 5]].clone() for pair in cache.branch for tensor in pair]
    assert cache.commit([0, 2]) == INCONSISTENT[kind]
    assert all(
        torch.equal(tensor, expected_tensor)
        for tensor, expected_tensor in zip(chain(*cache.committed_pairs), expected_tensors, strict=True)
    )


def test_fast_commit_has_no_prefix_to_share_at_first() -> None:
    cache = Branch(ROOM, "fast")
    noise(cache, 3, 1)
    assert cache.commit([0, 1, 2]) == "there is no committed prefix to share"


def test_fast_commit_sees_a_branch_shorter_than_its_prefix() -> None:
    cache = fill_branch("fast")
    short = [(keys[:, :2], values[:, :2]) for keys, values in cache.branch]
    assert cannot_share(cache.committed_pairs, short, 3) == "layer 0 of the branch is shorter than the prefix"


def test_the_fast_reorder_has_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAST_SWITCH, "0")
    assert fill_branch("fast").commit([0, 2]) == f"{FAST_SWITCH}=0"
    monkeypatch.setenv(FAST_SWITCH, "1")
    cache = fill_branch("path")
    cache.branch = [(keys.double(), values.double()) for keys, values in cache.branch]
    assert cache.commit([0, 2]) == "layer 0 of the branch has another shape or dtype", "path was made fast"


def test_a_branch_shares_no_storage() -> None:
    cache = fill_branch("path")
    before = [tensor.clone() for pair in cache.committed_pairs for tensor in pair]
    for tensor in chain(*cache.branch):
        tensor.fill_(9.0)
    assert all(
        torch.equal(tensor, earlier_tensor)
        for tensor, earlier_tensor in zip(chain(*cache.committed_pairs), before, strict=True)
    )


def architecture(rope: Rope) -> Architecture:
    return Architecture("llama", 16, 8, 8, 2, 1, 4, (0, 0), rope, max_positions=256)


@pytest.mark.parametrize("gallery_index", range(len(GALLERY)))
def test_float64_is_exact_for_every_architecture(gallery_index: int) -> None:
    """Norms and rotary tables in float64: attention, logits and KV within 1e-9 of the oracle, far from the start."""
    arch = GALLERY[gallery_index]
    rng = np.random.default_rng(gallery_index)
    prompt = tuple(int(token) for token in rng.integers(0, arch.vocab_size, size=90))
    tokens = (prompt[-1], *(int(token) for token in rng.integers(0, arch.vocab_size, size=len(TREE) - 1)))
    assert_exact(Case(Seeded(arch, 1), prompt, Scripted((Tree(TREE.parent, tokens),)), stops=Stops(4), dtype="float64"))


@pytest.mark.parametrize("kind", ROPE_CASES)
def test_float64_is_exact_for_every_rope(kind: str) -> None:
    prompt = tuple(int(token) for token in np.random.default_rng(8).integers(0, 16, size=40))
    tree = Tree(TREE.parent, (prompt[-1], 3, 4, 5, 6, 7))
    model = Seeded(architecture(ROPE_CASES[kind]), 1)
    assert_exact(Case(model, prompt, Scripted((tree,)), stops=Stops(3), dtype="float64"))


def assert_exact(case: Case) -> None:
    trace, true = open_cpu().run(case), Oracle()(case)
    assert trace.output == true.output
    for step, true_step in zip(trace.steps, true.steps, strict=True):
        assert step.scored is not None
        assert true_step.scored is not None
        assert step.scored.logits.dtype == np.float64
        np.testing.assert_allclose(step.scored.logits, true_step.scored.logits, rtol=0, atol=1e-9)
        assert step.attended is not None
        assert true_step.attended is not None
        np.testing.assert_allclose(step.attended.output, true_step.attended.output, rtol=0, atol=1e-9)
        assert step.committed is not None
        assert true_step.committed is not None
        if step.committed.before is not None and true_step.committed.before is not None:
            np.testing.assert_allclose(step.committed.before.keys, true_step.committed.before.keys, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ROPE_CASES)
def test_float64_rotary_means_what_transformers_means(kind: str) -> None:
    arch = architecture(ROPE_CASES[kind])
    config = config_of(arch)
    frequencies, scaling = inverse_frequencies(config.rope_parameters, arch.head_dim, arch.max_positions)
    assert frequencies.dtype == torch.float64
    if arch.rope.kind == "default":
        rotary = importlib.import_module("transformers.models.llama.modeling_llama").LlamaRotaryEmbedding(config)
        transformers_frequencies, factor = rotary.inv_freq, rotary.attention_scaling
    else:
        transformers_frequencies, factor = ROPE_INIT_FUNCTIONS[arch.rope.kind](config, "cpu", seq_len=32)
    torch.testing.assert_close(frequencies, transformers_frequencies.double(), rtol=1e-6, atol=0.0)
    assert scaling == pytest.approx(factor, rel=1e-6)


def test_longrope_past_its_original_context_is_declined() -> None:
    model = Seeded(architecture(ROPE_CASES["longrope"]), 0)
    backend = open_cpu()
    backend.run(Case(model, (1,) * 60, stops=Stops(4)))
    with pytest.raises(Unsupported, match="longrope past its original context"):
        backend.run(Case(model, (1,) * 60, stops=Stops(5)))


CHAIN = RankTree((0, 0, 1, 2), (0, 0, 0, 0))


@pytest.mark.parametrize("commit", first(["path", "fast", "length"], 2))
def test_every_budget_and_every_stop_position(commit: str) -> None:
    """The target drafts for itself, so blocks are long and ends fall everywhere inside them."""
    backend, prompt = open_cpu(), (3, 1, 4)
    draft, layout = LanguageModel(LARGE_LLAMA, CHAIN), KvLayout(commit)
    text = Oracle()(Case(LARGE_LLAMA, prompt, stops=Stops(10), dtype="float64")).output
    assert len(set(text)) > 3
    for budget in range(1, 11):
        trace = backend.run(Case(LARGE_LLAMA, prompt, draft, layout, stops=Stops(budget)))
        assert (trace.output, trace.finish) == (text[:budget], "length")
        for token in set(text):
            cut = text.index(token) + 1
            for ends, why in ((Stops(budget, eos=(token,)), "eos"), (Stops(budget, stop_tokens=(token,)), "stop")):
                ended = backend.run(Case(LARGE_LLAMA, prompt, draft, layout, stops=ends))
                expected = (text[:cut], why) if cut <= budget else (text[:budget], "length")
                assert (ended.output, ended.finish) == expected
                last = ended.steps[-1].committed
                assert last is not None
                assert last.length == len(prompt) + len(ended.output) - 1


def clip(before: int, most: int, eos: tuple[int, ...], stop: tuple[int, ...]) -> tuple[list[int], str | None]:
    limits = stops.Limits(most, eos=frozenset(eos), stop=frozenset(stop))
    return stops.clip([4, 5, 6], stops.OutputTail(before), limits)


def test_clip_by_every_rule() -> None:
    assert clip(0, 9, (), ()) == ([4, 5, 6], None)
    assert clip(7, 9, (), ()) == ([4, 5], "length")
    assert clip(9, 9, (), ()) == ([4], "length")  # never past the budget twice
    assert clip(7, 9, (5,), (5,)) == ([4, 5], "eos")
    assert clip(0, 9, (6,), (4,)) == ([4], "stop")


def test_a_row_that_sees_nothing_is_loud() -> None:
    """NaN, alone of all rows, not the silent mean that a finite floor would give; also through transformers."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 3, 4, generator=draw) for _ in range(3))
    visible = torch.tensor([[[[True, False, False], [False, False, False], [True, False, True]]]])
    columns = AttentionInputs(key, value, visible, torch.zeros(1, dtype=torch.int32), None, pytest.fail)
    output = eager(query, columns, 0.5)
    assert output[:, :, 1].isnan().all()
    assert not output[:, :, [0, 2]].isnan().any()
    torch.testing.assert_close(output[:, :, 0], value[:, :, 0])

    # One layer: in a second one the NaN of the first would be a value, and 0 times NaN is NaN in every row.
    target = ModelCache("cpu").open(TINY_LLAMA, "float32")
    masks = [torch.tensor([[True, False], [False, False]])] * len(target.reaches)
    tokens, positions = torch.tensor([1, 2]), torch.tensor([0, 1])
    cache = Branch(target.room(2, 2), "path")
    (logits,) = target.forward([Rows(tokens, positions, masks, cache)], eager)
    assert logits[0].isfinite().all()
    assert logits[1].isnan().all()


@pytest.mark.parametrize("commit", ["path", "fast", "length"])
def test_padding_rows_are_never_committed(commit: str) -> None:
    """However many there are: same output, same committed KV, bit for bit the width aside; one column per token."""
    backend = open_cpu()
    tree = Tree((0, 0, 0, 2), (4, 9, 2, 5))
    bare = Case(LARGE_LLAMA, (3, 1, 4), Scripted((tree,)), KvLayout(commit), stops=Stops(5), dtype="float64")
    plain = backend.run(bare)
    for padded in (5, 9, 33):
        trace = backend.run(replace(bare, layout=KvLayout(commit, padded_nodes=padded)))
        assert trace.output == plain.output
        for step, twin in zip(trace.steps, plain.steps, strict=True):
            assert step.lowered is not None
            assert step.lowered.rows == padded
            assert step.committed is not None
            assert twin.committed is not None
            assert step.committed.after is not None
            assert twin.committed.after is not None
            assert step.committed.length == twin.committed.length == step.committed.after.length
            np.testing.assert_allclose(step.committed.after.keys, twin.committed.after.keys, rtol=0, atol=1e-12)
            np.testing.assert_allclose(step.committed.after.values, twin.committed.after.values, rtol=0, atol=1e-12)
            assert step.accepted is not None
            assert max(step.accepted.path) < len(tree)
