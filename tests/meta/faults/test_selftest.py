"""The self-test: a hunt finds what is planted and nothing else; what escapes, or a false alarm, is exit code 1."""

import json
import time
from pathlib import Path

import pytest

from specverify.backends import faults
from specverify.cli import main
from specverify.reference.rules import DRAWS
from specverify.reports.pages.selftest import CleanRun, FaultHunt, SelfTest, facts, page
from specverify.selftest import schedule
from specverify.selftest.hunt import HuntPlan, HuntResult, hunt
from specverify.selftest.schedule import ROUNDS, Course

EASY = "tree-masked-as-chain"


def task(fault: str | None, backend: str = "cpu-eager", cases: int = 12) -> HuntPlan:
    return HuntPlan(fault, backend, 0, cases, ("float32", "float64"), 3.0, time.time() + 60)


def test_a_hunt_finds_what_is_planted() -> None:
    result = hunt(task(EASY))
    assert result.caught
    assert result.stage == faults.fault_named(EASY).stage.word
    assert result.by is not None
    assert result.by in result.failed
    assert 1 <= result.cases <= 12
    assert result.nodes >= 1
    assert result.case is not None


def test_a_clean_hunt_finds_nothing() -> None:
    result = hunt(task(None, cases=5))
    assert (result.caught, result.cases, result.by, result.failed) == (False, 5, None, ())


def test_a_backend_that_is_not_here_is_said_and_no_pass() -> None:
    result = hunt(task(None, "ascend-fused"))
    assert result.missing is not None
    assert result.cases == 0


def self_test_of(**catches: bool) -> SelfTest:
    return SelfTest(
        [FaultHunt(name, "BZ-1", "lowered", caught=caught, by="a.b" if caught else None, stage_named="lowered",
                cases=3, nodes=2, failed=("a.b",) if caught else ()) for name, caught in catches.items()],
        [CleanRun("cpu-eager", 40, None, None)],
        ["a.b", "c.d"],
        seconds=2.0,
    )  # fmt: skip


def test_what_escapes_is_exit_code_one() -> None:
    assert self_test_of(one=True, two=True).exit_code == 0
    report = self_test_of(one=True, two=False)
    assert report.exit_code == 1
    assert "ESCAPED: two" in page(report)
    assert facts(report)["escaped"] == ["two"]
    assert facts(report)["idle"] == ["c.d"]


def test_a_false_alarm_is_exit_code_one() -> None:
    report = self_test_of(one=True)
    report.clean_runs.append(CleanRun("cpu-eager", 3, "a.b", "cafe"))
    assert report.exit_code == 1
    assert "FALSE ALARM  cpu-eager  a.b  case cafe" in page(report)
    assert facts(report)["clean"]["cases"] == 43


def test_what_did_not_run_is_no_pass() -> None:
    report = self_test_of(one=True)
    report.errors.append("interrupted")
    assert report.exit_code == 3
    hurried = self_test_of(one=True, two=False)
    hurried.faults[1].cases = 0
    assert hurried.exit_code == 3
    assert "not hunted for want of time: 1 fault" in page(hurried)
    assert "ESCAPED" not in page(hurried)
    absent = self_test_of(one=False)
    absent.faults[0].missing = "no such device"
    assert absent.exit_code == 3
    assert "NOT RUN" in page(absent)
    assert "no such device" in page(absent)


def test_an_equivalent_fault_cannot_escape() -> None:
    report = self_test_of(one=True, two=False)
    report.faults[1].equivalent = dict.fromkeys(DRAWS, "proof")
    assert report.exit_code == 0
    assert "(equivalent)" in page(report)


@pytest.mark.parametrize("width", [80])
def test_the_page_fits(width: int) -> None:
    report = self_test_of(**{fault.name: True for fault in faults.ALL})
    assert max(map(len, page(report).splitlines())) <= width


def test_the_command_plants_searches_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(schedule, "_results", lambda names, options, until, report: iter(
        [hunt(task(names[0])), HuntResult(None, "cpu-eager", 9)]
    ))  # fmt: skip
    file = tmp_path / "out.json"
    with pytest.raises(SystemExit) as ended:
        main(["selftest", "--fault", EASY, "--report", str(tmp_path), "--json", str(file)])
    assert ended.value.code == 0, capsys.readouterr().out
    content = json.loads(file.read_text())
    (row,) = content["faults"]
    expected_keys = {
        "name",
        "id",
        "stage_planted",
        "stage_named",
        "caught",
        "by",
        "cases",
        "seconds",
        "nodes",
        "equivalent",
    }
    assert expected_keys <= set(row)
    assert content["clean"] == {"cases": 9, "findings": []}
    lines = [json.loads(line) for line in (tmp_path / "selftest.jsonl").read_text().splitlines()]
    assert [line["fault"] for line in lines] == [EASY, None]


def test_a_glob_that_matches_nothing_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["selftest", "--fault", "nosuch*"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "specverify: --fault nosuch*: no fault matches; `specverify list faults` names them\n"
    )


def test_idle_workers_take_later_rounds_and_no_clean_hunt_is_cut() -> None:
    course = Course([EASY], {EASY: "cpu-eager"}, 0, time.time() + 60)
    assert [planned_hunt.fault for planned_hunt in course.first()] == [EASY, None]
    (later,) = course.spare(1)
    assert (later.fault, later.cases) == (EASY, ROUNDS[1][0])
    assert course.after(HuntResult(EASY, "cpu-eager", 3, caught=True)) == course.spare(1) == []
    assert (course.at_large, course.clean_due) == (set(), 1)
    course.after(HuntResult(None, "cpu-eager", 12))
    assert not course.clean_due


def test_idle_workers_hunt_what_was_hunted_least() -> None:
    course = Course(["one", "other"], {"one": "cpu-eager", "other": "cpu-eager"}, 0, time.time() + 60)
    later = [task.fault for _ in range(4) for task in course.spare(1) if task.fault]
    assert later == ["one", "other", "one", "other"]
