"""The door's other sides: sessions, live sessions, tables, declarations, and a campaign that meets a first adapter."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specverify import backends
from specverify.backends.admission import LiveAdmission, Misshapen, admit_blocks, admit_trace
from specverify.backends.base import Declaration
from specverify.backends.compositions import open_cpu
from specverify.backends.registry import UnknownBackend, open_backend
from specverify.backends.shipped import ROWS
from specverify.campaign.search import Search
from specverify.plan import Plan
from specverify.properties.invariants import ALL
from specverify.properties.tally import Failure
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Crash, NoTrace
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.layout import KvLayout
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.probability_world import Blocks, World
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Event, Mate, Session
from specverify.reference.tape import stride
from specverify.reference.trace import Shared, Stage, Trace
from specverify.reference.tree import RankTree, Shape, Tree
from specverify.reports import bundle
from specverify.setup.subjects import subject_of
from tests.models import LLAMA

ENGINE = open_cpu()
DECLARED = ENGINE.declaration
ADD, STEP, FORK = Action("add", (0,)), Action("step", (0,)), Action("fork", (0, 2))
ACTIONS = (ADD, STEP, Action("add", (1,)), FORK, Action("step", (2, 1)))
CASE = Case(
    LLAMA,
    (3, 1, 4),
    Scripted((Tree((0, 0, 1), (4, 2, 5)),)),
    KvLayout(kind="paged", page_size=2),
    stops=Stops(6),
    session=Session((Mate((5, 5)), Mate((7,))), ACTIONS),
)
"""Three requests: one alone, one beside it, and a fork of the first."""


rebuilt: Any = replace
"""`dataclasses.replace` for values of types that the fields are not declared to have."""


@cache
def clean() -> Trace:
    return ENGINE.run(CASE)


def with_session_fields(**changes: Any) -> Trace:
    """The clean trace with fields of what it says of the session changed."""
    return replace(clean(), shared=rebuilt(clean().shared, **changes))


def account(**changes: Any) -> Trace:
    """The clean trace with fields of the last account changed."""
    session_trace = clean().shared
    assert session_trace is not None
    return with_session_fields(accounts=(*session_trace.accounts[:-1], replace(session_trace.accounts[-1], **changes)))


def requests() -> tuple[Any, ...]:
    session_trace = clean().shared
    assert session_trace is not None
    return session_trace.requests


def prompts() -> tuple[Any, ...]:
    session_trace = clean().shared
    assert session_trace is not None
    return session_trace.prompts


def spoil_logits(trace: Trace) -> Trace:
    """A request's trace without the last column of its first logits."""
    first = trace.steps[0]
    assert first.scored is not None
    scored = replace(first.scored, logits=first.scored.logits[:, :-1])
    return replace(trace, steps=(replace(first, scored=scored), *trace.steps[1:]))


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing of the session": (
        lambda: replace(clean(), shared=None),
        "shared, of a session of 3 requests: None, expected specverify.reference.trace.Shared",
    ),
    "a list of traces": (
        lambda: rebuilt(clean(), shared=requests()),
        "shared, of a session of 3 requests: tuple of 3 (Trace), expected specverify.reference.trace.Shared",
    ),
    "a request too few": (
        lambda: with_session_fields(requests=requests()[:2]),
        "shared.requests: 2 traces, expected a trace or None for each of 3 requests",
    ),
    "a request that is a list of tokens": (
        lambda: with_session_fields(requests=(requests()[0], [1, 2], None)),
        "request 1, its trace: list of 2 (int), expected specverify.reference.trace.Trace",
    ),
    "a request's logits": (
        lambda: with_session_fields(requests=(requests()[0], spoil_logits(requests()[1]), requests()[2])),
        "request 1, step 0, scored.logits: float32 array [1, 16], expected float [nodes=1, vocabulary=17]",
    ),
    "a session inside a request": (
        lambda: with_session_fields(requests=(requests()[0], clean(), requests()[2])),
        "request 1, shared: Shared, expected None in the trace of one request",
    ),
    "a prompt too few": (
        lambda: with_session_fields(prompts=prompts()[:2]),
        "shared.prompts: 2 prompts, expected a prompt for each of 3 requests",
    ),
    "no prompt": (
        lambda: with_session_fields(prompts=(prompts()[0], (), prompts()[2])),
        "shared.prompts[1]: 0 tokens, expected a prompt that ends with the request's own 2 tokens",
    ),
    "another prompt": (
        lambda: with_session_fields(prompts=(prompts()[0], (5, 6), prompts()[2])),
        "shared.prompts[1]: 2 tokens, expected a prompt that ends with the request's own 2 tokens",
    ),
    "a prompt longer than the model": (
        lambda: with_session_fields(prompts=(*prompts()[:2], (1,) * 5000 + prompts()[2])),
        "shared.prompts[2]: 5005 tokens, expected a prompt that the case admits (prompt: needs up to 5021 positions; ",
    ),
    "accounts by action": (
        lambda: with_session_fields(accounts={0: None}),
        "shared.accounts: dict, expected a tuple of specverify.reference.session.Account",
    ),
    "an account as a dict": (
        lambda: with_session_fields(accounts=({"free": ()},)),
        "shared.accounts[0]: dict, expected specverify.reference.session.Account",
    ),
    "a pool of a billion pages": (
        lambda: account(total=10**9),
        "shared.accounts[4].total: 1000000000, expected an int from 0 to 16777216",
    ),
    "a table of a stranger": (
        lambda: account(tables={7: (0,)}),
        "shared.accounts[4].tables's key: 7, expected an int from 0 to 2",
    ),
    "tables as lists of lists": (
        lambda: account(tables=[[0], [1]]),
        "shared.accounts[4].tables: list of 2 (list), expected a dict by request number",
    ),
    "a table without its length": (
        lambda: account(committed={}),
        "shared.accounts[4].committed: no entry for request 0, expected one for each request with a block table",
    ),
    "a page in words": (
        lambda: account(kept=("none",)),
        "shared.accounts[4].kept[0]: 'none', expected an int",
    ),
    "events by action": (
        lambda: with_session_fields(events={0: None}),
        "shared.events: dict, expected a tuple of specverify.reference.session.Event",
    ),
    "an event as a dict": (
        lambda: with_session_fields(events=({"kind": "launched"},)),
        "shared.events[0]: dict, expected specverify.reference.session.Event",
    ),
    "an event of another kind": (
        lambda: with_session_fields(events=(Event("resolved", 0, 0, 0),)),
        "shared.events[0].kind: 'resolved', expected one of launched, counted, skipped",
    ),
    "an event of a stranger": (
        lambda: with_session_fields(events=(Event("launched", 0, 7, 0),)),
        "shared.events[0].request: 7, expected an int from 0 to 2",
    ),
}


