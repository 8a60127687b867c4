"""dejavuu behind its adapter: what is shown of a round, what is declined, and a fault of its own that is found."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specverify.backends.base import Unsupported
from specverify.backends.registry import open_backend
from specverify.properties.strategies.models import GALLERY
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.tree import Tree
from tests.cases import OWN_DRAFT, PLAIN, SHUFFLED
from tests.judging import verdict_of
from tests.models import LLAMA

dejavuu = pytest.importorskip("dejavuu")

CASE = replace(PLAIN, draft=OWN_DRAFT)


@pytest.mark.parametrize("draft", [SHUFFLED, OWN_DRAFT, Scripted()], ids=["shuffled", "model", "none"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, seed=3, top_p=0.9)], ids=["greedy", "sampled"])
def test_a_request_agrees_at_every_stage_that_is_shown(draft: Any, sampling: Sampling) -> None:
    verdict = verdict_of(open_backend("dejavuu"), replace(CASE, draft=draft, sampling=sampling))
    assert verdict.agreed, verdict.first
    checked = {name for name, outcome in verdict.outcomes.items() if outcome == "checked"}
    assert {"attention.context-exact", "cache.commit-equivalence", "draft.fidelity", "acceptance.support"} <= checked
    assert ("acceptance.greedy-walk" in checked) == sampling.greedy


def test_accepted_nodes_are_told_in_the_order_of_the_case() -> None:
    trace = open_backend("dejavuu").run(CASE)
    accepted = [step.accepted.path for step in trace.steps if step.accepted is not None]
    assert accepted[0] == (0, 1, 3, 4)
    assert (len(trace.output), trace.finish) == (6, "length")


def test_one_seed_gives_the_same_tokens_with_and_without_a_draft() -> None:
    """dejavuu draws each token by seed and position."""
    sampled = replace(CASE, sampling=Sampling(1.0, seed=11))
    dejavuu_backend = open_backend("dejavuu")
    assert dejavuu_backend.run(sampled).output == dejavuu_backend.run(replace(sampled, draft=Scripted())).output


def test_a_tree_whose_nodes_see_their_siblings_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from dejavuu.core import tree

    monkeypatch.setattr(tree, "mask", lambda parent, past: np.zeros((1, 1, len(parent), past + len(parent)), "float32"))
    assert (
        verdict_of(open_backend("dejavuu"), replace(CASE, draft=SHUFFLED)).outcomes["attention.context-exact"]
        == "failed"
    )


def test_a_commit_of_the_first_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from dejavuu.decoders.hf import HFBackend

    gathered = HFBackend.gather_kv
    monkeypatch.setattr(
        HFBackend, "gather_kv", lambda self, kv, committed, path: gathered(self, kv, committed, list(range(len(path))))
    )
    text = Oracle()(replace(CASE, draft=Scripted())).output
    wrong = (text[0] + 1) % LLAMA.vocab_size
    second = Scripted((Tree((0, 0, 0), (4, wrong, text[0])),))
    assert (
        verdict_of(open_backend("dejavuu"), replace(CASE, draft=second)).outcomes["cache.commit-equivalence"]
        == "failed"
    )


@pytest.mark.parametrize(
    ("case", "line"),
    [
        (replace(CASE, dtype="float64"), "dejavuu declares no dtype float64"),
        (replace(CASE, sampling=Sampling(1.0, top_k=3)), "dejavuu declares no processing by top_k"),
        (replace(CASE, sampling=Sampling(1.0, draws="with-replacement")), "dejavuu declares no draws with-replacement"),
        (replace(CASE, stops=Stops(6, stop_tokens=(2,))), "dejavuu declares no stop_tokens"),
    ],
    ids=["dtype", "top-k", "draws", "stop"],
)
def test_what_it_lacks_is_declined_by_name(case: Case, line: str) -> None:
    assert open_backend("dejavuu").declaration.outside(case) == line


def test_no_model_with_a_window_is_drawn_for_it() -> None:
    declared = open_backend("dejavuu").declaration
    windowed = next(arch for arch in GALLERY if any(arch.windows) and arch.family in (declared.families or ()))
    assert str(declared.not_loaded(windowed)).startswith("sliding window of ")


def test_a_second_ending_token_is_declined() -> None:
    with pytest.raises(Unsupported, match="2 ending tokens: dejavuu ends at one"):
        open_backend("dejavuu").run(replace(CASE, stops=Stops(6, (1, 2))))
