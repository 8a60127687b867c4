"""A run that compared too little is no pass, whatever kept it short; each way of falling short has its line."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from specverify.backends.base import Backend, Declaration, Unsupported
from specverify.backends.compositions import open_cpu
from specverify.campaign import campaign, search
from specverify.campaign.messages import Began, Broken, Died, Done, Found, Located, Opened
from specverify.campaign.search import BARREN, Search
from specverify.campaign.worker import MOST_SAID, line_about
from specverify.cli import main
from specverify.interrupts import Interrupts
from specverify.plan import Plan
from specverify.properties.invariants import ALL
from specverify.properties.shortfall import LEAST_JUDGED, shortfalls
from specverify.properties.tally import Counts, Failure, Tally
from specverify.properties.verdict.finding import Finding, Verdict
from specverify.properties.verdict.invariant import taking_turns
from specverify.reference.case import Case
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.trace import Stage, Trace
from specverify.reports import bundle
from specverify.reports.pages.summary import summary_page
from specverify.reports.writing import Unwritable
from specverify.setup.subjects import subject_of
from tests.cases import SHORTEST
from tests.inprocess import in_this_process
from tests.tiers import first

OTHER_CASE = replace(SHORTEST, prompt=(2, 1))
FINDING = Finding("lossless.completes", Stage.DRAFTED, 0, {}, "a finished run", "no run")


@dataclass
class Shy:
    """Our engine, which declines, hides or spoils what it is told to."""

    declaration: Declaration
    inner: Backend
    spoil: Callable[[Case, Trace], Trace]

    def run(self, case: Case) -> Trace:
        return self.spoil(case, self.inner.run(case))


def declining() -> Shy:
    """Declares every ability, and declines nearly every case."""
    inner = open_cpu()

    def spoil(case: Case, trace: Trace) -> Trace:
        if len(case.prompt) < 30:
            raise Unsupported("shy takes long prompts alone")
        return trace

    return Shy(replace(inner.declaration, name="shy"), inner, spoil)


def breaking() -> Shy:
    """Breaks on every case."""
    inner = open_cpu()

    def spoil(case: Case, trace: Trace) -> Trace:
        raise RuntimeError("broken")

    return Shy(replace(inner.declaration, name="breaking"), inner, spoil)


def wordless() -> Shy:
    """Declares every stage, and shows nothing but an output that is wrong."""
    inner = open_cpu()
    return Shy(
        replace(inner.declaration, name="wordless"),
        inner,
        lambda case, trace: Trace((), tuple((token + 1) % case.model.vocab_size for token in trace.output), None),
    )


def hiding() -> Shy:
    """Declares to reveal what attention returned, and never does."""
    inner = open_cpu()

    def spoil(case: Case, trace: Trace) -> Trace:
        return replace(trace, steps=tuple(replace(step, attended=None) for step in trace.steps))

    return Shy(replace(inner.declaration, name="hiding", sessions=False), inner, spoil)


def run(
    capfd: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch, folder: Path, *words: str
) -> tuple[int, str, dict[str, Any]]:
    """Exit code, page and JSON of a `diff` in this process."""
    in_this_process(patch)
    patch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(["diff", "--jobs", "1", "--json", "result.json", *words])
    assert isinstance(ended.value.code, int)
    page = " ".join(capfd.readouterr().out.split())
    return ended.value.code, page, json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize(
    ("engine", "line"),
    first(
        [
            ("hiding", "hiding declares that it reveals attended, and none of"),
            ("declining", "cases were declined"),
            ("wordless", "wordless declares that it reveals drafted, lowered, attended, scored,"),
        ],
        1,
    ),
)
def test_an_engine_that_shows_too_little_is_no_pass(
    engine: str, line: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backend = f"tests.meta.shell.test_never_short:{engine}"
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3]))
    code, page, result = run(
        capfd, monkeypatch, tmp_path, "--backend", backend, "--cases", "12", "--invariant", "structure.*"
    )
    assert code == 3
    assert page.startswith("COULD NOT JUDGE")
    assert line in page
    assert any(line in error for error in result["errors"])
    assert result["wanted"] == 12
    assert result["judged"] + sum(result["declined"].values()) <= result["cases"]


@pytest.mark.parametrize(("engine", "word"), first([("breaking", "breaks on"), ("declining", "declines")], 1))
def test_a_case_without_an_answer_of_the_reference_is_counted_with_the_reason(
    engine: str, word: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reference = f"tests.meta.shell.test_never_short:{engine}"
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3]))
    words = ("--against", reference, "--cases", "12", "--seed", "1", "--invariant", "attention.context-exact")
    code, page, result = run(capfd, monkeypatch, tmp_path, *words)
    assert code == 3
    assert "cases were declined (most often: the reference" in page
    assert all(reason.startswith(f"the reference {reference} {word} it: ") for reason in result["declined"])
    assert sum(result["declined"].values()) > 6
    assert result["findings"] == []


def tally(**facts: Any) -> Tally:
    """A run of forty cases in which everything was judged."""
    run_tally = Tally("x", cases=40, wanted=40, judged=40, opened=True, traces=40)
    run_tally.invariants = {name: Counts(checked=40) for name in ("a", "b", "c")}
    for name, value in facts.items():
        setattr(run_tally, name, value)
    return run_tally


BUDGET = "time budget of 5 s used up"
NO_MORE = "there are no more cases to draw"
SHORT: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"cases": 17}, "23 of 40 cases were not judged, and nothing says why"),
    "some declined": (
        {"cases": 17, "unsupported": {"no": 2, "never": 1}},
        "23 of 40 cases were not judged; 3 of the 17 before them were declined (most often: no)",
    ),
    "declined": ({"unsupported": {"no": 21}}, "21 of 40 cases were declined (most often: no)"),
    "silent": ({"judged": 19}, "no invariant could be judged in 21 of 40 cases"),
    "budget": (
        {"cases": 19, "judged": 19, "stopped": BUDGET},
        f"{BUDGET} after 19 of 40 cases, less than half of them",
    ),
    "no more": ({"cases": 17, "judged": 17, "stopped": NO_MORE}, f"{NO_MORE} after 17 of 40 cases, less than half"),
    "few": (
        {"cases": 9, "judged": 9, "stopped": BUDGET, "open_ended": True},
        f"{BUDGET} after 9 cases, and 10 are the least: give it more time",
    ),
    "thin": (
        {
            **{"cases": 12, "judged": 12, "stopped": BUDGET, "open_ended": True},
            "invariants": {"a": Counts(12), "b": Counts(2), "c": Counts(2), "d": Counts(not_applicable=12)},
        },
        f"{BUDGET} when 1 of 3 invariants that apply had compared something in 3 cases: give it more time",
    ),
    "no turn": (
        {"invariants": {"a": Counts(40), "b": Counts(), "c": Counts(), "d": Counts(not_applicable=40)}},
        "2 of 3 invariants that may apply had no turn in 40 cases: give it more cases",
    ),
    "unrevealed": (
        {"declared": frozenset({Stage.SCORED, Stage.EMITTED}), "revealed": frozenset({Stage.EMITTED})},
        "x declares that it reveals scored, and none of 40 traces holds it",
    ),
}


@pytest.mark.parametrize("name", SHORT)
def test_each_shortfall_has_its_line(name: str) -> None:
    facts, line = SHORT[name]
    (shortfall,) = shortfalls(tally(**facts))
    assert shortfall.startswith(line)


def test_cases_that_a_declined_run_leaves_out_have_its_reason() -> None:
    """Such as those of a prompt on a checkpoint, which are made from the prompt's plain decoding."""
    lines = shortfalls(tally(cases=1, wanted=3, judged=0, unsupported={"softcap: SDPA computes none": 1}))
    assert lines == [
        "2 of 3 cases were not judged: they need a run like those that were declined (softcap: SDPA computes none)",
        "1 of 1 cases were declined (most often: softcap: SDPA computes none): what is left is no run",
    ]


