"""Engines that are dear to open: a limit of their own, an engine for each shape of models, variables at the start."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specverify.adapt import Request, blackbox
from specverify.backends.adapt.pool import EnginePool, shape_of
from specverify.backends.admission import Misshapen, check_declaration
from specverify.backends.base import Unavailable
from specverify.backends.registry import open_backend
from specverify.isolation.ancestor import end_keeper
from specverify.isolation.backend_spec import PREPARE, BackendSpec
from specverify.isolation.isolated import Isolated
from specverify.isolation.limits import Patience
from specverify.isolation.process import EngineProcess, Limits
from specverify.properties.verdict.subject import Crash, Refusal
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Session
from specverify.reference.trace import Trace
from tests.models import LLAMA

ROOT = Path(__file__).resolve().parents[3]
SPEC = BackendSpec("tests.strangers.dear_engine:open_")


def with_fault(name: str) -> BackendSpec:
    return BackendSpec(f"tests.strangers.dear_engine:{name}")


def case_of(seed: int, *, width: int = 1) -> Case:
    """A case without a draft on a Llama; `width` times the feed-forward part makes another shape."""
    architecture = replace(LLAMA.architecture, intermediate_size=LLAMA.architecture.intermediate_size * width)
    return Case(Seeded(architecture, seed), (3, 1, 2), Scripted(()), stops=Stops(4), dtype="float32")


@pytest.fixture(scope="module")
def file_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file that engines write to; their keeper, which begins with its name, serves all tests."""
    file = tmp_path_factory.mktemp("dear") / "log"
    end_keeper()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        patch.setenv("DEAR_LOG", str(file))
        yield file
        end_keeper()


@pytest.fixture
def log(file_of_all: Path) -> Path:
    """That file, empty."""
    file_of_all.write_text("")
    return file_of_all


def answers(backend: Isolated, cases: list[Case]) -> list[Trace | Refusal | Crash]:
    subject = backend.subject()
    return [subject.outcome(case) for case in cases]


def test_one_engine_is_opened_for_each_shape_and_weights_are_loaded_in_place(log: Path) -> None:
    cases = [case_of(1), case_of(2), case_of(1, width=2), case_of(3), case_of(3, width=3), case_of(4)]
    with Isolated(SPEC) as backend:
        traces = answers(backend, cases)
    assert log.read_text().split() == ["open", "reload", "open", "reload", "close", "open", "reload"]
    for case, trace in zip(cases, traces, strict=True):
        assert isinstance(trace, Trace), trace
        assert trace.output == Oracle()(case).output


def test_a_reload_that_leaves_weights_as_they_are_gives_another_text(log: Path) -> None:
    with Isolated(with_fault("reloads_nothing")) as backend:
        traces = answers(backend, [case_of(seed) for seed in range(1, 5)])
    right = [Oracle()(case_of(seed)).output for seed in range(1, 5)]
    assert [trace.output for trace in traces if isinstance(trace, Trace)] != right
    assert all(isinstance(trace, Trace) for trace in traces)


def test_an_opening_has_its_own_limit_and_no_part_in_the_measured_one(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[tuple[str, float]] = []
    ask: Callable[..., Any] = EngineProcess.ask

    def record_request(self: EngineProcess, request: tuple[Any, ...], limit: Limits) -> Any:
        limits.append((request[0], limit.seconds))
        return ask(self, request, limit)

    monkeypatch.setattr(EngineProcess, "ask", record_request)
    patience = Patience(user_limit_s=500.0, start_s=900.0)
    with Isolated(SPEC, patience) as backend:
        answers(backend, [case_of(1), case_of(2)])
    assert {seconds for word, seconds in limits if word in ("open", PREPARE)} == {900.0}
    assert [seconds for word, seconds in limits if word == "run"] == [500.0, 500.0]
    assert len(patience._times_s) == 2


def test_an_engine_that_is_not_open_in_time_is_no_finding(log: Path) -> None:
    with Isolated(with_fault("never_open")) as backend:
        backend.patience.start_s = 1.0
        with pytest.raises(Unavailable, match=r"no engine was open within 1 s \(--start-timeout\)"):
            backend.subject().outcome(case_of(1))


@pytest.mark.slow
def test_an_engine_that_dies_while_it_is_opened_is_a_crash_of_the_case(log: Path) -> None:
    with Isolated(with_fault("dies_open")) as backend:
        outcome = backend.subject().outcome(case_of(1))
    assert isinstance(outcome, Crash)
    assert "exited with code 9 while it was opened for the case" in outcome.why


def test_a_run_that_changes_its_process_is_a_finding_and_an_opening_is_none(log: Path) -> None:
    with Isolated(with_fault("changes_in_run")) as backend:
        outcome = backend.subject().outcome(case_of(1))
    assert isinstance(outcome, Crash)
    assert "deterministic mode is True" in outcome.why
    assert "matmul precision" not in outcome.why


@pytest.mark.slow
def test_an_engine_without_reload_is_closed_for_other_weights(tmp_path: Path) -> None:
    events: list[str] = []
    for name, seed in (("first", 1), ("second", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"hidden_size": 8, "_name_or_path": f"{seed}"}))
    pool = EnginePool(
        lambda checkpoint: events.append(f"open {Path(checkpoint).name}"), close=lambda _: events.append("close")
    )
    for name in ("first", "first", "second"):
        pool.engine_for(str(tmp_path / name), None, "float32")
    assert events == ["open first", "close", "open second"]
    declining = EnginePool(
        lambda checkpoint: events.append(f"open {Path(checkpoint).name}"),
        lambda: False,
        lambda _: events.append("close"),
    )
    for name in ("first", "second"):
        declining.engine_for(str(tmp_path / name), None, "float32")
    assert events[3:] == ["open first", "close", "open second"]
    assert shape_of(str(tmp_path / "first")) == shape_of(str(tmp_path / "second"))
    (tmp_path / "second" / "config.json").write_text(json.dumps({"hidden_size": 16}))
    assert shape_of(str(tmp_path / "first")) != shape_of(str(tmp_path / "second"))


