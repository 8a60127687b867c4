"""The journal: every verdict and every failure of real engines comes back as it was written."""

import json
import math
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specverify.campaign.case_stream import Stream
from specverify.campaign.messages import Ended, Found, Opened, Passed
from specverify.campaign.search import without_trace
from specverify.fleet.facts import from_json, to_json
from specverify.fleet.journal import FILE, KINDS, VERSION, Head, Writer, counted, read
from specverify.fleet.shards import open_shard
from specverify.properties.tally import COUNTED, EagerOutcome, Failure, SameDefect, Tally
from specverify.properties.verdict.coverage.pair_coverage import PairCoverage, possible_pairs
from specverify.properties.verdict.coverage.pairs import LABELS
from specverify.properties.verdict.finding import (
    CertifiedRows,
    ControlError,
    Finding,
    IndexingCounts,
    RoutingCounts,
    RoutingTie,
    Tie,
    Verdict,
)
from specverify.properties.verdict.internal import InternalError
from specverify.properties.verdict.invariant import taking_turns
from specverify.properties.verdict.judge import judge
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.trace import Speculated, Stage
from specverify.reports.pages.terminal import failure_page
from specverify.reports.record import Lines, verdict_line
from specverify.reports.writing import Unwritable
from specverify.setup.errors import UnusableInput
from specverify.setup.selection import invariants_matching
from specverify.setup.subjects import open_planted, subject_of
from tests.meta.gate.conftest import Sample

HEAD = Head("0.1.0", (0, 7), 7, (1, 2), "0123456789ab")


def again(value: Any) -> Any:
    return from_json(type(value), json.loads(json.dumps(to_json(value), allow_nan=False)))


@pytest.fixture(scope="module")
def verdicts() -> list[Verdict]:
    """Verdicts on drawn cases, with sampling, sessions and findings among them."""
    subject, oracle = subject_of(open_planted("cpu-eager", "kv-truncated-not-gathered", None), 8), Oracle()
    invariants = invariants_matching(("lossless.*", "cache.*", "acceptance.*"))
    cases = Stream(2, ("float32",), subject.variant_interval, subject.abilities)
    judged_verdicts: list[Verdict] = []
    for case in islice(cases, 120):
        judged_verdicts.append(judge(case, taking_turns(case, invariants, subject.pace), oracle, subject))
        if len(judged_verdicts) >= 14 and all(any(parts) for parts in zip(*map(_parts, judged_verdicts), strict=True)):
            break
    return judged_verdicts


def _parts(verdict: Verdict) -> tuple[bool, bool, bool]:
    """Whether a verdict has evidence, findings and a session, which the tests below ask for."""
    return bool(verdict.evidence), bool(verdict.findings), verdict.case.session is not None


def test_verdicts_come_back_and_count_the_same(verdicts: list[Verdict]) -> None:
    restored_verdicts = [again(without_trace(verdict)) for verdict in verdicts]
    assert any(verdict.evidence for verdict in verdicts)
    assert any(verdict.findings for verdict in verdicts)
    assert any(verdict.case.session for verdict in verdicts)
    assert [verdict_line(verdict) for verdict in restored_verdicts] == [verdict_line(verdict) for verdict in verdicts]
    first, second = Tally("mine"), Tally("mine")
    for verdict, restored_verdict in zip(verdicts, restored_verdicts, strict=True):
        first.add(verdict)
        second.add(restored_verdict)
        for part in fields(Verdict):
            if part.name not in ("trace", "findings"):
                assert getattr(verdict, part.name) == getattr(restored_verdict, part.name), part.name
    assert first == second


def test_the_counts_of_parts_add_up_to_those_of_the_whole(verdicts: list[Verdict]) -> None:
    """Every field of a tally: a count that is added to `add` alone would be lost in a merge."""
    labels = verdicts[0].labels or ((0, 1),)
    pairs = PairCoverage(possible_pairs(range(len(LABELS))))
    raised = InternalError("acme.fits", "it broke", ("line 1",))
    light = [
        replace(without_trace(verdict), seconds=1.0 + number, labels=verdict.labels or labels)
        for number, verdict in enumerate(verdicts)
    ]
    checked = next(name for name, outcome in light[0].outcomes.items() if outcome == "checked")
    light[0] = replace(light[0], internal=(raised,), known=("k",), behind=("b",), ties=(Tie("a.b", 2, 0.5),))
    light[0] = replace(light[0], routed=RoutingCounts(3, 1), indexed=IndexingCounts(2, 1))
    light[0] = replace(light[0], reference_rows=CertifiedRows(5, 1, 0.25), predicted_ties={"a.b": 0.5})
    light[0] = replace(light[0], control_errors=(ControlError("float32", "0123", "logits", 1.5),))
    light[0] = replace(light[0], routing_ties=(RoutingTie(checked, 0, 1, 2, 0.5, 1.0, 2.0),))
    light[-1] = replace(light[-1], internal=(raised,), known=("k",), unsupported="no pages", fallbacks={"why": 3})
    light[-1] = replace(light[-1], commits={"fast": 2}, commit_fallbacks={"fast: why": 1}, speculated=Speculated(9, 4))
    whole = Tally("mine", pairs=pairs)
    for verdict in light:
        whole.add(verdict)
    merged = Tally("mine", pairs=pairs)
    for part_verdicts in (light[:5], light[5:]):
        part = Tally("mine", pairs=pairs)
        for verdict in part_verdicts:
            part.add(verdict)
        message = again(counted(part))
        merged.absorb(message.tally, int(message.met, 16), [verdict.case for verdict in part_verdicts])
    untouched = Tally("mine", pairs=pairs)
    for counts in fields(Tally):
        first, second = getattr(whole, counts.name), getattr(merged, counts.name)
        if isinstance(first, float):
            assert first == pytest.approx(second), counts.name
        elif counts.name == "predicted_ties":
            assert {name: pytest.approx(ties) for name, ties in first.items()} == second
        else:
            assert first == second, counts.name
        if counts.name in COUNTED:
            assert first != getattr(untouched, counts.name), counts.name