def test_a_run_that_is_whole_or_says_why_it_is_not_falls_short_of_nothing() -> None:
    assert shortfalls(tally()) == []
    assert shortfalls(tally(cases=20, judged=20, stopped=NO_MORE)) == []
    assert shortfalls(tally(cases=20, judged=20, stopped=BUDGET)) == []
    few = {"cases": LEAST_JUDGED, "judged": LEAST_JUDGED, "stopped": BUDGET, "open_ended": True}
    assert shortfalls(tally(**few)) == []
    assert shortfalls(tally(unsupported={"no": 20}, judged=20)) == []


def verdict(case: Case = SHORTEST, *findings: Finding) -> Verdict:
    return Verdict(case, "x", {"lossless.completes": "failed" if findings else "checked"}, findings)


OPENED = Opened("x", "cpu", False, {}, ("lossless.completes",), 2)


class Script:
    """A crew that says what it is told to, and remembers what it hears."""

    def __init__(self, *messages: tuple[int, object]) -> None:
        self.queue = list(messages)
        self.heard: list[str] = []
        self.replaced: list[tuple[int, tuple[str, ...]]] = []

    def __call__(self, plan: Plan, deadline: float) -> "Script":
        return self

    def messages(self, timeout: float) -> list[tuple[int, object]]:
        messages, self.queue = self.queue, []
        return messages

    def tell(self, word: str, but: int | None = None) -> None:
        self.heard.append(word)

    def replace(self, worker: int, judged: tuple[str, ...]) -> None:
        self.replaced.append((worker, judged))

    def end(self) -> None: ...


