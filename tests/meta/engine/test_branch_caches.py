"""Several branch caches of one request give bit for bit what one branch gives."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.composition import SEAMS
from specverify.backends.engine.kv.base import CacheSpec
from specverify.backends.engine.kv.branch import Branches
from specverify.backends.engine.reach import Reach
from specverify.properties.invariants.two_runs import same_bits
from specverify.properties.verdict.finding import Finding
from specverify.properties.verdict.subject import Subject
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel
from specverify.reference.layout import COMMITS, KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.sampling import Stops
from specverify.reference.trace import Stage
from specverify.reference.tree import RankTree

ARCHITECTURE = Architecture("llama", 8, 8, 8, 2, 1, 4, (0, 0))
TREE = RankTree((0, 0, 0, 1, 1, 2, 3), (0, 0, 1, 0, 1, 0, 0))
SPEC = CacheSpec((Reach(),), 1, 2, 16, 8, torch.device("cpu"), torch.float32)


def open_branches(most: int, parents: list[int]) -> Branches:
    """Branches over two committed columns, with open rows that stand below `parents`."""
    cache = Branches(SPEC, "path", most)
    for above in ([-1, 0], parents):
        if above is parents:
            cache.commit([0, 1])
        cache.open(len(above))
        cache.divide(above)
        cells = torch.arange(len(above) * 2.0).reshape(1, len(above), 2) + 100.0 * (above is parents)
        cache.write(0, cells, -cells)
    return cache


@pytest.mark.parametrize(
    ("most", "paths"), [(2, [[0, 1, 3], [0, 2, 4, 1, 5]]), (64, [[0, 1, 3], [0, 2], [0, 4], [0, 1, 5]])]
)
def test_every_path_has_a_branch_until_none_is_left(most: int, paths: list[list[int]]) -> None:
    cache = open_branches(most, [-1, 0, 0, 1, 0, 1])
    assert cache.paths == paths
    assert cache.read(0)[0][0, 2:, 0].tolist() == [100.0 + 2 * row for row in range(6)]
    cache.commit([0, 1, 5])
    assert cache.committed_columns(0)[1][0, :, 0].tolist() == [0.0, 2.0, 100.0, 102.0, 110.0]
    assert (cache.paths, cache.cells, cache.rows, cache.length) == ([], [], 0, 5)


def test_branches_share_no_storage_with_each_other_or_with_the_committed_columns() -> None:
    cache = open_branches(64, [-1, 0, 0])
    assert cache.paths == [[0, 1], [0, 2]]
    cache.cells[1][0][0][0].fill_(-7.0)
    assert cache.read(0)[0][0, :, 0].tolist() == [0.0, 2.0, 100.0, 102.0, 104.0]
    cache.commit([])
    assert cache.committed_columns(0)[1][0, :, 0].tolist() == [0.0, 2.0]


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("most", [1, 2, 64])
def test_several_branches_give_the_bits_of_one(most: int, commit: str) -> None:
    draft = LanguageModel(Seeded(ARCHITECTURE, 3), TREE)
    case = Case(Seeded(ARCHITECTURE, 3), (1, 2, 3, 4), draft, KvLayout(commit, branches=most), stops=Stops(9))
    subject = Subject("eager", EngineBackend("eager", "cpu").run, frozenset(Stage))
    facts = list(same_bits("cache.layout-equivalent", case, subject, replace(case.layout, branches=0), "one branch"))
    assert facts
    assert not [fact for fact in facts if isinstance(fact, Finding)]


def test_the_verify_forward_of_a_tree_has_a_branch_for_each_leaf() -> None:
    branch_counts: dict[int, set[int]] = {}

    class Watched(Branches):
        def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
            super().write(layer, keys, values)
            branch_counts.setdefault(keys.shape[-2], set()).add(len(self.paths))

    backend = EngineBackend("eager", "cpu", replace(SEAMS, kv=replace(SEAMS.kv, branches=Watched)))
    draft = LanguageModel(Seeded(ARCHITECTURE, 3), TREE)
    backend.run(Case(Seeded(ARCHITECTURE, 3), (1, 2, 3, 4), draft, KvLayout(branches=64), stops=Stops(9)))
    assert branch_counts[len(TREE.parent)] == {3}  # leaves 4, 5 and 6


def test_only_the_branch_layout_has_branches() -> None:
    with pytest.raises(Malformed, match="branches: 2 branches of static, which has none"):
        KvLayout(kind="static", branches=2)
    with pytest.raises(Malformed, match="branches: -1 is negative"):
        KvLayout(branches=-1)
