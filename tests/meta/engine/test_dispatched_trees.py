"""Static trees by batch size: the engine takes the tree of the live batch, and the law stays the target's."""

from bisect import bisect_left
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

from specverify.backends import faults
from specverify.backends.compositions import open_cpu, open_engine
from specverify.properties.invariants import ALL
from specverify.properties.shrinking.cases import nearer, size
from specverify.properties.strategies.acceptance import ORACLE
from specverify.properties.strategies.draft.head import LAYERS
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.taken_steps import taken_steps
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json, case_to_json
from specverify.reference.draft import Draft, LanguageModel
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.medusa import Medusa
from specverify.reference.draft.mtp import Mtp
from specverify.reference.draft_trees import Dispatch, named_tree
from specverify.reference.malformed import Malformed
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Trace
from specverify.setup.subjects import subject_of
from tests.models import OTHER_LLAMA

TABLE = Dispatch((1, 2, 4), (named_tree("D3-BF2"), named_tree("D3"), named_tree("D1-BF3")))
SMALL = Seeded(OTHER_LLAMA.architecture, 7)
NODES = {1: 15, 2: 4, 3: 4, 4: 4}
NORMED = HiddenStates(place="normed", shift=1)
DRAWN = Sampling(temperature=1.0, draws="with-replacement")
DRAFTS: tuple[Draft, ...] = (
    LanguageModel(SMALL, TABLE),
    Eagle1(TABLE, NORMED, LAYERS[0], seed=1),
    Eagle3(TABLE, HiddenStates((-1, 0), shift=1), LAYERS[1], (2, 3, 5, 8, 9)),
    Medusa(TABLE, HiddenStates(place="normed"), 3),
    Mtp(TABLE, NORMED, LAYERS[0], 2),
)
CASE = Case(OTHER_LLAMA, (3, 1, 4, 1, 5), DRAFTS[0], stops=Stops(8), dtype="float64")
ACTIONS = (
    "add 0", "add 1", "step 0", "add 2", "step 0 1 2", "evict 1", "step 0 1", "restore 1", "preempt 0 1",
    "step 1 0", "step 1 0 2",
)  # fmt: skip


def actions_of(*words: str) -> tuple[Action, ...]:
    word_lists = [word.split() for word in words]
    return tuple(Action(kind, tuple(map(int, numbers))) for kind, *numbers in word_lists)


def session(draft: Draft, sampling: Sampling) -> Case:
    mates = Mate((5, 6, 7), draft, sampling, Stops(8)), Mate((3, 1, 2), draft, Sampling(), Stops(30))
    return replace(CASE, draft=draft, sampling=sampling, stops=Stops(30), session=Session(mates, actions_of(*ACTIONS)))


def verdict_of(case: Case, fault: str = "") -> Verdict:
    backend = open_cpu()
    if fault:
        faults.plant(backend, faults.fault_named(fault))
    return judge(case, ALL, ORACLE, subject_of(backend))


def shapes(trace: Trace) -> list[int]:
    """The number of nodes of each step's tree."""
    return [len(step.drafted.tree) for step in trace.steps if step.drafted is not None]


def traces(case: Case, batch: int, name: str) -> list[Trace]:
    """The traces of `batch` requests that take three steps together."""
    mates = tuple(Mate((5, 6, 7 + number), case.draft, case.sampling, Stops(30)) for number in range(batch - 1))
    every = tuple(range(batch))
    actions = *(Action("add", (request,)) for request in every), *(Action("step", every),) * 3
    shared = open_engine(name).run(replace(case, stops=Stops(30), session=Session(mates, actions))).shared
    assert shared is not None
    return [request for request in shared.requests if request is not None]


def bits(record: Any) -> Any:
    """All that a record of a trace holds, with each array as its dtype, shape and bytes."""
    if isinstance(record, np.ndarray):
        return record.dtype.str, record.shape, record.tobytes()
    if is_dataclass(record):
        return {field.name: bits(getattr(record, field.name)) for field in fields(record)}
    return [bits(part) for part in record] if isinstance(record, list | tuple) else record


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("draft", DRAFTS, ids=lambda draft: draft.TAG)
def test_a_request_alone_takes_the_trees_of_the_batches_that_its_case_tells(draft: Draft, sampling: Sampling) -> None:
    case = replace(CASE, draft=draft.in_batches((2, 1, 9)), sampling=sampling)
    trace, right = open_cpu().run(case), ORACLE(case)
    assert shapes(trace) == shapes(right) == [4, 15, *(4,) * (len(trace.steps) - 2)]
    assert [step.drafted.tree for step in trace.steps if step.drafted is not None] == [
        step.drafted.tree for step in right.steps if step.drafted is not None
    ]
    assert trace.output == right.output


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
def test_the_requests_of_a_session_take_the_tree_of_the_batch(sampling: Sampling) -> None:
    case = session(DRAFTS[0], sampling)
    verdict = verdict_of(case)
    assert verdict.outcomes["draft.dispatch"] == "checked"
    assert not verdict.findings
    assert verdict.trace is not None
    assert verdict.trace.shared is not None
    steps = taken_steps(case, verdict.trace.shared)
    sizes = {request: tuple(step.batch for step in request_steps) for request, request_steps in steps.items()}
    assert sizes == {0: (1, 3, 1, 2, 3), 1: (3, 2, 3), 2: (3, 3)}
    for number, trace in enumerate(verdict.trace.shared.requests):
        assert trace is not None
        assert shapes(trace) == [NODES[batch] for batch in sizes[number]]