@pytest.mark.parametrize(("make", "line"), WRONG.values(), ids=WRONG)
def test_a_session_that_cannot_be_judged_is_one_finding(make: Callable[[], Any], line: str) -> None:
    looking = [invariant for invariant in ALL if invariant.every == 1]
    adapter = SimpleNamespace(declaration=DECLARED, run=lambda case: make())
    verdict = judge(CASE, looking, Oracle(), subject_of(adapter))
    (finding,) = verdict.findings
    assert finding.invariant == "lossless.completes"
    assert str(finding.observed).startswith(line)


def test_a_session_is_admitted_whole_and_in_other_forms() -> None:
    session_trace = clean().shared
    assert session_trace is not None
    forms = rebuilt(
        session_trace,
        requests=list(session_trace.requests),
        prompts=[np.array(prompt) for prompt in session_trace.prompts],
        accounts=[
            rebuilt(lane_account, free=list(lane_account.free), total=np.int64(lane_account.total))
            for lane_account in session_trace.accounts
        ],
    )
    admitted_session = admit_trace(replace(clean(), shared=forms), CASE, DECLARED).shared
    assert admitted_session is not None
    assert (admitted_session.prompts, admitted_session.accounts) == (session_trace.prompts, session_trace.accounts)
    assert [type(request) for request in admitted_session.requests] == [Trace] * 3
    assert admitted_session.requests[0] is not None
    assert admitted_session.requests[0].output == requests()[0].output
    absent = with_session_fields(requests=(requests()[0], None, None), prompts=(prompts()[0], (), ()))
    assert admit_trace(absent, CASE, DECLARED).shared is not None


