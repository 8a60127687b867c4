"""Chain engines behind black boxes: each on a greedy and a sampled request, what each lacks, and faults planted in one.

An engine that is not installed is skipped by name.
"""

from dataclasses import replace
from typing import Any

import pytest

from specverify.backends.adapters import ADAPTERS
from specverify.backends.registry import open_backend
from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Rope, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.tree import RankTree
from tests.judging import verdict_of
from tests.models import LLAMA

ROWS = {adapter.name: adapter for adapter in ADAPTERS}
CHAINS = ("economize", "economize-lookup", "flashspec", "flashspec-composite", "mlx-lm", "dflash")
WITH_KNOWN_CHAINS = ("mlx-lm",)
"""The engines whose chains all have one length; others draft as many tokens as their own confidence asks for."""

CHAIN = RankTree((0, 0, 1, 2), (0, 0, 0, 0))


def open_once(name: str) -> Any:
    absent = ROWS[name].why_not_installed()
    if absent is not None:
        pytest.skip(absent)
    return open_backend(name)


def case_for(backend: Any, **changes: Any) -> Case:
    """A request with the target as its own draft, where the engine takes a draft."""
    draft = LanguageModel(LLAMA, CHAIN) if "model" in backend.declaration.drafts else Scripted()
    return replace(Case(LLAMA, (3, 1, 4, 3, 1), draft, stops=Stops(9)), **changes)


@pytest.mark.parametrize("name", CHAINS)
def test_a_greedy_request_is_the_targets_own_text(name: str) -> None:
    backend = open_once(name)
    text = Oracle()(case_for(backend, draft=Scripted())).output
    # The text ends at an ending token inside a block that is accepted.
    for stops in (Stops(9), Stops(9, (text[2],)), Stops(2), Stops(1)):
        verdict = verdict_of(backend, case_for(backend, stops=stops))
        assert verdict.agreed, verdict.first
        assert verdict.outcomes["lossless.greedy-match"] == "checked"


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=7)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", WITH_KNOWN_CHAINS)
def test_counts_are_those_that_target_and_draft_give(name: str, sampling: Sampling) -> None:
    backend = open_once(name)
    draft = LanguageModel(replace(LLAMA, noise=0.2), CHAIN)
    verdict = verdict_of(backend, case_for(backend, draft=draft, sampling=sampling), "acceptance.rate")
    assert verdict.agreed, verdict.first
    assert verdict.outcomes["acceptance.rate"] == "checked"


@pytest.mark.parametrize("name", CHAINS)
def test_a_sampled_request_follows_the_targets_law(name: str) -> None:
    backend = open_once(name)
    verdict = verdict_of(backend, case_for(backend, sampling=Sampling(0.8, seed=7), stops=Stops(3)))
    assert verdict.agreed, verdict.first
    assert verdict.outcomes["lossless.distribution"] == "checked"


@pytest.mark.parametrize("name", CHAINS)
def test_one_seed_gives_one_text_whatever_ran_before(name: str) -> None:
    backend = open_once(name)
    case = case_for(backend, sampling=Sampling(1.0, seed=7), stops=Stops(12))
    first = backend.run(case).output
    backend.run(replace(case, prompt=(5, 6), sampling=Sampling(0.5, seed=8)))
    assert backend.run(case).output == first
    assert backend.run(replace(case, sampling=Sampling(1.0, seed=9))).output != first


@pytest.mark.parametrize("name", ["flashspec", "mlx-lm"])
def test_drafted_tokens_that_are_accepted_are_counted(name: str) -> None:
    """The target accepts every token of itself as a draft, and few of another model's."""
    backend = open_once(name)
    own_draft = backend.run(case_for(backend)).speculated
    assert own_draft.proposed == own_draft.accepted > 0
    other_draft = backend.run(case_for(backend, draft=LanguageModel(replace(LLAMA, seed=5), CHAIN))).speculated
    assert other_draft.accepted < other_draft.proposed


@pytest.mark.parametrize(
    ("name", "case", "line"),
    [
        ("economize", {"sampling": Sampling(1.0, top_k=3)}, "economize declares no processing by top_k"),
        ("flashspec", {"sampling": Sampling(1.0, top_p=0.5)}, "flashspec declares no processing of logits"),
        ("mlx-lm", {"sampling": Sampling(1.0, top_p=0.5)}, "mlx-lm declares no processing by top_p"),
        ("mlx-lm", {"dtype": "bfloat16"}, "mlx-lm declares no dtype bfloat16"),
        ("dflash", {"sampling": Sampling(1.0, min_p=0.5)}, "dflash declares no processing by min_p"),
    ],
)
def test_what_an_engine_lacks_is_declined_by_name(name: str, case: dict[str, Any], line: str) -> None:
    backend = open_once(name)
    assert backend.declaration.outside(case_for(backend, **case)) == line


def test_mlx_lm_is_given_the_rotary_embedding_that_it_does_not_read() -> None:
    backend = open_once("mlx-lm")
    for kind in (Rope(500.0, "linear", 4.0), Rope(500.0, "yarn", 4.0, 64), Rope(500.0)):
        model = Seeded(replace(GALLERY[1], rope=kind), 0)
        verdict = verdict_of(backend, case_for(backend, model=model, draft=LanguageModel(model, CHAIN)))
        assert verdict.agreed, verdict.first


def test_a_verifier_that_accepts_one_draft_too_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = open_once("economize")
    from economize.decoding.verifiers import GreedyVerifier

    def one_too_many(self: Any, logits: Any, draft: Any, *arguments: Any) -> Any:
        accepted, following = verified(self, logits, draft, *arguments)
        return (accepted + 1).clamp(max=draft.width), following

    verified = GreedyVerifier.verify_batch
    monkeypatch.setattr(GreedyVerifier, "verify_batch", one_too_many)
    case = case_for(backend, draft=LanguageModel(Seeded(GALLERY[1], 1), CHAIN))
    assert verdict_of(backend, case).outcomes["lossless.greedy-match"] == "failed"
