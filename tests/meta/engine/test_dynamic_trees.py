"""Dynamic trees: the engine's equal the oracle's, by expansion and rerank, and by greedy top-k."""

from dataclasses import replace

import numpy as np
import pytest

from specverify.backends.registry import open_backend
from specverify.properties.shrinking.cases import nearer, size
from specverify.properties.strategies.acceptance import ORACLE
from specverify.properties.strategies.draft.head import LAYERS
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json, case_to_json
from specverify.reference.draft import Draft, LanguageModel
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.medusa import Medusa
from specverify.reference.draft.mtp import Mtp
from specverify.reference.draft_trees import Expansion
from specverify.reference.malformed import Malformed
from specverify.reference.rules import Rule
from specverify.reference.sampling import Sampling, Stops
from tests.models import OTHER_LLAMA

PLANS = (Expansion(2, 3, 6), Expansion(3, 2, 9), Expansion(3, 3, 13), Expansion(2, 3, 7, rerank=False))


def drafts(plan: Expansion) -> tuple[Draft, ...]:
    last = OTHER_LLAMA.architecture.layers - 1
    return (
        LanguageModel(Seeded(OTHER_LLAMA.architecture, 7), plan),
        LanguageModel(Seeded(OTHER_LLAMA.architecture, 7), plan, (1, 3, 5, 7, 9)),
        Eagle1(plan, HiddenStates(place="normed", shift=1), LAYERS[0], seed=1),
        Eagle3(plan, HiddenStates((-1, last), shift=1), LAYERS[1], (2, 3, 5, 8, 9)),
        Medusa(plan, HiddenStates(place="normed"), 3),
        Mtp(plan, HiddenStates(place="normed", shift=1), LAYERS[0], 2),
        Mtp(plan, HiddenStates(place="normed", shift=1), LAYERS[0], 2, seed=1),
    )


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_engine_and_oracle_draft_the_same_tree(plan: Expansion) -> None:
    backend = open_backend("cpu-eager")
    shapes = set()
    for draft in drafts(plan):
        case = Case(OTHER_LLAMA, (3, 1, 4, 1, 5), draft, stops=Stops(6), dtype="float64")
        right, trace = ORACLE(case), backend.run(case)
        assert trace.output == right.output
        assert len(trace.steps) == len(right.steps)
        for step, true_step in zip(trace.steps, right.steps, strict=True):
            assert step.drafted is not None
            assert true_step.drafted is not None
            assert step.drafted.tree == true_step.drafted.tree
            assert len(step.drafted.tree) == plan.total
            assert step.drafted.tree.ordered
            shapes.add(step.drafted.tree.parent)
            rows = true_step.drafted.tree.children
            for node in (node for node, below in enumerate(rows) if below):
                assert step.drafted.logits is not None
                assert true_step.drafted.logits is not None
                np.testing.assert_allclose(step.drafted.logits[node], true_step.drafted.logits[node], atol=1e-9)
    assert len(shapes) > 1


def test_a_dynamic_tree_is_read_from_a_case_file_and_its_tokens_are_not_drawn() -> None:
    for draft in drafts(PLANS[0]):
        case = Case(OTHER_LLAMA, (3, 1), draft)
        assert case_from_json(case_to_json(case)) == case
        drawn = Sampling(temperature=1.0, draws="with-replacement")
        with pytest.raises(Malformed, match="use top-k"):
            replace(case, sampling=drawn)
    with pytest.raises(Malformed, match="give 7"):
        Expansion(2, 2, 8)
    with pytest.raises(Malformed, match="without reranking"):
        Expansion(2, 2, 6, rerank=False)


def test_a_rule_for_chains_refuses_a_dynamic_tree_that_may_branch() -> None:
    """The outline of four levels and five nodes is a chain, and yet two of the nodes may be siblings."""
    chain = Sampling(temperature=1.0, rule=Rule("chain"))
    plans = Expansion(2, 4, 5), Expansion(1, 4, 5)
    may, never = (LanguageModel(Seeded(OTHER_LLAMA.architecture, 7), plan) for plan in plans)
    assert not plans[0].outline.branches
    with pytest.raises(Malformed, match="rule chain verifies chains; this tree branches"):
        Case(OTHER_LLAMA, (3, 1), may, sampling=chain)
    assert Case(OTHER_LLAMA, (3, 1), never, sampling=chain).draft == never
    chains = replace(open_backend("cpu-eager").declaration, trees="chains")
    assert "trees that branch" in (chains.outside(Case(OTHER_LLAMA, (3, 1), may)) or "")
    assert chains.outside(Case(OTHER_LLAMA, (3, 1), never)) is None


def test_a_dynamic_tree_shrinks_to_smaller_ones_and_a_page_tells_its_numbers() -> None:
    draft = drafts(PLANS[2])[0]
    assert draft.description == "model draft of a dynamic tree (13 best nodes of the top 3 over 3 levels)"
    case = Case(OTHER_LLAMA, (3, 1), draft, stops=Stops(2))
    smaller = [
        smaller_case
        for smaller_case in nearer(case)
        if smaller_case.draft.expansion is not None and size(smaller_case) < size(case)
    ]
    assert {Expansion(2, 3, 11), Expansion(3, 2, 13), Expansion(3, 3, 12)} <= {
        smaller_case.draft.expansion for smaller_case in smaller
    }
    # A static tree of as many nodes is plainer than a dynamic one.
    assert size(replace(case, draft=draft.with_shapes(draft.shapes))) < size(case)
