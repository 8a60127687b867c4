"""`python -m tests.measure clean`: one record of clean cases, from runs of many days and machines."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specverify.setup.errors import MissingInput
from tests.measure import clean_cases
from tests.measure.__main__ import main
from tests.measure.clean_cases import Slice

ROW = Slice("2026-11-28", "0123abcd", "cpu-eager", 7, 100, (), "", 80.0)


def test_the_bound_is_the_one_of_clopper_and_pearson() -> None:
    # Without a finding it is 1 - 0.05^(1/n), by hand; with one, so few findings have a chance of 5 % at the bound.
    assert clean_cases.upper_bound(0, 1000) == pytest.approx(1 - 0.05 ** (1 / 1000), rel=1e-9)
    rate = clean_cases.upper_bound(1, 50)
    assert (1 - rate) ** 50 + 50 * rate * (1 - rate) ** 49 == pytest.approx(0.05, rel=1e-9)
    assert clean_cases.upper_bound(3, 3) == 1.0


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    rows = [ROW, replace(ROW, seed=8, findings=("ab12 scores.lossless",), unfinished="interrupted")]
    assert clean_cases.read_record(file) == []
    clean_cases.write_record(file, rows)
    assert clean_cases.read_record(file) == rows
    assert file.read_text().count("\n") == 4  # a line a slice
    for text in ("{}", "[", '{"slices": [{"seed": 1}]}'):
        file.write_text(text)
        with pytest.raises(MissingInput, match="no record of clean cases"):
            clean_cases.read_record(file)


def test_a_slice_of_two_records_counts_once() -> None:
    other = replace(ROW, backend="cpu-split")
    assert clean_cases.merge([ROW], [replace(ROW, seconds=1.0), other]) == [ROW, other]


def test_figures_count_findings_and_unfinished_slices() -> None:
    figures = clean_cases.figures_of([ROW, replace(ROW, seed=8, cases=40, findings=("a b",), unfinished="stopped")])
    assert (figures["cases"], figures["findings"], figures["red"]) == (140, ["a b"], True)
    assert figures["unfinished"] == ["cpu-eager, seed 8: stopped"]
    assert figures["by_backend"] == {"cpu-eager": {"cases": 140, "seconds": 160.0}}
    assert clean_cases.figures_of([])["bound"] is None


def judge_with(**changes: Any) -> Callable[[str, int, int, int], Slice]:
    """A judge that runs nothing: a backend whose name is longer takes longer."""
    return lambda backend, seed, cases, jobs: replace(
        ROW, **{"backend": backend, "seed": seed, "cases": cases, "seconds": len(backend) * cases, **changes}
    )


def test_slices_are_judged_until_the_record_has_enough() -> None:
    rows = list(clean_cases.judge_slices([ROW], 1850, ("cpu-eager", "cpu-split"), 2, judge_with()))
    assert [row.cases for row in rows] == [500, 500, 500, 250]
    assert len({row.seed for row in [ROW, *rows]}) == 5
    # The first goes to the backend without time spent on it.
    assert [row.backend for row in rows[:2]] == ["cpu-split", "cpu-eager"]
    assert list(clean_cases.judge_slices([ROW], 100, ("cpu-eager",), 2, judge_with())) == []


def test_a_backend_that_judges_nothing_ends_the_measure() -> None:
    rows = list(clean_cases.judge_slices([], 100, ("cpu-eager",), 1, judge_with(cases=0, unfinished="no memory")))
    assert [row.unfinished for row in rows] == ["no memory"]


def test_a_measure_judges_the_engine_and_writes_its_record(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clean_cases, "clean_commit", lambda: "0123abcd")
    record = tmp_path / "record.json"
    words = ["clean", "--cases", "4", "--backend", "cpu-eager", "--jobs", "1", "--record", str(record)]
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capfd.readouterr()
    assert ended.value.code == 0, err
    (row,) = clean_cases.read_record(record)
    assert (row.backend, row.cases, row.findings, row.unfinished) == ("cpu-eager", 4, (), "")
    assert "clean: 4 cases of 1 commit: no finding, a rate below 5.3e-01 with 95% confidence" in out
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "--resume goes on with it" in capfd.readouterr().err


def test_an_interrupted_slice_has_what_it_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clean_cases, "clean_commit", lambda: "0123abcd")

    def interrupted(command: list[str], folder: Path) -> None:
        (folder / "result.json").write_text(json.dumps(RESULT))
        raise KeyboardInterrupt

    monkeypatch.setattr(clean_cases, "run_child", interrupted)
    record = tmp_path / "record.json"
    with pytest.raises(SystemExit) as ended:
        main(["clean", "--cases", "50", "--backend", "cpu-split", "--record", str(record)])
    assert ended.value.code != 0
    (row,) = clean_cases.read_record(record)
    assert (row.backend, row.cases) == ("cpu-split", 40)

    def interrupted_at_once(command: list[str], folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(clean_cases, "run_child", interrupted_at_once)
    with pytest.raises(KeyboardInterrupt):
        clean_cases.judge_slice("cpu-split", 9, 50, 1)


RESULT = {
    "backend": "cpu-split",
    "environment": {"seed": "9"},
    "judged": 40,
    "wanted": 50,
    "findings": [{"case": {"id": "ab12"}, "invariant": "scores.lossless"}],
    "errors": ["interrupted after 40 cases: what did not run is not a pass", "a worker died"],
    "seconds": 12.34,
}


def test_a_result_of_diff_is_taken_in(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clean_cases, "clean_commit", lambda: "0123abcd")
    result, record = tmp_path / "result.json", tmp_path / "record.json"
    result.write_text(json.dumps(RESULT))
    for _ in range(2):  # the second time it is known
        with pytest.raises(SystemExit) as ended:
            main(["clean", str(result), "--record", str(record)])
        assert ended.value.code == 1
        (row,) = clean_cases.read_record(record)
    assert (row.backend, row.seed, row.cases, row.findings) == ("cpu-split", 9, 40, ("ab12 scores.lossless",))
    assert row.unfinished == "a worker died"
    out, _ = capfd.readouterr()
    assert "FOUND: ab12 scores.lossless" in out
    assert "NOT FINISHED: cpu-split, seed 9: a worker died" in out


def test_a_result_with_a_planted_fault_is_refused(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    result.write_text(json.dumps(RESULT | {"environment": {"seed": "9", "fault": "mask-off"}}))
    with pytest.raises(MissingInput, match="the fault mask-off was planted"):
        clean_cases.slice_of_result(result)
    result.write_text("{}")
    with pytest.raises(MissingInput, match="no result of diff --json"):
        clean_cases.slice_of_result(result)


def test_changed_files_stand_for_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"status": " M backends/engine/lower_tree.py", "rev-parse": "0123abcd"}
    monkeypatch.setattr(clean_cases, "_git", lambda *words: answers[words[0]])
    with pytest.raises(MissingInput, match=r"lower_tree\.py was changed; commit it first"):
        clean_cases.clean_commit()
    answers["status"] = ""
    assert clean_cases.clean_commit() == "0123abcd"
