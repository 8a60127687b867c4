"""Known failures: one stays green and hides no other; one that is fixed, expired or cannot be judged does not pass."""

import shutil
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from specverify.gate import ledger as ledgers
from specverify.properties.known import KnownFailure, Signature, signature, without_known_findings, without_numbers
from specverify.properties.verdict.finding import FINISHED, Finding, Verdict
from specverify.reference.trace import Stage
from specverify.setup.errors import UnusableInput
from tests.cases import ONE_CHILD
from tests.meta.gate.conftest import ASKED_INVARIANTS, Sample

KEY: dict[str, Any] = {"cache": "target", "kind": "key", "layer": 3, "slot": 17}


def make_finding(
    invariant: str = "cache.isolation", stage: Stage = Stage.COMMITTED, step: int = 0, **where: Any
) -> Finding:
    return Finding(invariant, stage, step, where or dict(KEY), 1.0, 2.0)


def verdict(*findings: Finding) -> Verdict:
    return Verdict(ONE_CHILD, "mine", {finding.invariant: "failed" for finding in findings}, findings)


KNOWN_FAILURE = KnownFailure("known", signature(make_finding()))


def test_a_signature_survives_other_sizes_and_tells_kinds_apart() -> None:
    assert signature(make_finding(cache="target", kind="key", layer=0, slot=5, request=2)) == KNOWN_FAILURE.main
    assert signature(make_finding(cache="target", kind="value", layer=3, slot=17)) != KNOWN_FAILURE.main
    assert signature(make_finding(cache="draft", kind="key", layer=3, slot=17)) != KNOWN_FAILURE.main
    assert signature(make_finding(stage=Stage.SCORED, **KEY)) != KNOWN_FAILURE.main
    assert signature(replace(make_finding(), invariant="cache.rows")) != KNOWN_FAILURE.main
    broken = [
        Finding("lossless.completes", Stage.DRAFTED, 0, {}, FINISHED, message)
        for message in ("IndexError: index 7 of [3, 4]", "IndexError: index 12 of [1, 2, 3]", "KeyError: 7")
    ]
    short_index_error, long_index_error, key_error = map(signature, broken)
    assert short_index_error == long_index_error != key_error


@pytest.mark.parametrize("text", ["0xdeadbeef at 3.5, 4", "٣ rows", "x" * 10_000, "\x1b[31m", ""])
def test_a_text_without_its_numbers_is_short_and_on_one_line(text: str) -> None:
    assert len(without_numbers(text)) <= 160
    assert "\n" not in without_numbers(text)
    assert not any(char in without_numbers(text) for char in "3578")


def test_a_known_failure_is_set_aside_and_counted() -> None:
    remainder = without_known_findings(verdict(make_finding()), (KNOWN_FAILURE,))
    assert remainder.findings == ()
    assert remainder.known == ("known",)
    assert remainder.outcomes == {"cache.isolation": "checked"}


@pytest.mark.parametrize(
    "other_finding",
    [
        make_finding("cache.commit-equivalence"),
        make_finding(cache="target", kind="value", slot=17),
        make_finding(cache="draft", kind="key", slot=17),
        make_finding("attention.no-leakage", Stage.ATTENDED),
    ],
)
def test_a_known_failure_hides_no_other_at_its_stage_or_before(other_finding: Finding) -> None:
    remainder = without_known_findings(verdict(make_finding(), other_finding), (KNOWN_FAILURE,))
    assert remainder.findings == (other_finding,)
    assert remainder.known == ("known",)
    assert remainder.outcomes[other_finding.invariant] == "failed"


def test_what_comes_after_a_known_failure_is_told_and_not_judged() -> None:
    later = make_finding("lossless.stops", Stage.EMITTED, step=1, side="length")
    remainder = without_known_findings(verdict(make_finding(), later), (KNOWN_FAILURE,))
    assert remainder.findings == ()
    assert remainder.behind == ("lossless.stops at emitted (side length)",)
    assert without_known_findings(verdict(later), (KNOWN_FAILURE,)).findings == (later,)


def test_a_further_finding_of_the_bundle_is_known_only_beside_the_main_one() -> None:
    further_finding = make_finding("cache.layout-equivalent")
    known_failure = replace(KNOWN_FAILURE, also=(signature(further_finding),))
    assert without_known_findings(verdict(make_finding(), further_finding), (known_failure,)).findings == ()
    assert without_known_findings(verdict(further_finding), (known_failure,)).findings == (further_finding,)


@pytest.mark.parametrize("only", [{"layout": "paged"}, {"draft": "ngram"}, {"dtype": "float16"}])
def test_a_narrow_entry_knows_no_other_kind_of_case(only: dict[str, str]) -> None:
    assert without_known_findings(verdict(make_finding()), (replace(KNOWN_FAILURE, **only),)).findings  # type: ignore[arg-type]
    here = {"layout": ONE_CHILD.layout.kind, "draft": ONE_CHILD.draft.TAG, "dtype": ONE_CHILD.dtype}
    known_failure = replace(KNOWN_FAILURE, **{name: here[name] for name in only})  # type: ignore[arg-type]
    assert not without_known_findings(verdict(make_finding()), (known_failure,)).findings