class Deaf:
    """Records in memory."""

    def __init__(self) -> None:
        self.saved: list[str] = []
        self.lost_cases: list[Case] = []

    def backend_opened(self, news: Opened) -> None: ...

    def time_estimated(self, line: str) -> None: ...

    def verdict_arrived(self, verdict: Verdict) -> str | None:
        return None

    def failure_found(self, failure: Failure, before: Failure | None) -> tuple[Failure, str | None]:
        self.saved.append(failure.verdict.case.id)
        return failure, None

    def tick_passed(self) -> None: ...

    def messages_recalled(self) -> None: ...

    def message_heard(self, place: int, message: object) -> str | None:
        return None

    def judge_raised(self, failure: Failure) -> tuple[Failure, str | None]:
        return failure, None

    def worker_lost(self, case: Case) -> str | None:
        self.lost_cases.append(case)
        return "kept.json"


def campaign_of(
    patch: pytest.MonkeyPatch, *messages: tuple[int, object], **plan: Any
) -> tuple[Tally, int | None, Script, Deaf]:
    crew, listener = Script(*messages), Deaf()
    patch.setattr(campaign, "Crew", crew)
    run_tally, code = campaign.run(Plan(**{"cases": 2, **plan}), listener)
    return run_tally, code, crew, listener


def failure(case: Case) -> Failure:
    return Failure(verdict(case, FINDING), FINDING, case.id)


def test_a_worker_that_died_is_replaced_and_judges_no_case_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    run_tally, code, crew, _ = campaign_of(
        monkeypatch,
        *((0, OPENED), (0, verdict()), (0, Began(OTHER_CASE)), (0, Died("signal SIGKILL"))),
        *((0, Began(OTHER_CASE)), (0, verdict(OTHER_CASE)), (0, Done())),
    )
    assert crew.replaced == [(0, (SHORTEST.id,))]
    assert (run_tally.outcome, code, run_tally.cases, run_tally.replaced) == ("agree", None, 2, 1)


def test_a_case_at_which_two_workers_died_is_given_up_saved_and_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    died = [(0, Began(OTHER_CASE)), (0, Died("signal SIGKILL"))]
    run_tally, _, crew, listener = campaign_of(
        monkeypatch, (0, OPENED), (0, verdict()), *died, *died, (0, Done(exhausted=True))
    )
    assert crew.replaced[-1] == (0, (SHORTEST.id, OTHER_CASE.id))
    assert listener.lost_cases == [OTHER_CASE]
    assert run_tally.exit_code == 3
    assert f"case {OTHER_CASE.id} (saved as kept.json) was given up" in run_tally.errors[0]


