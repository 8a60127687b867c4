"""An engine beside a reference that shows tokens alone: each fault is told rightly, right engines are left alone."""

import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from specverify.campaign.replay import replay
from specverify.cli import main
from specverify.properties.invariants import ALL, BESIDE_TOKENS, WITHOUT_ORACLE
from specverify.properties.invariants.pair import peer_of
from specverify.properties.verdict.invariant import NoReference, NotApplicable
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.peer import Peer, shared_abilities
from specverify.reference.abilities import Abilities
from specverify.reference.case import Case
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Emitted, Step, Trace
from specverify.setup.subjects import subject_of
from tests.inprocess import in_this_process
from tests.models import LLAMA

STRANGERS = Path(__file__).resolve().parents[2] / "strangers"
sys.path.insert(0, str(STRANGERS))
own_weights: Any = import_module("own_weights")
plain, plain_greedy, right, parting = (
    getattr(own_weights, name) for name in ("plain", "plain_greedy", "right", "parting")
)

CASE = Case(LLAMA, (3, 1, 4), stops=Stops(8))
WARM = replace(CASE, sampling=Sampling(1.0))


def peer(engine: Any) -> Peer:
    return Peer(subject_of(engine), engine.declaration)


def diff(
    patch: pytest.MonkeyPatch, folder: Path, backend: str, against: str, *words: str
) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a `diff` of two engines of `tests/strangers`, in this process."""
    in_this_process(patch)
    patch.chdir(folder)
    patch.setattr(sys, "path", [*sys.path, str(STRANGERS)])
    options = ["--backend", backend, "--against", against, "--jobs", "1", "--json", "result.json"]
    with pytest.raises(SystemExit) as ended:
        main(["diff", *options, *words])
    assert isinstance(ended.value.code, int)
    result_file = folder / "result.json"
    return ended.value.code, json.loads(result_file.read_text()) if result_file.exists() else {}


def refuse(case: Case) -> Trace:
    raise AssertionError("the oracle was asked")


def test_no_invariant_of_a_pair_asks_an_oracle() -> None:
    from specverify.backends.compositions import open_cpu

    chosen = [invariant for invariant in ALL if invariant.name in WITHOUT_ORACLE]
    assert {invariant.name for invariant in chosen} == WITHOUT_ORACLE
    assert judge(CASE, chosen, refuse, subject_of(open_cpu())).outcomes["lossless.stops"] == "checked"
    assert judge(WARM, chosen, refuse, subject_of(open_cpu())).outcomes["acceptance.support"] == "checked"


def test_two_right_engines_agree_by_tokens() -> None:
    for case, name in ((CASE, "pair.greedy-match"), (WARM, "pair.same-law")):
        verdict = judge(case, BESIDE_TOKENS, peer(plain()), subject_of(right()))
        assert verdict.findings == ()
        assert verdict.outcomes[name] == "checked"
        assert verdict.unsupported is None
    assert judge(CASE, BESIDE_TOKENS, Oracle(), subject_of(right())).outcomes["pair.same-law"] == "not_applicable"
    with pytest.raises(NotApplicable):
        peer_of(Oracle())


def test_a_divergence_that_repeats_is_a_difference_at_its_first_place() -> None:
    verdict = judge(CASE, BESIDE_TOKENS, peer(plain_greedy()), subject_of(parting()))
    (finding,) = verdict.findings
    assert finding.invariant == "pair.greedy-match"
    assert finding.where == {"position": 2, "side": "repeated"}


class Now:
    """An engine whose second greedy output has another first token than its first."""

    def __init__(self, engine: Any, wrong: tuple[int, ...]) -> None:
        self.declaration = engine.declaration
        self._engine = engine
        self._calls = 0
        self._wrong = wrong

    def run(self, case: Case) -> Trace:
        self._calls += 1
        trace: Trace = self._engine.run(case)
        if self._calls not in self._wrong:
            return trace
        output = ((trace.output[0] + 1) % case.model.vocab_size, *trace.output[1:])
        emitted = replace(trace.steps[0].emitted, tokens=output) if trace.steps[0].emitted else None
        return replace(trace, steps=(replace(trace.steps[0], emitted=emitted),), output=output)


def test_a_divergence_that_does_not_repeat_is_nondeterminism() -> None:
    invariants = tuple(invariant for invariant in BESIDE_TOKENS if invariant.name == "pair.greedy-match")
    (finding,) = judge(CASE, invariants, peer(plain()), subject_of(Now(right(), (1,)))).findings
    assert finding.where == {"position": 0, "side": "asked again"}
    # A reference that does not repeat its text is no reference: the case is declined, and nothing differs.
    verdict = judge(CASE, invariants, peer(Now(plain(), (1,))), subject_of(right()))
    assert verdict.findings == ()
    assert verdict.unsupported is not None
    assert "gave another output when asked again: it is nondeterministic" in verdict.unsupported


def test_a_reference_that_wavers_between_two_tokens_makes_a_tie() -> None:
    """With the text in the prompt it decodes the engine's token: its own rounding decides."""
    invariants = tuple(invariant for invariant in BESIDE_TOKENS if invariant.name == "pair.greedy-match")
    verdict = judge(CASE, invariants, peer(Now(plain(), (1, 2, 3, 4))), subject_of(right()))
    assert verdict.findings == ()
    assert [(tie.invariant, tie.position) for tie in verdict.ties] == [("pair.greedy-match", 0)]


