"""No built-in model is blind: a single wrong cell of the tree mask stands far out of float32's noise."""

from dataclasses import replace

import numpy as np
import pytest

from specverify.backends.compositions import open_cpu
from specverify.backends.engine.lower_tree import TreeTensors
from specverify.backends.engine.reach import Reach
from specverify.properties.strategies.models import GALLERY, SEEDS
from specverify.properties.tolerance.closeness import noise, rms
from specverify.properties.verdict.subject import Subject
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.trace import Array
from specverify.reference.tree import Tree
from tests.tiers import each

SHAPE = (0, 0, 0, 1, 2)
"""Two branches of two nodes, interleaved."""

TIMES = 20.0
"""How far beyond rule N's own limit each wrong cell must show."""

_ORACLE = Oracle()
_BACKEND = open_cpu()
_PLAIN = _BACKEND.seams
_SUBJECT = Subject("cpu-eager", _BACKEND.run, _BACKEND.declaration.reveals)


def case_of(arch: Architecture, seed: int, prefix: int) -> Case:
    tokens = np.random.default_rng([prefix, arch.vocab_size]).integers(0, arch.vocab_size, size=prefix + len(SHAPE))
    drawn = tuple(int(token) for token in tokens)
    tree = Tree(SHAPE, drawn[prefix:])
    return Case(Seeded(arch, seed), drawn[: prefix + 1], Scripted((tree,)), stops=Stops(1), steps=1)


def logits_with(case: Case, row: int, column: int, visible: bool) -> Array | None:
    """The engine's logits with one cell of every layer's mask forced, or None where it is so in all of them already."""
    changed = False

    def lower_tree(tree: Tree, committed: int, position: int, reaches: list[Reach], padded_nodes: int) -> TreeTensors:
        nonlocal changed
        tensors = _PLAIN.lower_tree(tree, committed, position, reaches, padded_nodes)
        masks = [mask.clone() for mask in tensors.visible]
        for mask in masks:
            changed = changed or bool(mask[row, column]) != visible
            mask[row, column] = visible
        return replace(tensors, visible=masks)

    _BACKEND.seams = replace(_PLAIN, lower_tree=lower_tree)
    try:
        scored = _BACKEND.run(case).steps[0].scored
    finally:
        _BACKEND.seams = _PLAIN
    assert scored is not None
    return scored.logits if changed else None


def columns_of(prefix: int) -> list[int]:
    """Columns of the prefix, or some of a long one, and those of the tree."""
    some = range(prefix) if prefix < 10 else (0, 1, prefix // 2, prefix - 2, prefix - 1)
    return [*some, *range(prefix, prefix + len(SHAPE))]


@pytest.mark.parametrize("prefix", [6, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("index", each(range(len(GALLERY)), 18))
def test_every_wrong_cell_stands_out(index: int, prefix: int) -> None:
    """Ancestors, selves and prefix columns hidden, others shown: each moves some node 20 times the limit at least."""
    for seed in range(SEEDS):
        case = case_of(GALLERY[index], seed, prefix)
        limit = noise(case, _ORACLE, _SUBJECT).logits_limit()
        true, clean = _ORACLE(case).steps[0].scored, _SUBJECT(case).steps[0].scored
        assert true is not None
        assert clean is not None
        assert rms(clean.logits - true.logits).max() <= limit
        paths = Tree(SHAPE, SHAPE).path
        narrow, flipped = [], 0
        for row in range(len(SHAPE)):
            for column in columns_of(prefix):
                right = column < prefix or column - prefix in paths(row)
                logit_rows = logits_with(case, row, column, not right)
                if logit_rows is not None:
                    flipped += 1
                    away = float(rms(logit_rows - true.logits).max()) / limit
                    if not away > TIMES:
                        narrow.append((row, column, away))
        assert flipped >= 2 * len(SHAPE)
        assert not narrow, f"seed {seed}, (row, column, times the limit): {narrow}"
