"""Static trees by name have the shapes that their names say."""

import pytest

from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json, case_to_json
from specverify.reference.draft import Draft, LanguageModel, Ngram
from specverify.reference.draft_trees import CHOICES, name_of, named_tree, tree_of_paths
from specverify.reference.malformed import Malformed
from specverify.reference.tree import RankTree
from tests.models import TINY_LLAMA


def ranks(tree: RankTree) -> list[tuple[int, ...]]:
    return [tuple(tree.rank[ancestor] for ancestor in tree.path(node)[1:]) for node in range(len(tree))]


def test_depth_alone_is_a_chain() -> None:
    assert named_tree("D3") == named_tree("D3-BF1") == RankTree((0, 0, 1, 2), (0, 0, 0, 0))


@pytest.mark.parametrize(("levels", "width"), [(1, 4), (2, 3), (3, 2), (4, 2)])
def test_depth_and_branching_factor_are_a_full_tree(levels: int, width: int) -> None:
    tree = named_tree(f"D{levels}-BF{width}")
    assert len(tree) == sum(width**level for level in range(levels + 1))
    assert (tree.height, tree.ordered) == (levels, True)
    for node, below in enumerate(tree.children):
        assert [tree.rank[child] for child in below] == (list(range(width)) if tree.depth[node] < levels else [])


def test_a_pruned_tree_holds_the_nodes_of_least_ranks() -> None:
    assert ranks(named_tree("D2-BF3-N7")) == [(), (0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]
    full = ranks(named_tree("D3-BF3"))
    for nodes in range(1, len(full) + 1):
        pruned_ranks = ranks(named_tree(f"D3-BF3-N{nodes}"))
        expected_ranks = sorted(full, key=lambda path: (sum(path), len(path), path))[:nodes]
        assert sorted(pruned_ranks) == sorted(expected_ranks)
    assert named_tree("D3-BF3-N40") == named_tree("D3-BF3")
    assert len(named_tree("D30-BF10-N64")) == 64


def test_the_published_lists_have_their_published_shapes() -> None:
    medusa, eagle = named_tree("medusa-mc_sim_7b_63"), named_tree("eagle-mc_sim_7b_63")
    assert (len(medusa), medusa.height, max(medusa.rank)) == (64, 4, 9)
    assert [medusa.depth.count(level) for level in range(5)] == [1, 10, 28, 23, 2]
    assert (len(eagle), eagle.height, max(eagle.rank)) == (26, 5, 3)
    assert [eagle.depth.count(level) for level in range(6)] == [1, 4, 8, 8, 3, 2]
    assert {(0, 0, 0, 1), (9, 0), (0, 7, 0), (1, 6), (2, 0, 0)} <= set(ranks(medusa))
    assert {(0, 0, 0, 0, 1), (3, 0), (1, 0, 0)} <= set(ranks(eagle))
    assert sum(CHOICES["medusa-mc_sim_7b_63"].values()) == 63


def test_what_is_no_tree_is_refused() -> None:
    for name, why in (
        ("D0", "'D0' is not"),
        ("BF2", "'BF2' is not"),
        ("D3-N2", "'D3-N2' is not"),
        ("D2-BF2-N8", "the full tree has 7 nodes"),
        ("D13-BF2", "more than 4096 nodes"),
    ):
        with pytest.raises(Malformed, match=why):
            named_tree(name)
    with pytest.raises(Malformed, match=r"\[1, 0\] has no parent"):
        tree_of_paths([(0,), (1, 0)])


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("D4BF2", "D4-BF2"),
        ("d_4-bf_2", "D4-BF2"),
        ("D4-N9", "D4-BF9"),
        ("D3 BF2 N8", "D3-BF2-N8"),
        ("medusa", "medusa-mc_sim_7b_63"),
        ("eagle-mc_sim", "eagle-mc_sim_7b_63"),
    ],
)
def test_a_refusal_tells_the_nearest_name(name: str, nearest: str) -> None:
    with pytest.raises(Malformed, match=f"did you mean {nearest}\\?$"):
        named_tree(name)


def test_a_tree_is_known_by_the_name_that_gives_it() -> None:
    names = ("D1", "D4", "D1-BF3", "D4-BF2", "D3-BF2-N8", "D2-BF3-N7", *CHOICES)
    assert tuple(name_of(named_tree(name)) for name in names) == names
    assert name_of(named_tree("D_4-BF_2-N_31")) == "D4-BF2"
    assert name_of(RankTree((0,), (0,))) is None
    assert name_of(RankTree((0, 0, 1), (0, 1, 0))) is None, "a chain of second-best tokens"
    assert name_of(RankTree((0, 0, 0), (0, 1, 0))) is None, "the second-best child in the first row"


@pytest.mark.parametrize(
    "draft", [LanguageModel(TINY_LLAMA, named_tree("D2-BF2")), Ngram(named_tree("D2-BF2"), 3)], ids=str
)
def test_a_case_file_names_a_tree_and_a_page_tells_the_name(draft: Draft) -> None:
    case = Case(TINY_LLAMA, (1, 2), draft)
    assert draft.description.endswith("draft of 7 nodes (D2-BF2)")
    content = case_to_json(case)
    content["draft"]["shape"] = "D_2-BF_2"
    assert case_from_json(content) == case
    content["draft"]["shape"] = "D2BF2"
    with pytest.raises(Malformed, match=r"^draft\.shape: 'D2BF2' is not .*; did you mean D2-BF2\?$"):
        case_from_json(content)
    content["draft"]["shape"] = "D2-BF2-N8"
    with pytest.raises(Malformed, match=r"^draft\.shape: D2-BF2-N8: the full tree has 7 nodes$"):
        case_from_json(content)
