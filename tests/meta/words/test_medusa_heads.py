"""Medusa heads: one law for each depth, formulas derived twice, input, refusals."""

from dataclasses import replace

import numpy as np
import pytest

from specverify.backends.registry import open_backend
from specverify.properties.shrinking.cases import nearer
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.medusa import Medusa
from specverify.reference.draft_trees import Expansion
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.model import PathByPath
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Array
from specverify.reference.tree import RankTree, Tree
from specverify.reference.weights import seeded_head, seeded_weights
from specverify.setup.subjects import subject_of
from tests.meta.words.test_head_drafts import DRAFTS, ORACLE
from tests.models import LLAMA

NORMED = HiddenStates(place="normed")
PRODUCT = RankTree((0, 0, 0, 1, 1, 2, 2, 3, 5), (0, 0, 1, 0, 1, 0, 1, 0, 0))
CASE = Case(LLAMA, (3, 1, 4, 1, 5), Medusa(PRODUCT, NORMED, 3), stops=Stops(6), dtype="float64")


def medusa(case: Case) -> Medusa:
    assert isinstance(case.draft, Medusa)
    return case.draft


def scores(case: Case) -> Array:
    """Scores [heads, vocabulary] by formulas of this test's own, from the naive oracle's state."""
    assert isinstance(case.model, Seeded)
    draft = medusa(case)
    w, target = seeded_head(draft, case.model), seeded_weights(case.model)
    (state,) = PathByPath(ORACLE.model(case.model, "float64").parameters).states(case.prompt[:-1])[-1][-1:]
    rows = []
    for head in range(draft.heads):
        z = np.einsum("oi,i->o", w[f"medusa_head.{head}.0.linear.weight"], state)
        z = z + w.get(f"medusa_head.{head}.0.linear.bias", 0.0)
        out = state + z / (1 + np.exp(-z))
        matrix = target["lm_head.weight"] if draft.shared_head else w[f"medusa_head.{head}.1.weight"]
        rows.append(np.einsum("vh,h->v", matrix, out))
    return np.array(rows)


@pytest.mark.parametrize(("bias", "shared"), [(True, False), (False, False), (True, True)])
def test_the_oracles_formulas_are_derived_twice(bias: bool, shared: bool) -> None:
    case = replace(CASE, draft=replace(medusa(CASE), bias=bias, shared_head=shared))
    drafted = ORACLE(case).steps[0].drafted
    assert drafted is not None
    assert drafted.logits is not None
    true = scores(case)
    for node, below in enumerate(PRODUCT.children):
        if below:
            np.testing.assert_allclose(drafted.logits[node], true[PRODUCT.depth[node]], rtol=0, atol=1e-12)


def test_a_tree_of_best_tokens_is_a_product_of_one_list_for_each_depth() -> None:
    best = np.argsort(-scores(CASE), axis=1)
    expected_tokens = tuple(int(best[PRODUCT.depth[node] - 1, PRODUCT.rank[node]]) for node in range(1, len(PRODUCT)))
    for trace in (ORACLE(CASE), open_backend("cpu-eager").run(CASE)):
        drafted = trace.steps[0].drafted
        assert drafted is not None
        assert drafted.tree == Tree(PRODUCT.parent, (5, *expected_tokens))


def test_drawn_children_of_two_nodes_are_two_draws() -> None:
    case = replace(CASE, sampling=Sampling(temperature=2.0, draws="with-replacement"))
    drawn = [step.drafted.tree for step in ORACLE(case).steps if step.drafted is not None]
    assert any([tree.token[node] for node in (3, 4)] != [tree.token[node] for node in (5, 6)] for tree in drawn)


