"""Prompts that are filled beside the trees of other requests: the numbers of prompts that are prefilled alone."""

from dataclasses import replace

import numpy as np
import pytest

from specverify.backends.compositions import open_engine
from specverify.properties.strategies.draft.head import LAYERS
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.filling import FIRST_ACCOUNT, missing_columns
from specverify.properties.verdict.taken_steps import taken_steps
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.layout import KINDS, KvLayout
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Trace
from specverify.reference.tree import RankTree, Tree
from tests.judging import verdict_of

TREE = Scripted((Tree((0, 0, 0, 1), (0, 3, 1, 2)),))
PLAIN = next(arch for arch in GALLERY if not any(arch.windows) and arch.vocab_size > 8 and not arch.recurrent)
WINDOWED = next(arch for arch in GALLERY if any(arch.windows) and arch.vocab_size > 8 and not arch.recurrent)
HYBRID = next(arch for arch in GALLERY if arch.recurrent and arch.vocab_size > 8)
PROMPT, LATE_PROMPT = (2, 1, 1, 3, 1, 2, 4, 0), (3, 1, 4, 1, 2, 0)


def session(*actions: Action, arch: Architecture = PLAIN) -> Session:
    """Two requests that enter at once and one that is added by `actions`; the second drafts by a model."""
    drafted = LanguageModel(Seeded(arch, 2), RankTree((0, 0, 1), (0, 1, 0)))
    mates = (Mate((3, 1, 2, 0), drafted, stops=Stops(6)), Mate(LATE_PROMPT, stops=Stops(6)))
    return Session(mates, (Action("add", (0,)), Action("add", (1,)), *actions))


STEPS = (
    *(Action("step", (0, 1)),) * 3,
    Action("add", (2,)),
    *(Action("step", (1, 2, 0)),) * 3,
    *(Action("step", (2, 0, 1)),) * 2,
)


def mixed(
    layout: KvLayout, arch: Architecture = PLAIN, chunk: int = 3, of_session: Session | None = None, new: int = 6
) -> Case:
    layout = replace(layout, mixed_prefill=True, prefill_chunk=chunk)
    of_session = of_session or session(*STEPS, arch=arch)
    return Case(Seeded(arch, 1), PROMPT, TREE, layout, stops=Stops(new), dtype="float64", session=of_session)


def alone_in_its_forwards(case: Case) -> Case:
    return replace(case, layout=replace(case.layout, mixed_prefill=False))


def layout_of(kind: str) -> KvLayout:
    return KvLayout(kind=kind, page_size=2 if KINDS[kind].pages else 0)


def count_equal_steps(trace: Trace, twin: Trace) -> int:
    """The steps of a mixed session, each with the numbers of the same step of the other one."""
    assert trace.shared is not None
    assert twin.shared is not None
    num_steps = 0
    for request, twin_request in zip(trace.shared.requests, twin.shared.requests, strict=True):
        if request is None or twin_request is None:
            assert request is twin_request, "it entered in both sessions or in none"
            continue
        assert request.output == twin_request.output[: len(request.output)]
        for step, twin_step in zip(request.steps, twin_request.steps, strict=False):
            assert step.scored is not None
            assert twin_step.scored is not None
            assert np.abs(step.scored.logits - twin_step.scored.logits).max() < 1e-9
            num_steps += 1
    return num_steps


@pytest.mark.parametrize("kind", KINDS)
def test_no_number_depends_on_the_forward_that_fills_a_prompt(kind: str) -> None:
    engine = open_engine("cpu-eager")
    for chunk in (0, 3):
        case = mixed(layout_of(kind), WINDOWED, chunk)
        assert count_equal_steps(engine.run(case), engine.run(alone_in_its_forwards(case))) >= 8


@pytest.mark.parametrize("arch", [PLAIN, HYBRID], ids=["plain", "hybrid"])
def test_a_mixed_session_agrees(arch: Architecture) -> None:
    verdict = verdict_of(open_engine("cpu-eager"), mixed(layout_of("paged"), arch))
    assert not verdict.findings


