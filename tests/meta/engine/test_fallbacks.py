"""Fallbacks of attention are counted from the engine to every report, and a run that was all fallback is no pass."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from specverify.backends.base import Backend
from specverify.backends.engine.attention.eager import eager
from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.composition import SEAMS
from specverify.backends.shipped import ROWS
from specverify.cli import main
from specverify.properties.invariants import ALL
from specverify.properties.strategies.models import GALLERY
from specverify.properties.tally import Counts, Failure, Tally, nothing_fused
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Session
from specverify.reference.trace import CHOSEN
from specverify.reference.tree import RankTree, Tree
from specverify.reports.pages.summary import summary_page
from specverify.reports.pages.terminal import failure_page
from specverify.reports.record import summary, verdict_line
from specverify.setup.subjects import subject_of
from tests.corruption import ORACLE
from tests.inprocess import in_this_process
from tests.models import LLAMA

REASON = "the block is longer than one row"


def picky(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    """Attention that takes single rows itself, and leaves longer blocks to a slower path."""
    if query.shape[2] > 1:
        columns.announce(REASON)
    return eager(query, columns, scaling)


def reluctant(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    """Attention that leaves everything to a slower path."""
    columns.announce("nothing suits it")
    return eager(query, columns, scaling)


def open_picky() -> Backend:
    return EngineBackend("picky", "cpu", replace(SEAMS, attend=picky, draft_attend=picky))


def open_reluctant() -> Backend:
    return EngineBackend("reluctant", "cpu", replace(SEAMS, attend=reluctant, draft_attend=reluctant))


LAYERS = GALLERY[1].layers
CASE = Case(LLAMA, (3, 5, 7), Scripted((Tree((0, 0, 0), (7, 1, 2)),)), stops=Stops(2))


def test_calls_and_fallbacks_of_a_run_add_up_layer_by_layer() -> None:
    trace = open_picky().run(CASE)
    forwards = 1 + len(trace.steps)  # prefill of two tokens, then each tree; those of one node do not fall back
    assert trace.attention_calls == LAYERS * forwards
    longer = 1 + sum(len(step.drafted.tree) > 1 for step in trace.steps if step.drafted)
    assert trace.fallbacks == {REASON: LAYERS * longer}
    assert 0 < longer < forwards


def test_calls_of_the_draft_count_and_runs_do_not_mix() -> None:
    backend = open_picky()
    drafting = replace(CASE, draft=LanguageModel(LLAMA, RankTree((0, 0, 0), (0, 0, 1))))
    alone, again = backend.run(drafting), backend.run(drafting)
    assert alone.attention_calls == again.attention_calls > LAYERS * (1 + len(alone.steps))
    assert alone.fallbacks == again.fallbacks
    session = replace(CASE, session=Session((), (Action("add", (0,)), Action("step", (0,)))))
    assert backend.run(session).fallbacks == {REASON: 2 * LAYERS}


def verdict_of(backend: Backend) -> Verdict:
    return judge(CASE, (), ORACLE, subject_of(backend))


def test_a_verdict_counts_its_own_runs() -> None:
    subject = subject_of(open_picky())
    verdict = judge(CASE, (), ORACLE, subject)
    short_verdict = judge(replace(CASE, stops=Stops(1)), (), ORACLE, subject)
    assert verdict.attention_calls == open_picky().run(CASE).attention_calls
    assert verdict.fallbacks == open_picky().run(CASE).fallbacks
    assert 0 < short_verdict.attention_calls < verdict.attention_calls
    assert verdict_line(verdict)["fallbacks"] == dict(verdict.fallbacks)


def test_reports_say_each_reason_with_its_count_and_are_quiet_without() -> None:
    tally = Tally("picky", invariants={"structure.parent-range": Counts(checked=1)})
    tally.add(verdict_of(open_picky()))
    count, calls = tally.fallbacks[REASON], tally.attention_calls
    page = " ".join(summary_page(tally, verbose=True).split())
    assert f"fell back {count} of {calls} attention calls: {REASON}" in page
    assert summary(tally)["fallbacks"] == {REASON: count}
    assert summary(tally)["attention_calls"] == calls
    quiet = Tally("cpu-eager")
    quiet.add(verdict_of(EngineBackend("cpu-eager", "cpu")))
    assert quiet.attention_calls > 0
    assert "fell back" not in summary_page(quiet, verbose=True)
    assert "fallbacks" not in verdict_line(verdict_of(EngineBackend("cpu-eager", "cpu")))


def test_a_failure_says_which_path_ran() -> None:
    verdict = verdict_of(open_picky())
    finding = judge(CASE, (), ORACLE, subject_of(open_picky())).first
    assert finding is None
    wrong_finding = next(iter(_wrong().findings))
    page = failure_page(Failure(replace(verdict, findings=(wrong_finding,)), wrong_finding, CASE.id))
    assert REASON in page


def _wrong() -> Verdict:
    def double_attention(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        return 2 * eager(query, columns, scaling)

    return judge(CASE, ALL, ORACLE, subject_of(EngineBackend("wrong", "cpu", replace(SEAMS, attend=double_attention))))


HYBRIDS = [architecture for architecture in GALLERY if architecture.recurrent]


@pytest.mark.parametrize("architecture", HYBRIDS, ids=lambda each: each.family)
def test_layers_without_attention_call_none(architecture: Architecture) -> None:
    """Else a run with hybrids would seem to run fused in the layers that call no attention."""
    model = Seeded(architecture, 0)
    drafts = LanguageModel(model, RankTree((0, 0, 0, 1), (0, 0, 1, 0)))
    for draft in (drafts, Scripted((Tree((0, 0, 1), (2, 1, 0)),))):
        trace = open_reluctant().run(Case(model, (1, 2), draft, stops=Stops(3)))
        assert trace.attention_calls == sum(trace.fallbacks.values()) > 0


@pytest.mark.parametrize(
    ("fell", "calls", "condemned"), [(10, 10, True), (9, 10, False), (0, 10, False), (0, 0, False)]
)
def test_a_run_in_which_every_call_fell_back_ran_nothing_fused(fell: int, calls: int, condemned: bool) -> None:
    why = nothing_fused(Tally("x", attention_calls=calls, fallbacks=Counter({"why": fell})))
    assert (why is not None) is condemned
    if why is not None:
        assert why.startswith("nothing ran fused: all 10 attention calls fell back")


def test_rows_say_which_backends_are_there_for_attention_of_their_own() -> None:
    plain = {row.name for row in ROWS if not row.own_kernel}
    assert {"cpu-eager", "cpu-ranks", "cpu-handed-over", "cuda-eager", "ascend-eager", "cpu-recorded"} <= plain
    assert {"cpu-fused", "cpu-fused-flex-compiled", "cuda-fused-flashinfer", "triton-interpreted"}.isdisjoint(plain)


def test_a_kernel_of_its_own_that_no_call_took_is_no_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexAttention compiles for no float64: hybrids among the cases change nothing of it, nor does mode reference."""
    in_this_process(monkeypatch)
    words = ["--backend", "cpu-fused-flex-compiled", "--dtype", "float64", "--cases", "3", "--invariant", "structure.*"]
    for more, code in ((["--mode", "reference"], 0), ([], 3)):
        result_file = tmp_path / "told.json"
        with pytest.raises(SystemExit) as ended:
            main(
                [
                    "diff",
                    *words,
                    *more,
                    "--jobs",
                    "1",
                    "--verbose",
                    "--report",
                    str(tmp_path),
                    "--json",
                    str(result_file),
                ]
            )
        page, content = " ".join(capsys.readouterr().out.split()), json.loads(result_file.read_text())
        assert (ended.value.code, "nothing ran fused" in page) == (code, code == 3)
        assert (content["native_share"], "0 % of attention calls were native" in page) == (
            (0.0, True) if code else (None, False)
        )
    silent = Tally("x", own_kernel=True, traces=3)
    assert str(nothing_fused(silent)).startswith("no attention call was counted")