def test_what_a_worker_found_outlives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run_tally, _, crew, listener = campaign_of(
        monkeypatch,
        *((0, OPENED), (0, verdict(SHORTEST, FINDING)), (0, Found(failure(SHORTEST))), (0, Died("signal SIGKILL"))),
    )
    assert (run_tally.exit_code, crew.replaced, listener.saved) == (1, [], [SHORTEST.id])
    assert "while it made a failure smaller: the failure is told as it was" in run_tally.errors[0]


def test_the_first_failure_ends_the_drawing_unless_more_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [(0, OPENED), (0, verdict(SHORTEST, FINDING)), (0, Found(failure(SHORTEST)))]
    smaller = (0, Located(failure(OTHER_CASE), 1.0))
    run_tally, _, crew, listener = campaign_of(monkeypatch, *messages, smaller, (0, Done()))
    assert "enough" in crew.heard
    assert run_tally.stopped == "at the first failure; --keep-going judges the rest"
    assert listener.saved == [SHORTEST.id, OTHER_CASE.id]
    assert [found_failure.verdict.case for found_failure in run_tally.failures] == [OTHER_CASE]
    _, _, crew, _ = campaign_of(monkeypatch, *messages, smaller, (0, Done()), max_failures=2)
    assert "enough" not in crew.heard


def test_a_case_that_differed_is_exit_1_whatever_came_later(monkeypatch: pytest.MonkeyPatch) -> None:
    run_tally, _, _, _ = campaign_of(
        monkeypatch, (0, OPENED), (0, verdict(SHORTEST, FINDING)), (0, Broken("internal error", 3))
    )
    assert (run_tally.failures, run_tally.exit_code) == ([], 1)


def test_a_worker_that_ends_early_without_a_reason_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    run_tally, _, _, _ = campaign_of(monkeypatch, (0, OPENED), (0, verdict()), (0, Done()))
    assert (run_tally.exit_code, run_tally.errors) == (3, ["1 of 2 cases were not judged, and nothing says why"])


