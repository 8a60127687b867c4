"""The adapter of SGLang, on a stand-in with SGLang's signatures: it drives what is published, and faults are red."""

import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from specverify.backends.adapt.engines import sglang as adapter
from specverify.backends.adapters import ADAPTERS
from specverify.backends.base import Unavailable
from specverify.backends.registry import open_backend
from specverify.properties.strategies.models import BROAD
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.tree import RankTree
from tests.judging import verdict_of
from tests.strangers.stand_in_parts import forget_package

STAND_IN = Path(__file__).resolve().parents[2] / "strangers" / "sglang_stand_in"
NAMES = tuple(row.name for row in ADAPTERS if row.factory.startswith("sglang:"))
CHAIN = RankTree((0, 0, 1, 2), (0, 0, 0, 0))
TARGET = Seeded(BROAD[1], 0)
CLOSE = replace(TARGET, noise=0.15)
BOTH = (Action("add", (0,)), Action("add", (1,)))
IS_HERE = find_spec("sglang") is not None


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget_package("sglang")
    monkeypatch.syspath_prepend(str(STAND_IN))
    yield
    forget_package("sglang")


def case_for(name: str, **changes: Any) -> Case:
    draft = Scripted() if name in ("sglang-ngram", "sglang-eagle3") else LanguageModel(CLOSE, CHAIN)
    return replace(Case(TARGET, (3, 1, 4, 3, 1), draft, stops=Stops(9)), **changes)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", NAMES)
def test_a_greedy_request_is_the_targets_own_text(name: str) -> None:
    backend = open_backend(name)
    text = Oracle()(case_for(name, draft=Scripted())).output
    for stops in (Stops(9), Stops(9, (text[2],)), Stops(1)):
        verdict = verdict_of(backend, case_for(name, stops=stops))
        assert verdict.agreed, verdict.first
        assert verdict.outcomes["lossless.greedy-match"] == "checked"
        assert verdict.outcomes["lossless.logprobs"] == "checked"


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", ["sglang", "sglang-tree"])
def test_a_sampled_request_follows_the_targets_law(name: str) -> None:
    sampling = Sampling(0.7, top_k=6, top_p=0.9, seed=7)
    verdict = verdict_of(open_backend(name), case_for(name, sampling=sampling, stops=Stops(3)))
    assert verdict.agreed, verdict.first
    assert verdict.outcomes["lossless.distribution"] == "checked"


@pytest.mark.usefixtures("stand_in")
def test_requests_of_a_batch_are_what_they_are_alone() -> None:
    session = Session((Mate((2, 7), stops=Stops(5)),), BOTH, continuous=True)
    case = case_for("sglang-ngram", session=session)
    verdict = verdict_of(open_backend("sglang-ngram"), case)
    assert verdict.agreed, verdict.first
    assert verdict.outcomes["lossless.greedy-match"] == verdict.outcomes["lossless.takes-part"] == "checked"


@pytest.mark.usefixtures("stand_in")
def test_counts_are_those_of_the_request() -> None:
    backend = open_backend("sglang")
    own_draft = case_for("sglang", draft=LanguageModel(TARGET, CHAIN))
    told = backend.run(own_draft).speculated
    assert told is not None
    assert (told.proposed, told.accepted) == (6, 6), "two chains of three, and the first token comes with the prefill"
    plain = backend.run(replace(own_draft, draft=Scripted())).speculated
    assert plain is not None
    assert (plain.proposed, plain.accepted) == (0, 0)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, seed=7)], ids=["greedy", "sampled"])
def test_counts_of_a_chain_are_those_that_target_and_draft_give(sampling: Sampling) -> None:
    draft = LanguageModel(replace(TARGET, noise=0.2), CHAIN)
    verdict = verdict_of(open_backend("sglang"), case_for("sglang", draft=draft, sampling=sampling), "acceptance.rate")
    assert verdict.agreed, verdict.first
    assert verdict.outcomes["acceptance.rate"] == "checked"