class Live:
    """A live session that shows `trace`."""

    def __init__(self, trace: Any) -> None:
        self.trace = trace

    def do(self, action: Action) -> None:
        """Nothing happens."""


def test_a_live_session_that_shows_something_else_has_no_trace() -> None:
    adapter = SimpleNamespace(declaration=DECLARED, run=ENGINE.run, serve=lambda case: Live(requests()))
    serve = subject_of(adapter).serve
    assert serve is not None
    live = serve(CASE)
    with pytest.raises(NoTrace, match="what run returned: tuple of 3") as error:
        _ = live.trace
    assert isinstance(error.value.outcome, Crash)


def test_steps_of_a_live_session_are_looked_at_once() -> None:
    door = LiveAdmission(CASE, DECLARED)
    live = ENGINE.serve(CASE)
    first = door.admit(live.trace)
    live.do(Action("step", (0,)))
    second = door.admit(live.trace)
    assert len(second.steps) == len(first.steps) + 1
    assert second.steps[0] is first.steps[0]


def test_a_switch_makes_another_vocabulary_of_the_draft_possible() -> None:
    model = LanguageModel(LLAMA, RankTree((0, 0), (0, 0)))
    reduced = replace(model, vocabulary=(0, 1, 2, 3, 5, 8))
    case = replace(CASE, draft=model, session=Session((), (ADD, STEP)))
    door, live = LiveAdmission(case, DECLARED), ENGINE.serve(case)
    door.admit(live.trace)
    with pytest.raises(Misshapen, match=r"step 0, drafted.logits: .* expected float \[nodes=2, draft vocabulary=17\]"):
        LiveAdmission(case, DECLARED).admit(narrow_logits(live.trace))
    for action in (Action("switch", (0,), reduced), STEP):
        live.do(action)
        door.do(action)
    assert len(door.admit(live.trace).steps) == 2


def narrow_logits(trace: Trace) -> Trace:
    """The trace with six draft logits for each node of its first step, in the session as well."""
    drafted = trace.steps[0].drafted
    assert drafted is not None
    assert drafted.logits is not None
    step = replace(trace.steps[0], drafted=replace(drafted, logits=drafted.logits[:, :6]))
    lone_trace = replace(trace, steps=(step,), shared=None)
    assert trace.shared is not None
    return replace(lone_trace, shared=replace(trace.shared, requests=(lone_trace,)))


# Tables.