@pytest.mark.parametrize(("gap", "outcome"), [(1e-7, "tie"), (0.05, "differ")])
def test_rule_t_decides_where_log_probabilities_are_shown(gap: float, outcome: str) -> None:
    """The engine takes the other of two tokens whose log-probabilities lie `gap` apart."""
    invariants = tuple(invariant for invariant in BESIDE_TOKENS if invariant.name == "pair.greedy-match")
    first_engine, second_engine = (
        FixedAnswer(tokens) for tokens in (((5, 1, 2), (-0.5, -1.0, -1.0)), ((5, 3, 2), (-0.5, -1.0 - gap, -1.0)))
    )
    verdict = judge(replace(CASE, stops=Stops(3)), invariants, peer(first_engine), subject_of(second_engine))
    assert [tie.position for tie in verdict.ties] == ([1] if outcome == "tie" else [])
    assert [finding.where for finding in verdict.findings] == ([] if outcome == "tie" else [{"position": 1}])


def test_log_probabilities_of_equal_tokens_are_equal() -> None:
    invariants = tuple(invariant for invariant in BESIDE_TOKENS if invariant.name == "pair.greedy-match")
    first_engine, second_engine = (FixedAnswer(((5, 1), numbers)) for numbers in ((-0.5, -1.0), (-0.5, -1.1)))
    (finding,) = judge(
        replace(CASE, stops=Stops(2)), invariants, peer(first_engine), subject_of(second_engine)
    ).findings
    assert finding.where == {"position": 1, "side": "logprobs"}


class FixedAnswer:
    """An engine that says what it is told to, with log-probabilities."""

    def __init__(self, answer: tuple[tuple[int, ...], tuple[float, ...]]) -> None:
        self.declaration = plain_greedy().declaration
        self._answer = answer

    def run(self, case: Case) -> Trace:
        tokens, numbers = self._answer
        return Trace((Step(case.prefix, emitted=Emitted(tokens, None, numbers)),), tokens, "length")


def test_real_models_part_at_what_is_no_tie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, result = diff(monkeypatch, tmp_path, "pairs:loose", "pairs:numbered", "--cases", "60", "--seed", "1")
    assert code == 1
    assert {finding["invariant"] for finding in result["findings"]} == {"pair.greedy-match"}


@pytest.mark.slow
def test_sampling_without_an_oracle_is_red_under_focus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--focus", "distribution", "--cases", "80", "--seed", "1", "--verbose")
    code, result = diff(monkeypatch, tmp_path, "own_weights:hot", "own_weights:plain", *words)
    page, before = capsys.readouterr()
    assert (code, result["outcome"], result["tokens_alone"], result["reference"]) == (
        1,
        "differ",
        True,
        "own_weights:plain",
    )
    assert "before the run: about 3200 draws" in " ".join(page.split())
    assert "sampling: about 3200 draws" in before
    assert "no oracle in its place" in " ".join(page.split())
    stream = result["sampling_tests"]["streams"][0]
    assert stream["draws"] > 0
    assert stream["smallest_shift"] < 0.5
    lines = [json.loads(line) for line in (tmp_path / ".specverify" / "results.jsonl").read_text().splitlines()]
    assert len(lines) == result["cases"]
    assert sum(len(line["evidence"]) for line in lines) == result["sampling_tests"]["tests"] == result["cases"]
    assert {line["unsupported"] for line in lines} == {None}