@pytest.mark.usefixtures("stand_in")
def test_an_engine_without_a_draft_is_reloaded_and_one_with_a_draft_is_opened_for_each_pair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[str] = []
    kind = import_module("sglang").Engine
    make = kind.__init__

    def note_settings(self: Any, **settings: Any) -> None:
        opened.append(settings["model_path"])
        make(self, **settings)

    monkeypatch.setattr(kind, "__init__", note_settings)
    backend = open_backend("sglang")
    for seed in (0, 1):
        target = replace(TARGET, seed=seed)
        plain_case = case_for("sglang", model=target, draft=Scripted())
        assert backend.run(plain_case).output == Oracle()(plain_case).output
    assert len(opened) == 1
    for seed in (0, 1):
        target = replace(TARGET, seed=seed)
        trace = backend.run(case_for("sglang", model=target, draft=LanguageModel(target, CHAIN)))
        assert trace.speculated is not None
        assert trace.speculated.accepted == 6
    assert len(opened) == 3


FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "row-of-parent": ("sglang-tree", {}, "lossless.greedy-match"),
    "temperature-twice": ("sglang", {"sampling": Sampling(0.3, seed=7), "stops": Stops(3)}, "lossless.distribution"),
    "coin-kept": ("sglang-tree", {"sampling": Sampling(1.2, seed=7), "stops": Stops(4)}, "lossless.distribution"),
    "logprobs-tempered": ("sglang", {"sampling": Sampling(0.3, seed=7), "stops": Stops(3)}, "lossless.logprobs"),
    "seeds-unread": ("sglang", {"sampling": Sampling(1.0, seed=7)}, "lossless.state-isolated"),
    "counts-too-many": ("sglang", {}, "lossless.completes"),
}


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_is_planted_in_the_engine_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, changes, invariant = FAULTS[fault]
    monkeypatch.setenv("SGLANG_STAND_IN_FAULT", fault)
    assert verdict_of(open_backend(name), case_for(name, **changes)).outcomes[invariant] == "failed"


