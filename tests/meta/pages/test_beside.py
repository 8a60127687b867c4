"""Beside a failure of a fused backend stands the same case on the eager one; a fault names the backend it is for."""

from dataclasses import replace
from pathlib import Path

import pytest

from specverify.backends import faults
from specverify.backends.base import Unavailable
from specverify.backends.compositions import open_cpu
from specverify.backends.registry import eager_beside
from specverify.backends.shipped import ROWS
from specverify.campaign import recorder
from specverify.campaign.eager_twin import with_eager
from specverify.cli import main
from specverify.commands import subjects
from specverify.isolation import door
from specverify.isolation.backend_spec import BackendSpec
from specverify.plan import Plan
from specverify.properties.invariants import ALL
from specverify.properties.tally import EagerOutcome, Failure
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.sampling import Stops
from specverify.reference.tree import Tree
from specverify.reports.bundle import save
from specverify.reports.pages.terminal import failure_page
from specverify.reports.record import failure_fact
from specverify.setup.subjects import open_planted, subject_of
from tests import inprocess
from tests.corruption import ORACLE
from tests.inprocess import Here, in_this_process
from tests.models import LARGE_LLAMA

FAULT = "tiles-below-diagonal-unmasked"
CASE = Case(LARGE_LLAMA, (3, 14, 15), Scripted((Tree((0, 0, 0), (15, 1, 2)),)), stops=Stops(2))


def failure(backend: str) -> Failure:
    invariants = tuple(invariant for invariant in ALL if invariant.name == "attention.context-exact")
    verdict = judge(CASE, invariants, ORACLE, subject_of(open_planted(backend, FAULT)))
    assert verdict.first is not None
    return Failure(verdict, verdict.first, CASE.id, fault=FAULT, backend=backend)


def test_each_device_has_its_eager_backend() -> None:
    twins = {row.name: eager_beside(row.name) for row in ROWS}
    assert twins["cpu-eager"] is twins["cuda-eager"] is None
    assert (twins["cpu-fused"], twins["cuda-fused-sdpa"]) == ("cpu-eager", "cuda-eager")
    assert eager_beside("my_engine.adapter:open") is None
    for row in ROWS:
        twin = next((other_row for other_row in ROWS if other_row.name == twins[row.name]), None)
        assert (twin is None) is (row.name.removesuffix("-emulated").endswith("-eager"))
        assert twin is None or twin.device == row.device
    assert twins["ascend-fused-emulated"] == "ascend-eager-emulated"


@pytest.mark.slow
def test_the_same_case_on_the_eager_backend_is_told() -> None:
    judged_failure = with_eager(failure("cpu-fused"), ORACLE)
    assert judged_failure.beside == EagerOutcome("cpu-eager", "agrees")
    assert "beside the same case on cpu-eager: agrees" in " ".join(failure_page(judged_failure).split())
    assert failure_fact(judged_failure)["beside"] == {"backend": "cpu-eager", "outcome": "agrees", "finding": None}
    alone = with_eager(failure("cpu-eager"), ORACLE)
    assert alone.beside is None
    assert "beside" not in failure_page(alone)


def test_an_eager_backend_that_differs_too_or_cannot_judge_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    judged_failure = failure("cpu-fused")
    with monkeypatch.context() as patch:
        patch.setattr(door, "open_backend", lambda spec: Here(replace(spec, fault=FAULT)))
        both = with_eager(judged_failure, ORACLE)
    assert both.beside is not None
    assert both.beside.outcome == "differs"
    assert both.beside.finding is not None
    assert both.beside.finding.where == judged_failure.finding.where
    page = " ".join(failure_page(both).split())
    assert "cpu-eager: differs too, attention.context-exact at stage attended, step 0, layer 0" in page
    with monkeypatch.context() as patch:
        clean = open_cpu()
        clean.declaration = replace(clean.declaration, dtypes=("float64",))
        in_this_process(patch)
        patch.setattr(inprocess, "open_planted", lambda *_: clean)
        declined = with_eager(judged_failure, ORACLE).beside
    assert declined == EagerOutcome("cpu-eager", "not judged: cpu-eager declares no dtype float32")

    def absent(spec: BackendSpec) -> None:
        raise Unavailable("no such device")

    with monkeypatch.context() as patch:
        patch.setattr(door, "open_backend", absent)
        assert with_eager(judged_failure, ORACLE).beside == EagerOutcome("cpu-eager", "not run: no such device")


def test_diff_plants_a_fault_where_it_belongs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = replace(faults.fault_named(FAULT), on="cpu-fused")
    changed = tuple(fault if invariant.name == FAULT else invariant for invariant in faults.ALL)
    monkeypatch.setattr(faults, "_every", lambda: changed)
    monkeypatch.chdir(tmp_path)  # no rows of the faults are kept here
    assert next(row["on"] for row in subjects.plantable_faults() if row["name"] == FAULT) == "cpu-fused"
    plans: list[Plan] = []

    def note_plan(plan: Plan, *_: object, **__: object) -> int:
        plans.append(plan)
        return 0

    monkeypatch.setattr(recorder, "diff", note_plan)
    for options in ([], ["--backend", "cpu-fused-flex"], ["--device", "cpu"]):
        with pytest.raises(SystemExit) as ended:
            main(["diff", "--fault", FAULT, *options])
        assert ended.value.code == 0
    assert [plan.backend for plan in plans] == ["cpu-fused", "cpu-fused-flex", "cpu-eager"]


def test_replay_runs_a_bundle_on_its_own_backend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(save(tmp_path, failure("cpu-fused"), {}))
    for options, code, words in (
        (["--fault", FAULT], 1, "DIFFER cpu-fused attention.context-exact"),
        ([], 0, "FIXED"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["replay", file, *options])
        assert ended.value.code == code
        page = " ".join(capsys.readouterr().out.split())
        assert words in page
        assert ("the same case on cpu-eager: agrees" in page) is bool(code)
