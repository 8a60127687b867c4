"""Two results compared: newly failing, fixed, no longer judged, judged less, slower, drawn otherwise."""

import json
from pathlib import Path
from typing import Any

import pytest

from specverify.cli import main
from specverify.properties.paired_acceptance import counts_of_lengths
from specverify.reports.gate.comparison import compare_results
from specverify.reports.gate.markdown import LARGEST, comparison_summary

COUNTS = {"checked": 10, "failed": 0, "unobserved": 0, "not_applicable": 0, "compared": 10}


def run(*signatures: str, **facts: Any) -> dict[str, Any]:
    """A run of a gate; each signature is `invariant at stage`."""
    findings = [
        {"invariant": signature.split(" at ")[0], "stage": signature.split(" at ")[1]} for signature in signatures
    ]
    return {
        "name": "mine",
        "model": None,
        "outcome": "differ" if signatures else "agree",
        "cases": 20,
        "judged": 20,
        "seconds": 30.0,
        "shrink_seconds": 0.0,
        "backend_seconds": 10.0,
        "invariants": {"cache.isolation": dict(COUNTS), "lossless.stops": dict(COUNTS)},
        "findings": findings,
        "signatures": list(signatures),
        "drawn": "0" * 12,
        "reference": "oracle",
        "environment": {"torch": "2"},
        **facts,
    }


def gate(*runs: dict[str, Any], **facts: Any) -> dict[str, Any]:
    outcome = "differ" if any(gate_run["outcome"] == "differ" for gate_run in runs) else "agree"
    return {"kind": "gate", "outcome": outcome, "runs": list(runs), "known": [], "seeds": [0], **facts}


KEY = "cache.isolation at committed (cache target, kind key)"
VALUE = "cache.isolation at committed (cache target, kind value)"
UNASKED = {"cache.isolation": COUNTS | {"checked": 0}, "lossless.stops": COUNTS}


@pytest.mark.parametrize("entry", [{"signature": KEY}, {"signature": VALUE, "also": [KEY]}], ids=["main", "beside it"])
def test_what_the_ledger_took_in_is_known_and_not_fixed(entry: dict[str, Any]) -> None:
    ledger_entry = {"name": "lookup", "backend": "mine", "state": "seen", **entry}
    comparison = compare_results(gate(run(KEY)), gate(run(known={"lookup": 3}), known=[ledger_entry]))
    assert dict(comparison.sections()) == {"now known": [f"mine: {KEY}"]}
    assert comparison.exit_code == 0
    # On another layout than the entry's it still fails, and is neither known nor new.
    assert compare_results(gate(run(KEY)), gate(run(KEY, known={"lookup": 3}), known=[ledger_entry])).sections() == []
    # Of another backend, or where the run did not show it, the entry says nothing about this failure.
    for later_gate in (
        gate(run(), known=[ledger_entry]),
        gate(run(known={"lookup": 3}), known=[{**ledger_entry, "backend": "other"}]),
    ):
        assert dict(compare_results(gate(run(KEY)), later_gate).sections()) == {"fixed": [f"mine: {KEY}"]}


@pytest.mark.parametrize(
    ("before", "after", "code", "section", "words"),
    [
        (run(), run(KEY), 1, "newly failing", "mine: cache.isolation at committed"),
        (run(KEY), run(KEY, VALUE), 1, "newly failing", "kind value"),
        (run(KEY), run(), 0, "fixed", "kind key"),
        (run(KEY), run(invariants=UNASKED), 0, "no longer judged", "kind key"),
        (run(), run(invariants=UNASKED), 0, "judged less", "cache.isolation compared nothing"),
        (run(), run(judged=10), 0, "judged less", "10 of 20 cases judged, 20 of 20 before"),
        (run(), run(seconds=60.0), 0, "slower", "took 6 times the time inside the backend, and 3 before"),
        (run(), run(drawn="1" * 12), 0, "drawn otherwise", "as many cases, and others"),
        (run(), run(cases=21), 0, "drawn otherwise", "21 cases, 20 before"),
        (run(), run(environment={"torch": "3"}), 0, "drawn otherwise", "torch 3, 2 before"),
        (run(), run(outcome="differ"), 1, "newly failing", "no single case shows where"),
    ],
)
def test_each_difference_is_told(
    before: dict[str, Any], after: dict[str, Any], code: int, section: str, words: str
) -> None:
    comparison = compare_results(gate(before), gate(after))
    assert comparison.exit_code == code
    assert words in " ".join(dict(comparison.sections())[section])


def test_equal_results_have_no_difference() -> None:
    assert compare_results(gate(run(KEY)), gate(run(KEY))).sections() == []
    assert compare_results(run(), run()).sections() == []