SHAPE = Shape((0, 0, 1))
WORLD = World(SHAPE, np.zeros((1, 3)), np.zeros((1, 1, 3)), Sampling(1.0))
TAPE = np.full((5, stride(3)), 0.25)
TABLES: dict[str, tuple[Callable[[Blocks], Any], str]] = {
    "a tuple": (lambda blocks: (blocks.path, blocks.tokens), "the tables' answer: tuple of 2 (ndarray), expected "),
    "None": (lambda _: None, "the tables' answer: None, expected specverify.reference.probability_world.Blocks"),
    "a request too few": (
        lambda blocks: replace(blocks, path=blocks.path[1:]),
        "path: int64 array [4, 3], expected int [requests=5, height + 1=3]",
    ),
    "no room for the bonus": (
        lambda blocks: replace(blocks, tokens=blocks.tokens[:, :-1]),
        "tokens: int64 array [5, 2], expected int [requests=5, height + 1=3]",
    ),
    "floats": (
        lambda blocks: replace(blocks, tokens=blocks.tokens * 1.0),
        "tokens: float64 array [5, 3], expected int [",
    ),
    "a token beyond the vocabulary": (
        lambda blocks: replace(blocks, tokens=blocks.tokens + 3),
        "tokens: 5, expected a token from 0 to 2, or -1 for nothing",
    ),
    "a node that is none": (
        lambda blocks: replace(blocks, path=blocks.path - 2),
        "path: -2, expected a node from 0 to 2, or -1",
    ),
    "an interval for each request": (
        lambda blocks: replace(blocks, low=np.zeros(5)),
        "low: float64 array [5], expected float [requests=5, coins=10]",
    ),
}


@pytest.mark.parametrize(("change", "line"), TABLES.values(), ids=TABLES)
def test_tables_that_answer_something_else_break_at_acceptance(change: Callable[[Blocks], Any], line: str) -> None:
    clean_blocks = ENGINE.rounds(WORLD, TAPE)
    wrong = change(replace(clean_blocks, tokens=np.where(clean_blocks.tokens < 0, -1, 2)))
    adapter = SimpleNamespace(
        declaration=DECLARED,
        run=ENGINE.run,
        verify=lambda given_tree, tape: wrong,
        rounds=lambda world, tape: wrong,
        samples=lambda world, seeds: wrong,
    )
    tables = subject_of(adapter).tables
    assert tables is not None
    for ask, drawn_by in ((tables.rounds, TAPE), (tables.samples, np.arange(5))):
        with pytest.raises(NoTrace) as error:
            ask(WORLD, drawn_by)
        assert isinstance(error.value.outcome, Crash)
        assert error.value.outcome.stage is Stage.ACCEPTED
        assert error.value.outcome.why.startswith(line)


def test_tables_may_answer_with_lists_and_tensors() -> None:
    blocks = ENGINE.rounds(WORLD, TAPE)
    forms = Blocks(blocks.path.tolist(), torch.tensor(blocks.tokens).int(), torch.tensor(blocks.low).float())  # type: ignore[arg-type]
    admitted_blocks = admit_blocks(forms, 5, SHAPE, 3, stride(3))
    np.testing.assert_array_equal(admitted_blocks.path, blocks.path)
    np.testing.assert_array_equal(admitted_blocks.tokens, blocks.tokens)
    assert admitted_blocks.low is not None
    assert admitted_blocks.high is None


# Declarations.

# fmt: off
DECLARATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "dtypes a word": ({"dtypes": "float32"}, "dtypes: 'float32', expected a tuple of words: float64, float32"),
    "no dtypes": ({"dtypes": ()}, "dtypes: an empty tuple, expected at least one dtype, the default first"),
    "dtypes of torch": ({"dtypes": (torch.float32,)}, "dtypes[0]: dtype, expected one of float64, float32"),
    "an unknown dtype": ({"dtypes": ("float32", "fp8")}, "dtypes[1]: 'fp8', expected one of float64"),
    "reveals words": ({"reveals": ["scored"]}, "reveals: list of 1 (str), expected a frozenset of"),
    "reveals a set of words": ({"reveals": {"scored"}}, "reveals: a set with 'scored', expected a frozenset of"),
    "reveals one stage": ({"reveals": Stage.SCORED}, "reveals: Stage, expected a frozenset of"),
    "an unknown layout": ({"layouts": ("ring",)}, "layouts[0]: 'ring', expected one of branch, overwrite"),
    "an unknown draft": ({"drafts": ("eagle",)}, "drafts[0]: 'eagle', expected one of model, ngram, scripted"),
    "an unknown commit": ({"commits": ("copy",)}, "commits[0]: 'copy', expected one of path, fast, length"),
    "an unknown rule": ({"rules": ("greedy",)}, "rules[0]: 'greedy', expected one of chain, multi-round"),
    "an unknown stop": ({"stops": ("eos_token",)}, "stops[0]: 'eos_token', expected one of max_new_tokens, eos"),
    "a set of drafts": ({"drafts": {"model"}}, "drafts: set, expected a tuple of words: model, ngram, scripted"),
    "no name": ({"name": " "}, "name: ' ', expected a word"),
    "a device of torch": ({"device": torch.device("cpu")}, "device: device, expected a word"),
    "sessions in words": ({"sessions": "no"}, "sessions: 'no', expected True or False"),
    "no temperature": ({"max_temperature": None}, "max_temperature: None, expected a number"),
    "a temperature not finite": ({"max_temperature": float("nan")}, "max_temperature: nan, expected a temperature of"),
    "every zeroth": ({"variant_interval": 0}, "variant_interval: 0, expected an int of at least 1"),
}
# fmt: on


