"""A server a step ahead of its host: early first tokens, streams, and thousands of drawn interleavings."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specverify.backends.engine.kv.arena import Arena
from specverify.backends.engine.overlap import Futures, Place
from specverify.backends.engine.overlap_server import (
    CudaStream,
    ImmediateStream,
    cut_commit,
    fits,
    stream_on,
)
from specverify.conformance.drawn import refuse
from specverify.properties.invariants import ALL
from specverify.properties.live.play import ROUND, play
from specverify.properties.live.watch import SessionStats
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.draft_trees import Expansion
from specverify.reference.grammar import Grammar
from specverify.reference.layout import KINDS, KvLayout
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Committed, Kv, Trace, frozen
from specverify.reference.tree import RankTree
from specverify.setup.subjects import open_planted, subject_of
from tests.models import LLAMA

STEPS = 20_000
"""Steps of single requests that the slow test launches ahead."""


def act(kind: str, *requests: int) -> Action:
    return Action(kind, requests)


def serve_actions(*actions: Action) -> tuple[Case, Trace]:
    """A request with a model draft and its mate, served by `actions`; no invariant finds anything."""
    model = LLAMA
    draft = LanguageModel(model, RankTree((0, 0, 0, 1), (0, 0, 1, 0)))
    mate = Mate((2, 9, 4), Scripted(), stops=Stops(5))
    layout = KvLayout(kind="paged", page_size=2)
    case = Case(model, (3, 14, 5), draft, layout, stops=Stops(7), session=Session((mate,), actions))
    subject = subject_of(open_planted("cpu-eager", None))
    invariants = [
        invariant for invariant in ALL if invariant.every == 1 and invariant.name != "lossless.draft-independent"
    ]
    assert not judge(case, invariants, Oracle(), subject).findings
    return case, subject(case)


def test_a_first_token_does_not_wait_for_the_draft_and_the_order_changes_no_text() -> None:
    steps = (act("step", 0, 1),) * 6
    early = serve_actions(act("add", 0), act("first", 0), act("add", 1), act("first", 1, 0), *steps)[1]
    late = serve_actions(act("add", 0), act("add", 1), *steps)[1]
    first = early.steps[0]
    # The draft has run nothing before the first token is there.
    assert first.drafted is not None
    assert len(first.drafted.tree) == 1
    assert first.committed is not None
    assert first.committed.draft is None
    assert early.steps[2].drafted is not None
    assert len(early.steps[2].drafted.tree) == 4
    assert early.shared is not None
    assert late.shared is not None
    for early_request, late_request in zip(early.shared.requests, late.shared.requests, strict=True):
        assert early_request is not None
        assert late_request is not None
        assert (early_request.output, early_request.finish) == (late_request.output, late_request.finish)


def test_a_placeholder_stands_for_the_tokens_of_its_own_launch() -> None:
    futures = Futures()
    first_place, second_place = Place(3, 0, 7, 0), Place(4, 0, 7, 1)
    futures.put(first_place, [5, 6])
    futures.put(second_place, [8])
    assert first_place.placeholder == second_place.placeholder == -8
    assert futures.fill(3, [1, 2, -8]) == [1, 2, 5, 6]
    assert futures.fill(4, [1, -8]) == [1, 8]
    futures.drop(first_place)
    with pytest.raises(KeyError):
        futures.fill(3, [1, -8])
    assert futures.fill(4, [-8]) == [8]


def test_two_blocks_are_reserved_and_positions_count_what_is_in_flight() -> None:
    chain = LanguageModel(LLAMA, RankTree((0, 0, 1), (0, 0, 0)))
    assert Arena(KvLayout()).reserved_columns(chain) == 2 * 3
    assert Arena(KvLayout(padded_nodes=5)).reserved_columns(chain) == 2 * 5
    candidates = LanguageModel(LLAMA, Expansion(3, 4, 5))
    assert Arena(KvLayout()).reserved_columns(candidates) == 2 * 12, "the draft writes more columns than the tree has"
    case = Case(LLAMA, (1, 2))
    most = case.max_positions
    # A bare root may accept one token in flight, and stands on one position itself.
    assert fits(case, most - 1, 1)
    assert not fits(case, most, 1)


def test_a_cut_commit_shows_the_columns_that_the_host_keeps() -> None:
    columns = frozen(torch.arange(8.0).reshape(1, 1, 4, 2).numpy())
    kv = Kv(columns, columns)
    commit = Committed(4, kv, kv, kv, kv)
    assert cut_commit(commit, 4) is commit
    short = cut_commit(commit, 3)
    assert short.length == 3
    assert short.before is kv
    assert short.after is not None
    assert short.after.keys.tolist() == columns[:, :, :3].tolist()
    # A ring has let go of columns: what it would hold at this length is not known.
    assert cut_commit(replace(commit, after=replace(kv, first=(1,))), 3).after is None


def test_a_grammar_reads_one_result_ahead_of_the_host_alone() -> None:
    """The host takes the first of two results in flight before the grammar reads the second, for a preemption too."""
    model = LLAMA
    words = tuple(("61", "62")[token % 2] for token in range(model.vocab_size))
    actions = (act("add", 0), act("launch", 0), act("launch", 0), act("preempt", 0), act("step", 0))
    sampling = Sampling(grammar=Grammar("regex", "(a|b)*a(a|b){2}", words))
    case = Case(model, (3, 14, 5), sampling=sampling, stops=Stops(4), session=Session((Mate((2,)),), actions))
    trace = subject_of(open_planted("cpu-eager", None))(case)
    read = [step.committed.matched for step in trace.steps if step.committed is not None]
    assert read == [1, 2, 3]


def test_a_cpu_executes_at_launch() -> None:
    calls: list[int] = []
    stream = stream_on(torch.device("cpu"))
    assert isinstance(stream, ImmediateStream)
    result, wait = stream.launch(lambda: calls.append(1) or 7)  # type: ignore[func-returns-value]
    assert (result, calls) == (7, [1])
    wait()


@pytest.mark.cuda
def test_a_cuda_stream_executes_in_order_and_tells_when_it_is_done() -> None:
    device = torch.device("cuda")
    stream = stream_on(device)
    assert isinstance(stream, CudaStream)
    cells = torch.zeros(512, 512, device=device)
    waits = [stream.launch(lambda: cells.add_(1.0).matmul(cells).shape)[1] for _ in range(8)]
    for wait in waits:
        wait()
    assert float(cells.max()) == 8.0


@pytest.mark.slow
def test_twenty_thousand_launched_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Live sessions of every layout; each action is checked, and one session in eight by every invariant."""
    subject, oracle, played = subject_of(open_planted("cpu-eager", None)), Oracle(), SessionStats()
    number = 0
    while played.events["launched"] < STEPS:
        kind = tuple(KINDS)[number % len(KINDS)]
        refuse(play(subject, oracle, played, kind, sessions=ROUND, number=7_000 + number, judged=8), tmp_path)
        number += 1
        if number % 8 == 0:
            with capsys.disabled():
                print(played.sessions, dict(played.events), flush=True)  # noqa: T201
    assert played.events["skipped"] > 0
    assert played.events["launched"] >= played.events["counted"] + played.events["skipped"]


def test_a_preempted_launch_stands_behind_one_step_in_flight() -> None:
    """Its block has the room of a launch: two steps in flight before it would need the pages of three."""
    draft = LanguageModel(LLAMA, RankTree((0, 0, 1), (0, 0, 0)))
    actions = (Action("add", (0,)), *(Action("launch", (0,)),) * 3, Action("preempt", (0,)), Action("launch", (0,)))
    layout = KvLayout(kind="paged", page_size=1)
    session = Session((Mate((2,), Scripted(), Sampling(), Stops(2)),), actions)
    case = Case(LLAMA, (3, 1, 4), draft, layout, stops=Stops(20), dtype="float64", session=session)
    verdict = judge(case, ALL, Oracle(), subject_of(open_planted("cpu-eager", None)))
    assert verdict.agreed, verdict.first
    assert verdict.outcomes["cache.allocator-conserves"] == "checked"