def test_the_headline_says_how_much_ran_in_a_kernel_of_its_own() -> None:
    tally = Tally("x", has_kernel=True, own_kernel=True, attention_calls=8, cases=1, wanted=1, judged=1, traces=1)
    tally.fallbacks.update({f"{CHOSEN}sdpa": 3, "sdpa takes no sinks": 2})
    tally.invariants = {"a": Counts(1), "b": Counts()}
    assert tally.native_share == 0.75
    head = "1 of 1 case was judged, 1 of 2 invariants had a turn, 75 % of attention calls were native: everything"
    assert head in " ".join(summary_page(tally, verbose=True).split())
    assert replace(tally, own_kernel=False).native_share is None


@pytest.mark.slow
def test_diff_does_not_pass_a_backend_that_ran_nothing_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_this_process(monkeypatch)
    for name, code in (("reluctant", 3), ("picky", 0)):
        result_file = tmp_path / f"{name}.json"
        arguments = [
            "diff",
            "--backend",
            f"tests.meta.engine.test_fallbacks:open_{name}",
            "--cases",
            "3",
            "--jobs",
            "1",
            "--verbose",
        ]
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--report", str(tmp_path), "--json", str(result_file)])
        assert ended.value.code == code
        page = " ".join(capsys.readouterr().out.split())
        content = json.loads(result_file.read_text())
        assert ("nothing ran fused" in page) is (name == "reluctant")
        assert "fell back" in page
        assert 0 < sum(content["fallbacks"].values()) <= content["attention_calls"]
        assert content["outcome"] == {3: "unjudged", 0: "agree"}[code]