def test_a_ledger_is_read_as_it_was_written(tmp_path: Path) -> None:
    hostile = 'a "quoted" \\ back\nslash \x1b[31m \u202e 🙂'
    broken = Signature("lossless.completes", "drafted", (("side", hostile),), "KeyError: '#'")
    entries = [
        ledgers.Entry("mine:open_", KNOWN_FAILURE, hostile, "known/known.json", "https://x/1", date(2030, 1, 31)),
        ledgers.Entry(
            "b", KnownFailure("other", broken, (KNOWN_FAILURE.main, broken), "paged"), "why", "known/other.json"
        ),
    ]
    ledgers.save(tmp_path / "known.toml", entries)
    assert ledgers.load(tmp_path / "known.toml") == entries
    assert ledgers.load(tmp_path / "absent.toml") == []


ENTRY = 'backend = "b"\ninvariant = "i"\nstage = "scored"\nreason = "r"\nbundle = "x/a.json"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[known]\n", "tables [[known]]"),
        ("[[knwon]]\n", "knwon"),
        (f"[[known]]\n{ENTRY}untl = 2030-01-01\n", "untl: no such field; did you mean until?"),
        ("[[known]]\n" + ENTRY.replace("scored", "scord"), "stage: did you mean scored?"),
        ("[[known]]\n" + ENTRY.replace('"r"', '" "'), "reason: a text must stand here"),
        (f'[[known]]\n{ENTRY}until = "2030-01-01"\n', "until: a date stands here"),
        (f"[[known]]\n{ENTRY}where = {{ slot = 3 }}\n", "where: texts by name"),
        (f'[[known]]\n{ENTRY}where = {{ sid = "3" }}\n', "where.sid: no such coordinate; did you mean side?"),
        (f"[[known]]\n{ENTRY}also = [1]\n", "also: a list of tables"),
        (f"[[known]]\n{ENTRY}[[known]]\n{ENTRY}", "two entries have a bundle called a"),
    ],
)
def test_a_ledger_that_cannot_be_read_says_where(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "known.toml").write_text(text)
    with pytest.raises(UnusableInput, match=r"known\.toml") as refused:
        ledgers.load(tmp_path / "known.toml")
    assert message in str(refused.value)


@pytest.fixture
def knowing(sample: Sample, known_fault: Path) -> Sample:
    """A copy of `known_fault`, whose fault is planted."""
    for name in ("known-failures", "known-failures.toml"):
        place = known_fault / name
        (shutil.copytree if place.is_dir() else shutil.copy)(place, sample.folder / name)
    sample.plant("unverified")
    return sample


def test_a_known_failure_is_green_and_shown(knowing: Sample) -> None:
    assert knowing("gate") == 0
    (entry,) = knowing.result()["known"]
    assert entry["state"] == "seen"
    assert entry["cases"] > 1
    assert "the lookup is new" in knowing.report("summary.md")
    assert '<skipped message="known failure: the lookup is new"' in knowing.report("junit.xml")
    assert knowing("ledger", "list") == 0
    assert "1 known failure in" in knowing.out
    outcomes = [line["outcome"] for line in knowing.lines()]
    assert outcomes.count("known") == entry["cases"]
    assert "differ" not in outcomes


def test_a_second_fault_at_the_same_stage_is_red(knowing: Sample) -> None:
    knowing.plant("unverified,endless")
    assert knowing("gate", "--cases", "18") == 1
    (run,) = knowing.result()["runs"]
    assert all(finding["stage"] == "emitted" for finding in run["findings"])
    assert knowing.result()["known"][0]["state"] == "seen"


def test_a_fixed_failure_is_red_until_it_is_pruned(knowing: Sample) -> None:
    knowing.plant("")
    assert knowing("gate") == 1
    assert knowing.result()["known"][0]["state"] == "stale"
    assert "its bundle agrees now" in knowing.out
    assert "<failure" in knowing.report("junit.xml")
    assert knowing("ledger", "prune", "--dry-run") == 0
    assert len(ledgers.load(knowing.folder / "known-failures.toml")) == 1
    assert knowing("ledger", "prune") == 0
    assert knowing("gate", "--cases", "24") == 0
    assert not list((knowing.folder / "known-failures").iterdir())


def test_an_expired_failure_is_red(knowing: Sample) -> None:
    file = knowing.folder / "known-failures.toml"
    file.write_text(file.read_text().replace("2999-12-31", "2001-01-01"))
    assert knowing("gate") == 1
    assert knowing.result()["known"][0]["state"] == "expired"
    assert knowing("ledger", "list") == 0
    assert "EXPIRED" in knowing.out


def test_a_known_failure_whose_bundle_cannot_be_judged_is_no_pass(knowing: Sample) -> None:
    file = knowing.folder / "pyproject.toml"
    file.write_text(file.read_text().replace(ASKED_INVARIANTS, 'invariants = ["lossless.stops"]'))
    knowing.plant("")
    assert knowing("gate") == 3
    assert knowing.result()["known"][0]["state"] == "could not judge"


def test_pruning_keeps_what_still_fails(knowing: Sample) -> None:
    assert knowing("ledger", "prune") == 0
    assert "it fails as before" in knowing.out
    assert len(ledgers.load(knowing.folder / "known-failures.toml")) == 1


def test_nothing_is_added_that_does_not_fail(sample: Sample) -> None:
    sample.plant("unverified")
    assert sample("gate") == 1
    sample.plant("")
    assert sample("ledger", "add", str(sample.bundles()[0]), "--reason", "x") == 2
    assert "there is no failure to know" in sample.err
    assert not (sample.folder / "known-failures.toml").exists()