@pytest.mark.usefixtures("stand_in")
def test_a_residual_that_is_not_cut_shows_in_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law behind rejected siblings is a small part of all draws: cases of one temperature add up over a run."""
    case = case_for("sglang-tree", sampling=Sampling(1.0, seed=7))
    evidence = {}
    for fault in ("", "residual-not-cut"):
        monkeypatch.setenv("SGLANG_STAND_IN_FAULT", fault)
        (test,) = verdict_of(open_backend("sglang-tree"), case, "lossless.distribution").evidence
        evidence[fault] = test.log_e
    assert evidence["residual-not-cut"] > 9
    assert evidence[""] < 3


@pytest.mark.usefixtures("stand_in")
def test_answers_of_other_requests_of_a_batch_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session((Mate((2, 7), stops=Stops(9)),), BOTH, continuous=True)
    monkeypatch.setenv("SGLANG_STAND_IN_FAULT", "answers-of-others")
    verdict = verdict_of(open_backend("sglang-ngram"), case_for("sglang-ngram", session=session))
    assert verdict.findings


LONG_MATE = Mate((2, 7, 1, 8, 2, 8), LanguageModel(CLOSE, CHAIN), stops=Stops(20))
ALIKE = Mate((3, 1, 5, 3, 1), LanguageModel(CLOSE, CHAIN), stops=Stops(9))


def session_in(setting: str, mate: Mate, first: int = 0) -> Case:
    session = Session((mate,), (BOTH[first], BOTH[1 - first]), continuous=True, setting=setting)
    return case_for("sglang", stops=Stops(20), session=session)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("setting", ["", *adapter.SETTINGS])
def test_requests_are_in_each_setting_what_they_are_alone(setting: str) -> None:
    for mate in (LONG_MATE, ALIKE):
        verdict = verdict_of(open_backend("sglang"), session_in(setting, mate))
        assert verdict.agreed, verdict.first
        assert verdict.outcomes["lossless.greedy-match"] == "checked"
        assert verdict.outcomes["acceptance.company-independent"] == "checked"


@pytest.mark.usefixtures("stand_in")
def test_a_draft_that_is_a_token_behind_under_overlap_is_found_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_STAND_IN_FAULT", "draft-behind-under-overlap")
    for setting, outcome in (("", "checked"), ("no-overlap", "failed")):
        verdict = verdict_of(open_backend("sglang"), session_in(setting, LONG_MATE), "acceptance.company-independent")
        assert verdict.outcomes["acceptance.company-independent"] == outcome


@pytest.mark.usefixtures("stand_in")
def test_a_kept_prefix_that_is_too_long_is_found_in_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_STAND_IN_FAULT", "match-too-long")
    for setting, outcome in (("", "checked"), ("radix-cache", "failed")):
        verdict = verdict_of(open_backend("sglang"), session_in(setting, ALIKE, first=1))
        assert verdict.outcomes["lossless.greedy-match"] == outcome


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("fault", ["reloads-nothing", "reload-refused"])
def test_weights_that_a_reload_leaves_as_they_are_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_STAND_IN_FAULT", fault)
    backend: Any = open_backend("sglang-ngram")
    backend.prepare(case_for("sglang-ngram"))
    other_case = case_for("sglang-ngram", model=replace(TARGET, seed=1))
    if fault == "reload-refused":
        with pytest.raises(
            Unavailable, match=r"cannot load the weights in .*: Failed to update weights: shapes differ$"
        ):
            backend.prepare(other_case)
    else:
        assert verdict_of(backend, other_case).outcomes["lossless.greedy-match"] == "failed"


@pytest.mark.usefixtures("stand_in")
def test_a_version_without_a_setting_or_an_entry_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable) as refusal:
        adapter.check_settings({"page_size": 1, "speculative_lanes": 2})
    words = "sglang 0.5.23 has no setting speculative_lanes, which the adapter of 0.5.23 gives"
    assert str(refusal.value) == words
    kind = import_module("sglang").Engine
    monkeypatch.setattr(kind, "_facts", lambda *_: {"output_ids": [1], "meta_info": {}})
    backend: Any = open_backend("sglang-ngram")
    backend.prepare(case_for("sglang-ngram"))
    with pytest.raises(Unavailable) as refusal:
        backend.run(case_for("sglang-ngram"))
    words = "sglang 0.5.23: its answers have no output_token_logprobs, which the adapter of 0.5.23 reads"
    assert str(refusal.value) == words


@pytest.mark.skipif(IS_HERE, reason="sglang is installed")
def test_an_absent_sglang_is_told_with_how_to_install_it() -> None:
    with pytest.raises(Unavailable, match=r"^sglang needs sglang, which is not installed: pip install sglang"):
        open_backend("sglang")


def test_the_declaration_says_that_no_device_ran_it() -> None:
    for row in ADAPTERS:
        if row.name in NAMES:
            assert any(line.startswith("unproven: no device") for line in row.excluded)


@pytest.mark.slow
@pytest.mark.skipif(not IS_HERE, reason="sglang is not installed")
def test_sglang_has_the_signatures_of_the_stand_in() -> None:
    forget_package("sglang")
    arguments = set(inspect.signature(import_module("sglang.srt.server_args").ServerArgs).parameters)
    parameters = set(inspect.signature(import_module("sglang").Engine.generate).parameters)
    forget_package("sglang")
    sys.path.insert(0, str(STAND_IN))
    try:
        copied = import_module("sglang")
        assert set(inspect.signature(import_module("sglang.srt.server_args").ServerArgs).parameters) <= arguments
        assert set(inspect.signature(copied.Engine.generate).parameters) <= parameters
    finally:
        sys.path.remove(str(STAND_IN))
        forget_package("sglang")