@pytest.mark.parametrize("layout", [KvLayout(), KvLayout(kind="prefix", page_size=2)], ids=str)
def test_no_cache_is_leased_and_no_row_is_kept(layout: KvLayout) -> None:
    trace = open_backend("cpu-eager").run(replace(CASE, layout=layout))
    assert len(trace.steps) > 1
    for step in trace.steps:
        assert step.committed is not None
        assert step.committed.draft is None
        assert step.drafted is not None
        assert step.drafted.given is not None
        assert (step.drafted.given.first, len(step.drafted.given.tokens)) == (len(step.context) - 1, 1)
        assert step.drafted.given.tokens[0] == step.context[-1]


def test_the_invariant_finds_another_row_a_wrong_token_and_a_wrong_state() -> None:
    subject = subject_of(open_backend("cpu-eager"))
    trace = open_backend("cpu-eager").run(CASE)
    drafted = trace.steps[1].drafted
    assert drafted is not None
    assert drafted.given is not None
    draft_inputs = drafted.given
    for wrong in (
        replace(draft_inputs, first=draft_inputs.first - 1),
        replace(draft_inputs, first=draft_inputs.first + 1),
        replace(draft_inputs, tokens=tuple((token + 1) % 17 for token in draft_inputs.tokens)),
        replace(draft_inputs, hidden=draft_inputs.hidden + 0.01),
    ):
        steps = (trace.steps[0], replace(trace.steps[1], drafted=replace(drafted, given=wrong)), *trace.steps[2:])
        subject.remember(CASE, replace(trace, steps=steps))
        verdict = judge(CASE, DRAFTS, ORACLE, subject)
        assert [finding.invariant for finding in verdict.findings] == ["draft.hidden-state-descriptor"]


def test_a_drawn_tree_deeper_than_the_heads_is_found() -> None:
    case = replace(CASE, sampling=Sampling(temperature=1.0, draws="with-replacement"))
    subject = subject_of(open_backend("cpu-eager"))
    trace = open_backend("cpu-eager").run(case)
    drafted = trace.steps[0].drafted
    assert drafted is not None
    assert drafted.logits is not None
    deeper = Tree((*PRODUCT.parent, 7), (*drafted.tree.token, 1))
    wrong = replace(drafted, tree=deeper, logits=np.concatenate([drafted.logits, drafted.logits[-1:]]))
    subject.remember(case, replace(trace, steps=(replace(trace.steps[0], drafted=wrong), *trace.steps[1:])))
    verdict = judge(case, [invariant for invariant in DRAFTS if invariant.name == "draft.fidelity"], ORACLE, subject)
    assert [(finding.invariant, finding.where["side"]) for finding in verdict.findings] == [("draft.fidelity", "tree")]


def test_what_does_not_fit_is_refused() -> None:
    draft = medusa(CASE)
    with pytest.raises(Malformed, match="a tree of depth 3 needs as many heads, and there are 2"):
        replace(draft, heads=2)
    with pytest.raises(Malformed, match="a tree of depth 3 needs"):
        Medusa(Expansion(2, 3, 4), NORMED, 2)
    with pytest.raises(Malformed, match=r"reads\.shift.*the shift is 0 in Medusa"):
        replace(draft, reads=HiddenStates(place="normed", shift=1))
    with pytest.raises(Malformed, match="Medusa weights expect one hidden state, and the case gives the r"):
        replace(CASE, draft=replace(draft, reads=HiddenStates((0, 1))))
    assert draft.with_fixed_tree(Tree((0, 0, 1, 2, 3), (0,) * 5)) is None
    assert replace(draft, shape=RankTree((0,), (0,)), heads=1).as_chain().height == 1


def test_it_is_shrunk_to_fewer_heads_and_flags() -> None:
    rich = replace(CASE, draft=Medusa(RankTree((0, 0), (0, 0)), NORMED, 3, True, True))
    smaller_heads = {
        (smaller_case.draft.heads, smaller_case.draft.bias, smaller_case.draft.shared_head)
        for smaller_case in nearer(rich)
        if isinstance(smaller_case.draft, Medusa)
    }
    assert {(1, True, True), (3, False, True), (3, True, False)} <= smaller_heads