def test_a_failure_is_told_the_same_after_the_journal(verdicts: list[Verdict], tmp_path: Path) -> None:
    failing_verdicts = [verdict for verdict in verdicts if verdict.first is not None and verdict.trace is not None]
    near = failing_verdicts[0].case
    for verdict in failing_verdicts:
        assert verdict.first is not None
        failure = Failure(verdict, verdict.first, "aaaaaaaaaaaa", 3, near, fault="kv-truncated-not-gathered")
        twin = EagerOutcome("cpu-eager", "differs", verdict.first)
        failure = replace(failure, beside=twin, also=(SameDefect("lossless.stops", Stage.EMITTED, "bbbbbbbbbbbb"),))
        writer = Writer(tmp_path, HEAD)
        writer.add("mine", 2, Found(failure))
        writer.close()
        ((place, message),) = read(tmp_path).runs["mine"].messages
        assert place == 2
        assert isinstance(message, Found)
        assert failure_page(message.failure) == failure_page(failure)
        assert len((tmp_path / FILE).read_bytes()) < 4_000_000


def test_odd_values_come_back() -> None:
    observed = [
        math.inf,
        -math.inf,
        "a\ud800",
        np.float32(0.5),
        {"x": (1, 2)},
        np.arange(6, dtype=np.int8).reshape(2, 3),
    ]
    finding = again(
        Finding("acme.fits", Stage.SCORED, 4, {"node": np.int64(2), "side": "odd"}, math.nan, observed, 2.5)
    )
    assert math.isnan(finding.expected)
    assert finding.observed[:5] == [math.inf, -math.inf, "a\\ud800", 0.5, {"x": [1, 2]}]
    assert finding.observed[5].dtype == np.int8
    assert finding.observed[5].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert finding.where == {"node": 2, "side": "odd"}
    opened = Opened("mine", "cpu", False, {"torch": "2"}, ("a.b",), 5, frozenset({Stage.SCORED, Stage.DRAFTED}))
    assert again(opened) == opened


def test_a_journal_grows_and_its_torn_line_is_left_out(tmp_path: Path) -> None:
    writer = Writer(tmp_path, HEAD)
    for case in "ab":
        writer.add("mine", 0, Passed(case * 12, "why"))
    writer.add("mine", 0, Ended(1.0, 2))
    writer.add("mine", 0, "no message of a journal")
    writer.close()
    journal = read(tmp_path)
    assert journal.head == HEAD
    assert journal.runs["mine"].ended == Ended(1.0, 2)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"run": "mine", "place": 0, "pas')
    writer = Writer(tmp_path, HEAD, goes_on=True)
    writer.add("mine", 1, Passed("c" * 12, "why"))
    writer.close()
    run = read(tmp_path).runs["mine"]
    assert [message.case[0] for _, message in run.messages if isinstance(message, Passed)] == ["a", "b", "c"]
    assert run.ended is None


def test_a_journal_that_cannot_be_written_is_no_pass(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    append = Lines.append

    def full(self: Lines, fact: dict[str, Any]) -> None:
        if "place" in fact:
            raise Unwritable(FILE, "No space left on device")
        append(self, fact)

    monkeypatch.setattr(Lines, "append", full)
    assert sample("gate", "--cases", "6") == 3
    assert " ".join(sample.out.split()).count("No space left on device") == 2
    assert sample.result()["runs"][0]["judged"] == 6


@pytest.mark.parametrize("text", ["", "x\n", "{}\n", '{"journal": 3}\n', f'{{"journal": {VERSION}, "seeds": 3}}\n'])
def test_what_is_no_journal_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    for reader in (read, open_shard):
        with pytest.raises(UnusableInput, match=FILE):
            reader(tmp_path)
        with pytest.raises(UnusableInput, match="no journal"):
            reader(tmp_path / "nowhere")


@pytest.mark.parametrize("name", KINDS)
def test_a_line_of_another_kind_is_refused(name: str, tmp_path: Path) -> None:
    head = json.dumps({"journal": VERSION, **to_json(HEAD)})
    (tmp_path / FILE).write_text(f"{head}\n{json.dumps({'run': 'mine', 'place': 0, name: 3})}\n")
    with pytest.raises(UnusableInput, match="line 2"):
        read(tmp_path)
    shard = open_shard(tmp_path)
    with pytest.raises(UnusableInput, match="line 2"):
        [shard.message(line, KINDS[name]) for line in shard.lines()]
