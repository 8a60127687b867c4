"""Long prompts: drawn where kernels split, shorter for slow backends, made small in few tries, and split in fact."""

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, seed
from hypothesis import strategies as st

from specverify.backends.engine.attention.triton_launch import plan_for_cpu, plan_for_gpu
from specverify.campaign.search import Search
from specverify.plan import Plan
from specverify.properties.shrinking.cases import nearer
from specverify.properties.shrinking.sessions import lengths_below, plainer_mates
from specverify.properties.strategies import sessions
from specverify.properties.strategies.conditions import FAR, INTERPRETED, SPLIT
from specverify.properties.strategies.models import FAR as FAR_MODELS
from specverify.properties.strategies.models import FAR_POSITIONS, small_draft
from specverify.properties.strategies.prompts import LONGEST, MARKS, far_lengths, far_prompts
from specverify.properties.strategies.settings import drawing_settings
from specverify.properties.target_traits import TRAITS
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.subject import Refusal, Subject
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.tree import RankTree, Tree
from specverify.setup.subjects import open_planted, subject_of
from tests.models import TINY_LLAMA

MODEL = Seeded(FAR_MODELS[0], 0)


def tokens(length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(length).integers(0, MODEL.vocab_size, length).tolist())


def with_mate(length: int, mate_length: int) -> Case:
    """Two requests of so many prompt tokens that take one step in one batch."""
    together = (Action("add", (0,)), Action("add", (1,)), Action("step", (0, 1)))
    mate = Mate(tokens(mate_length), stops=Stops(1))
    return Case(MODEL, tokens(length), stops=Stops(1), session=Session((mate,), together), dtype="float32")


def packed(longest: int) -> Any:
    return SimpleNamespace(longest=longest, widest=8)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_the_thresholds_that_draws_aim_at_are_those_of_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    query = torch.zeros((2, 2, 8, 8), dtype=getattr(torch, name))
    least = SPLIT[name]
    assert least in MARKS
    assert not plan_for_gpu(query, 1, packed(least - 1)).splits
    assert plan_for_gpu(query, 1, packed(least)).splits > 1
    assert INTERPRETED in MARKS
    assert not plan_for_cpu(query, 1, packed(INTERPRETED - 1)).splits
    assert plan_for_cpu(query, 1, packed(INTERPRETED)).splits > 1


@pytest.mark.parametrize("most", [2048, 512])
def test_long_prompts_and_their_prefixes_end_below_at_and_above_every_mark(most: int) -> None:
    lengths = set(far_lengths(most))
    assert lengths == {mark + off for mark in (128, 256, 512, 1024, 2048) if mark <= most for off in (-1, 0, 1, 2)}
    drawn_lengths: set[int] = set()
    seed(3)(drawing_settings(20)(given(far_prompts(MODEL, most))(lambda prompt: drawn_lengths.add(len(prompt)))))()
    assert drawn_lengths <= lengths
    assert max(drawn_lengths) > LONGEST
    assert max(drawn_lengths) + 200 < FAR_POSITIONS == min(arch.max_positions for arch in FAR_MODELS)


def test_long_prompts_meet_targets_of_every_trait() -> None:
    missing = [name for name, has_trait in TRAITS.items() if not any(has_trait(arch) for arch in FAR_MODELS)]
    assert not missing


def test_a_search_draws_long_prompts_and_shorter_ones_for_a_slow_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = import_module("specverify.properties.strategies.cases")
    monkeypatch.setattr(drawing, "FAR", 1)  # all cases, where it is one in twenty
    monkeypatch.setattr(drawing, "with_mates", lambda case, layout, within: st.just(case))
    longest = {}
    for variant_interval in (1, 4):
        lengths: list[int] = []
        subject = Subject("nothing", lambda case: Refusal("it is not there"), frozenset())
        subject.variant_interval = variant_interval

        def emit(verdict: Verdict, lengths: list[int] = lengths) -> None:
            lengths.append(len(verdict.case.prompt))

        Search(Plan(cases=40), (), Oracle(), subject, emit, lambda: False).run()
        assert len(lengths) == 40
        assert min(lengths) >= MARKS[0] - 1
        longest[variant_interval] = max(lengths)
    assert longest[1] > 1000
    assert LONGEST < longest[4] <= 514


def test_mates_draft_with_another_model_where_a_model_drafts() -> None:
    shape = RankTree((0, 0), (0, 0))
    model = TINY_LLAMA
    case = Case(model, (1, 2, 3), LanguageModel(small_draft(5, 0), shape))
    drafts = set()

    def note(mate: Mate) -> None:
        drafts.add(mate.draft)

    rival = LanguageModel(small_draft(5, 1), shape)
    seed(1)(drawing_settings(40)(given(sessions.mates(case, None, rival))(note)))()
    assert drafts == {case.draft, rival}
    rivals: set[LanguageModel | None] = set()
    seed(1)(drawing_settings(60)(given(sessions.rivals(case))(lambda drawn_rival: rivals.add(drawn_rival))))()
    assert rivals == {None, rival, LanguageModel(model, shape)}