def test_an_engine_that_fails_at_a_case_is_closed_and_another_opened() -> None:
    events: list[str] = []

    def open_engine(checkpoint: str, setting: str) -> list[str]:
        events.append(f"open {setting}".strip())
        return events

    def generate(engine: list[str], prompt_ids: list[int], max_new_tokens: int) -> list[int]:
        if prompt_ids[0] == 5:
            raise RuntimeError("a kernel failed")
        return [0] * max_new_tokens

    def generate_many(engine: list[str], requests: list[Request]) -> list[list[int]]:
        return [generate(engine, request.prompt_ids, request.max_new_tokens) for request in requests]

    backend = blackbox(
        generate, open=open_engine, close=lambda engine: engine.append("close"), generate_many=generate_many,
        settings=("prefix-cache",),
    )()  # fmt: skip
    case = case_of(1)
    backend.run(case)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        backend.run(replace(case, prompt=(5,)))
    backend.run(case)
    assert events == ["open", "close", "open"]
    session = Session((), (Action("add", (0,)),), continuous=True, setting="prefix-cache")
    backend.run(replace(case, session=session))
    backend.run(case)
    assert events[3:] == ["open prefix-cache"]
    # An engine that fails may have taken from the others what they share in their process.
    with pytest.raises(RuntimeError, match="a kernel failed"):
        backend.run(replace(case, prompt=(5,)))
    backend.run(case)
    assert events[4:] == ["close", "close", "open"]
    unknown = replace(case, session=replace(session, setting="other"))
    assert backend.declaration.outside(unknown) == f"{backend.declaration.name} declares no setting other"
    with pytest.raises(Malformed, match="belongs to an engine that batches by itself"):
        replace(session, continuous=False)


WRONG_SIGNATURES: dict[str, tuple[Callable[[], Any], str]] = {
    "no open": (lambda: blackbox(lambda engine, prompt_ids, max_new_tokens: []), "takes an `engine`, and there is no"),
    "no engine": (
        lambda: blackbox(lambda prompt_ids, max_new_tokens: [], open=lambda checkpoint: None),
        "takes no `engine`, and there is an `open`",
    ),
    "open": (
        lambda: blackbox(lambda engine, prompt_ids, max_new_tokens: [], open=lambda path: None),
        "needs path, which is none of checkpoint, draft_checkpoint, dtype",
    ),
    "settings": (
        lambda: blackbox(lambda prompt_ids, max_new_tokens: [], settings=("prefix-cache",)),
        "settings, and neither `open` nor `generate_many` takes a `setting`",
    ),
    "reload": (
        lambda: blackbox(
            lambda engine, prompt_ids, max_new_tokens: [], open=lambda: None, reload=lambda weights: None
        ),
        "needs weights, which is none of engine, checkpoint, draft_checkpoint",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_SIGNATURES)
def test_a_signature_that_does_not_fit_is_refused_where_it_stands(name: str) -> None:
    make, words = WRONG_SIGNATURES[name]
    with pytest.raises(TypeError, match=words):
        make()


def test_declared_variables_are_there_when_the_process_begins(log: Path) -> None:
    with Isolated(BackendSpec("tests.strangers.dear_engine:open_with_variables")) as backend:
        outcome = backend.subject().outcome(case_of(1))
    assert isinstance(outcome, Trace), outcome
    assert outcome.output == Oracle()(case_of(1)).output


@pytest.mark.parametrize("environment", [{"X": "1"}, (("X", 1),), ("X",)])
def test_variables_are_pairs_of_texts(environment: object) -> None:
    declaration = replace(open_backend("cpu-eager").declaration, environment=environment)  # type: ignore[arg-type]
    with pytest.raises(Misshapen, match=r"declaration\.environment"):
        check_declaration(declaration)