@pytest.mark.parametrize("fault", ["dispatch-by-batch-before", "dispatch-bound-left-out"])
def test_another_tree_than_the_batchs_is_found_in_a_session_and_alone(fault: str) -> None:
    for case in (session(DRAFTS[0], Sampling()), replace(CASE, draft=DRAFTS[0].in_batches((1, 2, 1)))):
        verdict = verdict_of(case, fault)
        assert verdict.outcomes["draft.dispatch"] == "failed"
        assert verdict.findings[0].invariant == "draft.dispatch"


@pytest.mark.parametrize("name", ["cpu-eager", "cpu-split-words", "cpu-captured-drafts"])
@pytest.mark.parametrize(
    ("batch", "sampling"),
    [(1, Sampling()), (2, Sampling()), (3, Sampling()), (4, Sampling()), (5, Sampling()), (1, DRAWN)],
    ids=["1", "2", "3", "4", "5", "1-drawn"],
)
def test_a_tree_that_the_table_gives_has_the_bits_of_the_tree_given_directly(
    batch: int, sampling: Sampling, name: str
) -> None:
    # Coins are placed by the largest tree of the table, so only that tree draws with the same coins on its own.
    direct = TABLE.trees[min(bisect_left(TABLE.up_to, batch), 2)]
    by_table, direct_traces = (
        traces(replace(CASE, draft=LanguageModel(SMALL, tree), sampling=sampling), batch, name)
        for tree in (TABLE, direct)
    )
    assert len(by_table) == len(direct_traces) == batch
    for table_trace, direct_trace in zip(by_table, direct_traces, strict=True):
        assert table_trace.output == direct_trace.output
        assert shapes(table_trace) == [len(direct)] * len(table_trace.steps)
        for step, twin in zip(table_trace.steps, direct_trace.steps, strict=True):
            assert bits(step) == bits(twin)


def test_a_trace_that_does_not_tell_the_batches_is_unobserved() -> None:
    case = session(DRAFTS[0], Sampling())
    trace = open_cpu().run(case)
    assert trace.shared is not None
    subject = subject_of(open_cpu())
    subject.remember(case, replace(trace, shared=replace(trace.shared, accounts=())))
    verdict = judge(case, [invariant for invariant in ALL if invariant.name.startswith("draft.")], ORACLE, subject)
    assert verdict.outcomes["draft.dispatch"] == "unobserved"
    assert not verdict.findings


def test_a_table_is_read_from_a_case_file_told_and_shrunk() -> None:
    case = replace(CASE, draft=DRAFTS[0].in_batches((2, 1)))
    content = case_to_json(case)
    assert case_from_json(content) == case
    content["draft"]["shape"]["trees"] = ["D3-BF2", "D3", "D1-BF3"]
    assert case_from_json(content) == case
    content["draft"]["shape"]["trees"][1] = "D0"
    with pytest.raises(Malformed, match=r"^draft\.shape\.trees\[1\]: 'D0' is not"):
        case_from_json(content)
    description = "up to 1: 15 nodes (D3-BF2), up to 2: 4 nodes (D3), up to 4: 4 nodes (D1-BF3)"
    assert case.draft.description == f"model draft of a tree by batch size ({description})"
    smaller = [smaller_case for smaller_case in nearer(case) if size(smaller_case) < size(case)]
    tables = [smaller_case.draft.dispatch for smaller_case in smaller]
    assert {(1, 2), (1, 4), (2, 4)} <= {table.up_to for table in tables if table is not None}
    assert {(1,), (2,), (1, 1)} <= {table.batches for table in tables if table is not None}
    assert None in tables


def test_what_is_no_table_is_refused() -> None:
    for up_to, trees, batches, why in (
        ((), (), (), "at least one batch size"),
        ((1, 1), TABLE.trees[:2], (), "ascend"),
        ((0, 1), TABLE.trees[:2], (), "ascend from at least 1"),
        ((1, 2), TABLE.trees, (), "3 trees for 2 batch sizes"),
        ((1,), TABLE.trees[:1], (0,), "at least one request"),
    ):
        with pytest.raises(Malformed, match=why):
            Dispatch(up_to, trees, batches)
    case = session(DRAFTS[0], Sampling())
    with pytest.raises(Malformed, match="the actions decide how many requests step together"):
        replace(case, draft=case.draft.in_batches((2,)))
    with pytest.raises(Malformed, match=r"shape\.trees: rank 3 needs more than the 3 tokens"):
        LanguageModel(Seeded(OTHER_LLAMA.architecture, 7), Dispatch((1,), (named_tree("D1-BF4"),)), (1, 3, 5))
    with pytest.raises(Malformed, match="a tree of depth 3 needs as many heads, and there are 2"):
        Medusa(TABLE, HiddenStates(place="normed"), 2)