def test_a_long_prompt_is_brought_to_any_length_in_few_tries() -> None:
    """One token at a time, 2049 would come down to 1280 in more than 700 tries."""
    for goal in (1, 129, 514, 1280, 2048):
        length, tries = 2049, 0
        while shorter := [shorter_length for shorter_length in lengths_below(length) if shorter_length >= goal]:
            length, tries = shorter[0], tries + 1
        assert length == goal
        assert tries <= 15


@pytest.mark.slow
def test_a_session_of_long_prompts_is_made_small() -> None:
    """Both lanes come down to the columns that are needed, in some hundred tries."""
    case = with_mate(2049, 1030)

    def fails(smaller: Case) -> bool:
        mates = smaller.session.mates if smaller.session is not None else ()
        return len(smaller.prefix) >= 512 and any(len(mate.prompt) > 512 for mate in mates)

    tried = 0
    shrunk = True
    while shrunk:
        shrunk = False
        for smaller in nearer(case):
            tried += 1
            if fails(smaller) and len(smaller.prompt) + len(smaller.session.mates[0].prompt) < len(case.prompt) + len(  # type: ignore[union-attr]
                case.session.mates[0].prompt  # type: ignore[union-attr]
            ):
                case, shrunk = smaller, True
                break
    assert case.session is not None
    assert (len(case.prompt), len(case.session.mates[0].prompt)) == (513, 513)
    assert tried < 500
    (plain_mate, *_) = [plainer_case().session.mates[0] for plainer_case in plainer_mates(with_mate(9, 2000))]  # type: ignore[union-attr]
    assert len(plain_mate.prompt) == 1


def test_the_fault_of_split_lanes_needs_two_of_them() -> None:
    """One lane of 129 columns is split, and one of 60 beside it is not: a case with one is as it should be."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[triton]', on Linux")
    clean, faulty = (
        subject_of(open_planted("triton-interpreted", fault)) for fault in (None, "lanes-beyond-split-threshold")
    )
    for mate_length, is_same in ((60, True), (100, False)):
        case = with_mate(129, mate_length)
        logits = []
        for subject in (clean, faulty):
            shared = subject(case).shared
            assert shared is not None
            runs = [request for request in shared.requests if request is not None]
            logits.append([run.steps[0].scored.logits for run in runs if run.steps[0].scored is not None])
        assert len(logits[0]) == 2
        assert all(np.array_equal(logit, two) for logit, two in zip(*logits, strict=True)) is is_same


SHAPE = RankTree((0, 0), (0, 0))
ENTERS = (Action("add", (0,)), Action("step", (0,)))


def drafting_case(layout: str, mate_model: LanguageModel, *actions: Action) -> Case:
    pages = replace(Case(MODEL, (0,)).layout, kind=layout, page_size=1)
    model = LanguageModel(small_draft(5, 0), SHAPE)
    mate = Mate((0, 1, 2), mate_model, stops=Stops(4))
    return Case(TINY_LLAMA, (0, 1, 2), model, pages, stops=Stops(4), session=Session((mate,), actions))


FORKED = (*ENTERS, Action("fork", (0, 1)), Action("step", (1,)))
HIT_ACTIONS = (*ENTERS, Action("cancel", (0,)), Action("add", (1,)), Action("step", (1,)))
LIKE, UNLIKE = LanguageModel(small_draft(5, 0), SHAPE), LanguageModel(small_draft(5, 1), SHAPE)
TREE = Scripted((Tree((0,), (tokens(1025)[-1],)),))


@pytest.mark.parametrize(
    ("name", "example", "counterexample"),
    [
        ("prefix of 512 columns", with_mate(9, 513), with_mate(512, 512)),
        ("prefix of 1024 columns", Case(MODEL, tokens(1025), TREE), with_mate(1024, 1)),
        ("prefix of 2048 columns", with_mate(2049, 1), with_mate(2048, 1)),
        ("split-K under the interpreter", with_mate(129, 1), with_mate(128, 1)),
        ("split-K on a GPU", with_mate(513, 1), replace(with_mate(513, 1), dtype="bfloat16")),
        ("two lanes split", with_mate(513, 513), with_mate(513, 512)),
        ("two lanes split beside a short one", replace(with_mate(513, 513), session=Session(
            (Mate(tokens(513)), Mate((0,))), (*(Action("add", (request,)) for request in range(3)),
             Action("step", (0, 1, 2)))
        )), with_mate(513, 513)),
        ("fork across draft models", drafting_case("paged", UNLIKE, *FORKED), drafting_case("paged", LIKE, *FORKED)),
        ("fork across draft models", drafting_case("paged", UNLIKE, *FORKED),
         drafting_case("paged", UNLIKE, *FORKED[:-1])),
        ("prefix hit across draft models", drafting_case("prefix", UNLIKE, *HIT_ACTIONS),
         drafting_case("prefix", LIKE, *HIT_ACTIONS)),
        ("prefix hit across draft models", drafting_case("prefix", UNLIKE, *HIT_ACTIONS),
         drafting_case("paged", UNLIKE, *HIT_ACTIONS)),
    ],
)  # fmt: skip
def test_a_condition_holds_where_it_should_and_nowhere_else(name: str, example: Case, counterexample: Case) -> None:
    (condition,) = [condition for condition in FAR if condition.name == name]
    assert condition.is_met(example)
    assert not condition.is_met(counterexample)