def test_a_run_too_short_to_time_is_not_called_slower() -> None:
    short = run(seconds=60.0, backend_seconds=1.0)
    assert compare_results(gate(short), gate(run(seconds=600.0, backend_seconds=1.0))).slower == []


def test_a_backend_that_did_not_run_is_no_pass() -> None:
    comparison = compare_results(gate(run(), run(name="other")), gate(run()))
    assert comparison.exit_code == 3
    assert comparison.less == ["other: did not run"]
    assert compare_results(gate(run()), gate(run(), outcome="unjudged")).exit_code == 3


def test_a_known_failure_that_went_stale_fails_newly() -> None:
    stale = {"known": [{"name": "a", "backend": "mine", "state": "stale"}]}
    assert compare_results(gate(run()), gate(run(), **stale)).exit_code == 1
    assert compare_results(gate(run(), **stale), gate(run(), **stale)).exit_code == 0


def test_the_command_reads_two_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = []
    for name, content in (("a", gate(run())), ("b", gate(run(KEY)))):
        (tmp_path / name).write_text(json.dumps(content))
        files.append(str(tmp_path / name))
    with pytest.raises(SystemExit) as ended:
        main(["compare", *files, "--json", "-", "--markdown", str(tmp_path / "c.md")])
    assert ended.value.code == 1
    result = json.loads(capfd.readouterr().out)
    assert result["failing"] == [f"mine: {KEY}"]
    assert "### Newly failing" in (tmp_path / "c.md").read_text()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"kind": "gate"}', '{"kind": "gate", "runs": [1]}', "[" * 99_999])
@pytest.mark.parametrize("place", ["before", "after"])
def test_what_is_no_result_is_refused_with_its_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], content: str, place: str
) -> None:
    (tmp_path / "sound").write_text(json.dumps(gate(run())))
    (tmp_path / "broken").write_text(content)
    files = [str(tmp_path / name) for name in (("broken", "sound") if place == "before" else ("sound", "broken"))]
    with pytest.raises(SystemExit) as ended:
        main(["compare", *files])
    assert ended.value.code == 2
    assert str(tmp_path / "broken") in capfd.readouterr().err


def counted_result(name: str, lengths: list[list[int]]) -> dict[str, Any]:
    """The result of a `diff` of cases 0, 1, ..., each with the accepted tokens of its steps."""
    counts = {str(number): counts_of_lengths(steps) for number, steps in enumerate(lengths)}
    acceptance = {case: {"accepted": list(count.accepted), "offered": count.offered} for case, count in counts.items()}
    return {**run(), "backend": name, "acceptance": acceptance}


ALIKE = [[2, 0, 1, number % 3] for number in range(30)]
LIFTED = [[length + 1 for length in steps] for steps in ALIKE]


def test_a_result_that_accepts_otherwise_on_the_same_cases_is_told() -> None:
    comparison = compare_results(counted_result("mine", ALIKE), counted_result("mine", LIFTED))
    assert comparison.exit_code == 1
    words, *positions = comparison.acceptance
    assert words.startswith("mine: acceptance differs although model, draft and seeds are the same: 30 of 30 prompts")
    assert "error rate 0.001" in words
    assert positions[0].startswith("mine: accepted 2.000, 1.000 before, p = ")
    assert len(positions) == 4
    assert comparison.sections()[0][0] == "accepts otherwise"
    # Two engines on the same cases are compared too, and equal counts say nothing.
    assert compare_results(counted_result("eager", ALIKE), counted_result("graphs", LIFTED)).exit_code == 1
    assert compare_results(counted_result("mine", ALIKE), counted_result("mine", ALIKE)).sections() == []
    # Few cases cannot show it; a result without counts, of an earlier version, has nothing to compare.
    few = compare_results(counted_result("mine", ALIKE[:5]), counted_result("mine", LIFTED[:5]))
    assert (few.exit_code, few.acceptance) == (0, [])
    assert "too few prompts" in few.otherwise[0]
    assert compare_results(run() | {"backend": "mine"}, counted_result("mine", LIFTED)).exit_code == 0
    # At a laxer error rate five cases are enough: 2^-4 of the trades are as far out.
    assert compare_results(counted_result("mine", ALIKE[:5]), counted_result("mine", LIFTED[:5]), 0.1).exit_code == 1


def test_the_page_of_a_large_comparison_is_bounded() -> None:
    many = run(*(f"{'x' * 500}{number} at scored" for number in range(2000)))
    assert len(comparison_summary(compare_results(gate(run()), gate(many)))) <= LARGEST + 1
