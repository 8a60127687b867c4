"""Dynamic trees are judged up to rule T: right ones pass in every dtype, and each kind of wrong one is found."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from torch import Tensor

from specverify.backends import faults
from specverify.backends.compositions import open_cpu
from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.tree_growth import TreeGrowth
from specverify.backends.faults.drafting import dynamic_trees
from specverify.backends.faults.fault import faults_in
from specverify.properties.invariants import ALL
from specverify.properties.invariants.draft.dynamic_trees import breaches
from specverify.properties.strategies.draft.head import LAYERS
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft_trees import Expansion
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.trace import Array, Trace
from specverify.reference.tree import Tree
from specverify.setup.subjects import subject_of
from tests.models import OTHER_LLAMA
from tests.tiers import each

PLAN, GREEDY = Expansion(3, 3, 9), Expansion(2, 3, 7, rerank=False)
DRAFTS = [invariant for invariant in ALL if invariant.name.startswith("draft.")]
ORACLE = Oracle()


def cases(plan: Expansion, dtype: str = "float64") -> tuple[Case, Case]:
    model = LanguageModel(Seeded(OTHER_LLAMA.architecture, 7), plan)
    head = Eagle3(plan, HiddenStates((-1, OTHER_LLAMA.architecture.layers - 1), shift=1), LAYERS[1], (2, 3, 5, 8, 9))
    case = Case(OTHER_LLAMA, (3, 1, 4, 1, 5), model, stops=Stops(8), dtype=dtype)
    return case, replace(case, draft=head)


class OneLess(TreeGrowth):
    def rerank(self, scores: Tensor, parents: list[int], most: int) -> list[int]:
        return super().rerank(scores, parents, most - 1)


ONE_LESS = "one node less"
FAULTS = tuple(fault.name for fault in faults_in(dynamic_trees))


def engine_with_fault(name: str) -> EngineBackend:
    """Our engine with the fault of that name in it, with a rerank that keeps one node less, or clean."""
    backend = open_cpu()
    if name == ONE_LESS:
        backend.seams = replace(backend.seams, trees=OneLess())
    elif name:
        faults.plant(backend, faults.fault_named(name))
    return backend


def verdict_of(case: Case, name: str = "") -> Verdict:
    """The verdict on our engine as it is `engine_with_fault`."""
    verdict = judge(case, DRAFTS, ORACLE, subject_of(engine_with_fault(name)))
    assert verdict.unsupported is None
    assert verdict.outcomes["draft.tree-top-m"] in ("checked", "failed")
    return verdict


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_a_right_tree_passes_and_near_ties_are_counted(dtype: str) -> None:
    ties = 0
    for case in (*cases(PLAN, dtype), *cases(GREEDY, dtype)):
        verdict = verdict_of(case)
        assert verdict.findings == ()
        assert verdict.outcomes["draft.fidelity"] == "checked"
        ties += len(verdict.ties)
    # In bfloat16 some trees are not the oracle's, which compared exactly would be false alarms.
    assert (ties > 0) == (dtype == "bfloat16")


FOUND_FAULTS = [(name, dtype) for name in (*FAULTS, ONE_LESS) for dtype in ("float64", "float32", "bfloat16")]
# Which nodes should have been expanded is the oracle's word, and in bfloat16 its scores are too far from the engine's.
FOUND_FAULTS.remove(("frontier-one-short", "bfloat16"))


@pytest.mark.parametrize(("name", "dtype"), each(FOUND_FAULTS, 2))
def test_a_wrong_tree_is_found(name: str, dtype: str) -> None:
    names = {finding.invariant for case in cases(PLAN, dtype) for finding in verdict_of(case, name).findings}
    assert "draft.tree-top-m" in names
    if dtype == "float64":
        assert "draft.fidelity" in names


@pytest.mark.parametrize("name", ["frontier-one-short", "frontier-of-first-candidates"])
def test_a_wrong_greedy_tree_is_found(name: str) -> None:
    for case in cases(GREEDY):
        assert {finding.invariant for finding in verdict_of(case, name).findings} == {
            "draft.tree-top-m",
            "draft.fidelity",
        }


def test_without_revealed_scores_the_oracles_judge() -> None:
    for case in cases(PLAN):
        backend = open_cpu()

        def run(asked_case: Case, backend: EngineBackend = backend) -> Trace:
            trace = backend.run(asked_case)
            steps = tuple(
                replace(step, drafted=step.drafted and replace(step.drafted, logits=None, draft_ids=None))
                for step in trace.steps
            )
            return replace(trace, steps=steps)

        subject = subject_of(backend)
        subject.remember(case, run(case))
        assert not judge(case, DRAFTS, ORACLE, subject).findings
        subject.remember(case, run(case, engine_with_fault("frontier-of-first-candidates")))
        assert "draft.tree-top-m" in {finding.invariant for finding in judge(case, DRAFTS, ORACLE, subject).findings}


# The check by itself, on tables of scores.


def law(rows: dict[tuple[int, ...], Array], path: tuple[int, ...]) -> Array:
    shifted = rows[path] - rows[path].max()
    law: Array = shifted - np.log(np.exp(shifted).sum())
    return law


def draw_tree(seed: int, plan: Expansion, width: int = 5) -> tuple[Tree, Array]:
    """The dynamic tree of random scores, by a walk over all paths of this test's own, and the scores of its nodes."""
    dice = np.random.default_rng(seed)
    rows: dict[tuple[int, ...], Array] = {}
    worth: dict[tuple[int, ...], float] = {(): 0.0}
    level: list[tuple[int, ...]] = [()]
    every: list[tuple[int, ...]] = []
    for _ in range(plan.depth):
        below = []
        for path in level:
            rows[path] = dice.normal(size=width) * 2
            for token in sorted(range(width), key=lambda candidate: -rows[path][candidate])[: plan.top_k]:
                below.append((*path, token))
                worth[below[-1]] = worth[path] + law(rows, path)[token]
        best = set(sorted(below, key=lambda path: -worth[path])[: plan.top_k])
        level = [path for path in below if path in best]
        every += below if plan.rerank else level
    best = set(sorted(every, key=lambda path: -worth[path])[: plan.total - 1])
    kept_paths = [(), *(path for path in every if path in best)]
    tree = Tree(tuple(kept_paths.index(path[:-1]) for path in kept_paths), (0, *(path[-1] for path in kept_paths[1:])))
    # A node that was not expanded has scores too, which nobody has looked at.
    return tree, np.stack([rows.get(path, dice.normal(size=width) * 2) for path in kept_paths])