@pytest.mark.parametrize(("changes", "line"), DECLARATIONS.values(), ids=DECLARATIONS)
def test_a_declaration_of_what_there_is_not_is_refused_when_opened(
    changes: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("first_adapter")
    declaration: Declaration = replace(DECLARED, **changes)
    module.make = lambda: SimpleNamespace(declaration=declaration, run=ENGINE.run)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "first_adapter", module)
    with pytest.raises(UnknownBackend) as error:
        open_backend("first_adapter:make")
    assert str(error.value).startswith(f"backend 'first_adapter:make': declaration.{line}")
    assert "\n" not in str(error.value)


def test_declarations_with_lists_and_sets_are_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("first_adapter")
    declaration = rebuilt(DECLARED, dtypes=["float32"], reveals={Stage.EMITTED}, max_temperature=1, device="mps")
    module.make = lambda: SimpleNamespace(declaration=declaration, run=ENGINE.run)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "first_adapter", module)
    assert open_backend("first_adapter:make").declaration is declaration
    assert open_backend(ROWS[0].name).declaration.name == "cpu-eager"


# A campaign.


def test_a_first_adapter_s_mistake_is_found_shrunk_and_saved(tmp_path: Path) -> None:
    def run(case: Case) -> Any:
        trace = ENGINE.run(case)
        return trace if len(case.prompt) < 3 else list(trace.output)

    verdicts: list[Any] = []
    adapter = SimpleNamespace(declaration=replace(DECLARED, sessions=False), run=run)
    plan = Plan(cases=60, dtypes=("float32",), shrink_s=10)
    looking = tuple(invariant for invariant in ALL if invariant.every == 1)
    search = Search(plan, looking, Oracle(), subject_of(adapter), verdicts.append, lambda: False)
    search.run()
    failure = search.failure()
    assert isinstance(failure, Failure)
    assert failure.finding.invariant == "lossless.completes"
    assert str(failure.finding.observed).startswith("what run returned: list of ")
    assert len(failure.verdict.case.prompt) == 3
    assert all({finding.invariant for finding in verdict.findings} <= {"lossless.completes"} for verdict in verdicts)
    assert any(verdict.agreed and len(verdict.case.prompt) < 3 for verdict in verdicts)
    assert bundle.load(str(bundle.save(tmp_path, failure, {}))).case == failure.verdict.case


def test_the_door_needs_no_torch() -> None:
    folder = Path(backends.__file__).parent / "admission"
    files = sorted(folder.glob("*.py"))
    assert len(files) > 5
    assert [file.name for file in files if "import torch" in file.read_text()] == []


def test_what_is_shared_of_no_session_is_refused() -> None:
    alone = CASE.alone()
    trace = replace(ENGINE.run(alone), shared=Shared((clean(),), ((3, 1, 4),)))
    with pytest.raises(Misshapen, match="shared: Shared, expected None: the case has no session"):
        admit_trace(trace, alone, DECLARED)