@pytest.mark.slow
def test_two_right_engines_stay_green_under_focus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ("--focus", "distribution", "--cases", "12", "--seed", "2")
    code, result = diff(monkeypatch, tmp_path, "own_weights:right", "own_weights:plain", *words)
    assert (code, result["judged"], result["declined"]) == (0, 12, {})
    assert result["invariants"]["pair.same-law"]["checked"] == 12


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hot", "bonus", "greedy", "frozen"])
def test_a_fault_of_sampling_is_red_within_a_default_run(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, result = diff(monkeypatch, tmp_path, f"own_weights:{name}", "own_weights:plain", "--seed", "1")
    assert code == 1
    assert {finding["invariant"] for finding in result["findings"]} <= {"pair.same-law"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hot", "greedy"])
def test_a_black_box_on_the_cases_model_is_red_too(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert diff(monkeypatch, tmp_path, f"pairs:{name}", "pairs:plain", "--seed", "3")[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_right_engines_stay_green(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, result = diff(monkeypatch, tmp_path, "own_weights:right", "own_weights:plain", "--seed", str(seed))
    assert (code, result["judged"]) == (0, 500)


def test_a_failure_of_a_pair_replays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ("--cases", "10", "--seed", "1")
    code, result = diff(monkeypatch, tmp_path, "own_weights:parting", "own_weights:plain_greedy", *words)
    assert code == 1
    (finding,) = result["findings"]
    assert "--against own_weights:plain_greedy" in finding["replay"]
    file = finding["replay"].split()[2]
    assert replay(file, "own_weights:parting", None, against="own_weights:plain_greedy").word == "FAILED"
    assert replay(file, "own_weights:right", None, against="own_weights:plain_greedy").word == "FIXED"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("own_weights:right", "own_weights:plain_greedy", "--focus", "distribution"),
            "--against own_weights:plain_greedy declares no temperature above 0, so that no case samples",
        ),
        (
            ("own_weights:parting", "own_weights:plain", "--invariant", "attention.context-exact"),
            "every invariant that matches 'attention.context-exact' needs an oracle, and the reference shows tokens",
        ),
        (("cpu-eager", "own_weights:plain", "--dtype", "float64"), "own_weights:plain declares float32 alone"),
    ],
)
def test_what_both_sides_need_is_checked_when_they_are_opened(
    words: tuple[str, ...],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, result = diff(monkeypatch, tmp_path, *words)
    message = capsys.readouterr().err
    assert (code, result) == (2, {})
    assert message.count("\n") == 1
    assert line in message


def test_cases_are_drawn_within_what_both_can_do() -> None:
    first = Abilities(
        dtypes=("float32",), max_temperature=2.0, processes=("top_k", "top_p"), families=("llama", "qwen2")
    )
    second = Abilities(dtypes=("float64", "float32"), max_temperature=8.0, processes=True, longest=90, least_window=0)
    both = shared_abilities(first, second)
    assert (both.max_temperature, both.processes, both.longest) == (2.0, ("top_k", "top_p"), 90)
    assert (both.families, both.least_window, both.dtypes) == (("llama", "qwen2"), 0, ("float32",))
    assert shared_abilities(second, replace(first, families=("mistral",))).families == ("mistral",)
    assert shared_abilities(first, replace(first, families=("mistral",))).families == ()


def test_a_reference_that_declines_a_request_is_named() -> None:
    beyond = replace(WARM, sampling=Sampling(1.0, top_k=2))
    with pytest.raises(NoReference, match="the reference plain declines it: plain declares no processing"):
        peer(plain())(beyond)


@pytest.mark.slow
def test_under_focus_every_case_samples_and_its_draws_are_about_those_planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("--focus", "distribution", "--cases", "25", "--seed", "3", "--invariant", "pair.*")
    code, result = diff(monkeypatch, tmp_path, "own_weights:right", "own_weights:plain", *words)
    assert (code, result["judged"], result["invariants"]["pair.greedy-match"]["not_applicable"]) == (0, 25, 25)
    sampling = result["sampling_tests"]
    assert 0.7 < sampling["planned"]["draws"] / sampling["streams"][0]["draws"] < 1.4
    assert 0.3 < sampling["planned"]["smallest"] / sampling["streams"][0]["smallest_shift"] < 3
    assert sampling["tests"] == 25