def away(plan: Expansion, tree: Tree, scores: Array, noise: float = 1e-9, levels: int = 9) -> float:
    return max((breach.away for breach in breaches(plan, tree, tree.token, scores, noise, levels)), default=-np.inf)


@pytest.mark.parametrize(
    "plan", [PLAN, GREEDY, Expansion(2, 4, 6), Expansion(4, 1, 4)], ids=lambda plan: plan.description
)
def test_the_best_nodes_pass_and_no_other_token_or_order_does(plan: Expansion) -> None:
    refused = 0
    for seed in range(20):
        tree, scores = draw_tree(seed, plan)
        assert away(plan, tree, scores) <= 0
        for node in range(1, len(tree)):
            other_tree = replace(tree, token=(*tree.token[:node], (tree.token[node] + 1) % 5, *tree.token[node + 1 :]))
            assert away(plan, other_tree, scores) > 1e-9
            refused += 1
        for earlier, later in pairwise(range(1, len(tree))):
            order = list(range(len(tree)))
            order[earlier], order[later] = later, earlier
            assert away(plan, tree.renumber(tuple(order)), scores[order]) > 1e-9
        assert away(plan, tree.subtree(list(range(len(tree) - 1))), scores[:-1]) == np.inf
    assert refused >= 60


def test_a_tree_that_was_cut_at_a_chunks_end_may_be_smaller_and_no_deeper() -> None:
    tree, scores = draw_tree(1, PLAN)
    kept_nodes = [node for node in range(len(tree)) if tree.depth[node] <= 1]
    assert tree.height > 1
    assert away(PLAN, tree.subtree(kept_nodes), scores[kept_nodes], levels=1) <= 0
    assert away(PLAN, tree.subtree(kept_nodes), scores[kept_nodes]) > 0
    assert away(PLAN, tree, scores, levels=1) == np.inf


def test_tied_nodes_may_be_expanded_in_each_others_place() -> None:
    """Two of three tokens lie 1e-6 apart: with noise either may be expanded, and without it only the better one."""
    plan = Expansion(1, 2, 3)
    rows = np.log(np.array([[0.5, 0.5 - 1e-6, 1e-6], [0.9, 0.05, 0.05], [0.2, 0.4, 0.4]]))
    other_tree = Tree((0, 0, 1), (0, 1, 0))
    assert away(plan, other_tree, rows) == pytest.approx(2e-6, rel=0.1)
    assert away(plan, other_tree, rows, noise=1e-5) < 1e-5