def test_a_budget_that_ran_out_after_the_last_case_cut_nothing_short(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [(0, OPENED), (0, verdict()), (0, verdict(OTHER_CASE)), (0, Done())]
    run_tally, _, _, _ = campaign_of(monkeypatch, *messages, time_budget_s=1e-9)
    assert (run_tally.stopped, run_tally.exit_code) == (None, 0)
    run_tally, _, _, _ = campaign_of(monkeypatch, *messages[:2], (0, Done()), time_budget_s=1e-9, cases=3)
    assert run_tally.exit_code == 3
    assert run_tally.stopped == "time budget of 1e-09 s used up"


def test_half_of_the_cases_is_asked_whatever_ended_the_run_unless_time_alone_was_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """91 of 500 cases agreed, and the time budget was over."""
    opened = Opened("x", "cpu", False, {}, ("lossless.completes",), 500)
    cases = [(0, verdict(replace(SHORTEST, prompt=(1, 2, number // 4, number % 4)))) for number in range(12)]
    messages = [(0, opened), *cases, (0, Done())]
    run_tally, _, _, _ = campaign_of(monkeypatch, *messages, cases=500, time_budget_s=1e-9)
    line = "time budget of 1e-09 s used up after 12 of 500 cases, less than half of them"
    assert (run_tally.exit_code, run_tally.errors) == (3, [line])
    run_tally, _, _, _ = campaign_of(monkeypatch, *messages, cases=500, time_budget_s=1e-9, open_ended=True)
    assert (run_tally.exit_code, run_tally.errors) == (0, [])
    assert "12 cases were judged in the time budget, 1 of 1 invariant had a turn" in " ".join(
        summary_page(run_tally, verbose=True).split()
    )


@pytest.mark.parametrize("count", range(1, 8))
def test_no_invariant_of_a_short_run_goes_without_a_turn_whatever_the_ids_of_its_cases(count: int) -> None:
    subject, names = subject_of(open_cpu()), {invariant.name for invariant in ALL}
    for begin in range(5):
        search = Search(Plan(cases=count), ALL, Oracle(), subject, lambda _: None, lambda: False)
        asked = set[str]()
        for length in range(1, count + 1):
            case = replace(SHORTEST, prompt=(begin,) * length)
            search._drawn_ids.add(case.id)
            asked |= {invariant.name for invariant in taking_turns(case, ALL, subject.pace, search._due(case))}
        assert asked == names


def test_a_round_that_can_draw_no_case_is_left_and_so_many_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    barren_rounds = iter((True, *(False,) * 2, *(True,) * BARREN))

    def cases_of_round(*_: object) -> SearchStrategy[Case]:
        drawn = st.builds(lambda prompt: replace(SHORTEST, prompt=prompt), st.tuples(st.integers(0, 2)))
        return drawn.filter(lambda case: False) if next(barren_rounds) else drawn

    monkeypatch.setattr(search, "cases", cases_of_round)
    judged: list[Verdict] = []
    run = Search(Plan(cases=50), (), Oracle(), subject_of(open_cpu()), judged.append, lambda: False)
    run.run()
    assert 1 <= len(judged) <= 3
    assert run.exhausted
    assert not [*barren_rounds]


@pytest.mark.parametrize("said", ["a whole run\n" * 5_000, "a_word_without_a_space_" * 5_000])
def test_an_unexpected_exception_is_one_line_however_much_it_says(said: str) -> None:
    try:
        raise ValueError(said)
    except ValueError as why:
        line = line_about(Plan(seed=3002), why)
    assert line.startswith(f"internal error in worker 2: ValueError: {said[:11]}")
    assert " ... (test_never_short.py:" in line
    assert len(line) < MOST_SAID + 100
    assert "\n" not in line


@pytest.mark.parametrize("cases", first([3, 2, 1], 1))
def test_in_a_short_run_every_invariant_has_its_turn(
    cases: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So that a run is not short by construction; invariants that take turns come once in a run of so few cases."""
    words = ("--cases", str(cases), "--invariant", "attention.*", "--verbose")
    code, page, result = run(capfd, monkeypatch, tmp_path, *words)
    assert (code, result["had_turn"]) == (0, len(result["invariants"]))
    assert f"{len(result['invariants'])} of {len(result['invariants'])} invariants had a turn" in page


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_each_signal_asks_to_end_well(name: str) -> None:
    before = signal.getsignal(getattr(signal, name))
    with Interrupts() as interrupts:
        os.kill(os.getpid(), getattr(signal, name))
        assert interrupts.word == {"SIGINT": "Ctrl-C"}.get(name, name)
        if name == "SIGINT":
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(getattr(signal, name)) == before


def test_reports_that_would_be_one_file_are_refused(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_this_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for words in (
        ["--json", ".specverify/results.jsonl"],
        ["--json", "x", "--junit", "./x"],
        ["--json", "-", "--junit", "-"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(["diff", "--cases", "1", *words])
        assert ended.value.code == 2
        assert "would be one file" in capfd.readouterr().err


@pytest.mark.slow
def test_a_finding_is_shown_where_its_bundle_cannot_be_written(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(folder: object, failure: Failure, environment: object) -> Path:
        raise Unwritable(str(folder), "No space left on device; choose another place")

    monkeypatch.setattr(bundle, "save", full)
    code, page, result = run(
        capfd,
        monkeypatch,
        tmp_path,
        "--fault",
        "kv-truncated-not-gathered",
        "--cases",
        "40",
        "--seed",
        "6",
        "--dtype",
        "float64",
    )
    assert code == 1
    assert "cpu-eager left a wrong KV cache behind a step. This is the smallest case found" in page
    assert "shows it: DIFFER cpu-eager" in page
    assert "No space left on device" in page
    assert f'"prompt": {result["findings"][0]["case"]["prompt"]}' in page


def test_results_that_cannot_be_written_are_no_pass(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_this_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specverify.reports.record.results_file", lambda folder, run: Path("/dev/full"))
    with pytest.raises(SystemExit) as ended:
        main(["diff", "--jobs", "1", "--cases", "2", "--invariant", "structure.*"])
    assert ended.value.code == 3
    assert "No space left on device" in " ".join(capfd.readouterr().out.split())
