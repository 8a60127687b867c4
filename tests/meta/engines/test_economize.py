"""economize behind its adapter: what is shown of a round, what is declined, and a fault of its own that is found."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from specverify.backends.base import Declaration
from specverify.backends.registry import open_backend
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.tree import Tree
from tests.cases import OWN_DRAFT, PLAIN, SHUFFLED
from tests.judging import verdict_of
from tests.models import LLAMA

economize = pytest.importorskip("economize")

CASE = replace(PLAIN, draft=OWN_DRAFT)


@pytest.mark.parametrize("draft", [SHUFFLED, OWN_DRAFT, Scripted()], ids=["shuffled", "model", "none"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(1.0, seed=3, draws="top-k"),
        Sampling(0.7, seed=5, draws="with-replacement", top_p=0.9),
        Sampling(0.7, seed=5, draws="without-replacement"),
    ],
    ids=["greedy", "top-k", "with-replacement", "without-replacement"],
)
def test_a_request_agrees_at_every_stage_that_is_shown(draft: Any, sampling: Sampling) -> None:
    verdict = verdict_of(open_backend("economize-tree"), replace(CASE, draft=draft, sampling=sampling))
    assert verdict.agreed, verdict.first
    checked = {name for name, outcome in verdict.outcomes.items() if outcome == "checked"}
    assert {"attention.context-exact", "cache.commit-equivalence", "draft.fidelity", "acceptance.support"} <= checked
    assert ("acceptance.greedy-walk" in checked) == sampling.greedy


def test_accepted_nodes_are_told_in_the_order_of_the_case() -> None:
    trace = open_backend("economize-tree").run(CASE)
    accepted = [step.accepted.path for step in trace.steps if step.accepted is not None]
    assert accepted[0] == (0, 1, 3, 4)
    assert len(trace.output) == 6
    assert trace.finish == "length"


def test_an_ending_token_that_is_also_the_pending_root_ends_nothing_before_the_first_token() -> None:
    trace = open_backend("economize-tree").run(replace(CASE, stops=Stops(6, (CASE.prompt[-1],))))
    assert len(trace.output) >= 1
    assert verdict_of(open_backend("economize-tree"), replace(CASE, stops=Stops(6, (CASE.prompt[-1],)))).agreed


def test_a_verifier_that_accepts_the_wrong_node_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from economize.decoding.verifiers import GreedyVerifier

    def first_child(self: Any, logits: Any, draft: Any, selector: Any) -> Any:
        return [[0]], [int(logits[0, 1].argmax())]

    monkeypatch.setattr(GreedyVerifier, "verify_tree", first_child)
    verdict = verdict_of(open_backend("economize-tree"), replace(CASE, draft=SHUFFLED))
    assert verdict.outcomes["acceptance.greedy-walk"] == "failed"


def test_a_commit_that_moves_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from economize.runtime.cache import PositionalKVCache

    sound_verdict = verdict_of(open_backend("economize-tree"), replace(CASE, draft=_second_child()))
    assert sound_verdict.agreed
    monkeypatch.setattr(PositionalKVCache, "gather", lambda self, rows, src, dst: None)
    verdict = verdict_of(open_backend("economize-tree"), replace(CASE, draft=_second_child()))
    assert verdict.outcomes["cache.commit-equivalence"] == "failed"


def _second_child() -> Scripted:
    """A tree whose accepted node stands in row 2."""
    text = torch.tensor(Oracle()(replace(CASE, draft=Scripted())).output)
    wrong = (int(text[0]) + 1) % LLAMA.vocab_size
    return Scripted((Tree((0, 0, 0), (4, wrong, int(text[0]))),))


@pytest.mark.parametrize(
    ("case", "line"),
    [
        (replace(CASE, prompt=(3,)), "economize-tree declares no prompt of fewer than 2 tokens"),
        (replace(CASE, dtype="float64"), "economize-tree declares no dtype float64"),
        (replace(CASE, sampling=Sampling(1.0, top_k=3)), "economize-tree declares no processing by top_k"),
    ],
    ids=["prompt", "dtype", "top-k"],
)
def test_what_it_lacks_is_declined_by_name(case: Case, line: str) -> None:
    declared: Declaration = open_backend("economize-tree").declaration
    assert declared.outside(case) == line