def test_a_prompt_shares_the_forwards_of_steps() -> None:
    engine = open_engine("cpu-eager")
    case = mixed(KvLayout())
    trace, twin = engine.run(case), engine.run(alone_in_its_forwards(case))
    # The prompts of 7, 3 and 5 tokens take 3, 1 and 2 forwards of their own, but for their turns beside trees.
    assert trace.attention_calls == twin.attention_calls - 6 * PLAIN.layers


def test_a_request_takes_no_step_before_its_prompt_is_filled() -> None:
    case = mixed(KvLayout())
    shared = open_engine("cpu-eager").run(case).shared
    assert shared is not None
    steps = taken_steps(case, shared)
    # Of its 8, 8 and 5 turns request 0 fills three times, request 1 once and request 2 twice.
    assert [step.action for step in steps[0]][:1] == [6]
    assert [step.action for step in steps[1]][:1] == [3]
    assert [step.action for step in steps[2]][:1] == [8]
    assert [step.batch for step in steps[1]][:2] == [1, 1]
    assert missing_columns(case, shared)[:4] == ({}, {0: 7}, {0: 7, 1: 3}, {0: 7})
    committed = [account.committed.get(2) for account in (FIRST_ACCOUNT, *shared.accounts)][6:9]
    assert committed == [0, 3, 5]


def test_an_action_that_reads_the_text_fills_the_prompt_first() -> None:
    actions = (Action("step", (0, 1)), Action("evict", (0,)), Action("step", (1,)), Action("restore", (0,)))
    behind = (Action("step", (0, 1)),) * 4
    engine = open_engine("cpu-eager")
    for between in (actions, (Action("preempt", (0,)),), (Action("hand-over", (0,)),), (Action("launch", (0, 1)),)):
        case = mixed(layout_of("prefix"), of_session=session(*between, *behind))
        trace = engine.run(case)
        assert count_equal_steps(trace, engine.run(alone_in_its_forwards(case))) >= 3
        verdict = verdict_of(engine, case)
        assert not verdict.findings


def test_pages_of_a_prompt_that_was_cancelled_half_filled_serve_as_far_as_it_was() -> None:
    entry = (Action("add", (0,)), Action("step", (0,)), Action("cancel", (0,)), Action("add", (1,)))
    of_session = Session((Mate(PROMPT, stops=Stops(4)),), (*entry, *(Action("step", (1,)),) * 5))
    case = mixed(KvLayout(kind="prefix", page_size=2), chunk=4, of_session=of_session)
    trace = open_engine("cpu-eager").run(case)
    assert trace.shared is not None
    assert len(trace.shared.accounts[2].kept) == 2
    assert trace.shared.accounts[3].committed == {1: 4}
    verdict = verdict_of(open_engine("cpu-eager"), case)
    assert not verdict.findings


def test_hidden_states_and_scores_of_the_prompt_are_those_of_all_chunks() -> None:
    head = Eagle1(RankTree((0, 0, 1), (0, 1, 0)), HiddenStates(place="normed", shift=1), LAYERS[0], seed=1)
    engine = open_engine("cpu-eager")
    case = replace(mixed(layout_of("paged")), draft=head, sampling=Sampling(prompt_logprobs=True))
    trace, twin = engine.run(case), engine.run(alone_in_its_forwards(case))
    assert trace.prompt_logprobs == pytest.approx(twin.prompt_logprobs, abs=1e-9)
    assert not verdict_of(engine, case).findings


def test_an_engine_without_it_declines() -> None:
    case = mixed(KvLayout())
    able = Abilities(dtypes=("float64",), drafts=("scripted", "model"), sessions=True, actions=("add", "step"))
    assert able.outside(case) is None
    assert replace(able, layout_settings=("prefill_chunk",)).outside(case) == "KV layout with mixed_prefill"
    assert "mixed_prefill" not in open_engine("cpu-handed-over").declaration.layout_settings
    assert "mixed_prefill" not in open_engine("triton-interpreted").declaration.layout_settings
