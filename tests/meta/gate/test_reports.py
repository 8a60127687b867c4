"""The reports of a gate: by their schemas and parsers, bounded, and safe against what engines say."""

import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft4Validator, Draft202012Validator
from junitparser import JUnitXml
from markdown_it import MarkdownIt

from specverify.properties.gate_result import SEEN, STALE, GateResult, GateRun, KnownState
from specverify.properties.known import KnownFailure, Signature
from specverify.properties.tally import Counts, Failure, Tally
from specverify.properties.verdict.finding import FINISHED, Finding, Verdict
from specverify.reference.trace import Stage
from specverify.reports.gate import markdown, page, record, services
from specverify.reports.junit import gate_junit
from specverify.reports.writing import as_json
from tests.cases import ONE_CHILD
from tests.meta.gate.hostile import strings
from tests.meta.gate.test_ledger import make_finding

HOSTILE = strings()
UNSAFE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ufeff\ud800-\udfff]"
)
"""Control codes, marks of direction, and lone surrogates; tabs and newlines are ours."""


def result_of(text: str, failures: int = 1) -> GateResult:
    """A result in which every foreign word is `text`."""
    findings = [
        Finding(
            "lossless.completes", Stage.SCORED, 0, {"side": text}, FINISHED, text, said=(text, f"a/b.py:3 in f: {text}")
        ),
        Finding("cache.isolation", Stage.COMMITTED, 0, {"kind": text, "slot": 3}, text, [text, text]),
        make_finding(),
    ]
    located = []
    for index in range(failures):
        finding = findings[index % 3]
        outcomes = {finding.invariant: "failed", text: "checked"}
        verdict = Verdict(ONE_CHILD, text, outcomes, (finding,))
        name = text[:200]  # by the user's own command, and in a path: no megabyte
        file = f".specverify/{name}"
        located.append(Failure(verdict, finding, text, file=file, backend=name, model=name, against=name))
    tally = Tally(text, cases=3, judged=3, differed=failures, failures=located, errors=[text], stopped=text)
    tally.invariants = {"cache.isolation": Counts(3, failures, 0, 0, 3), text: Counts(1)}
    tally.environment, tally.unsupported, tally.passed = {text: text}, {text: 1}, {"0" * 12: text}
    tally.known.update([text])
    tally.behind.update([text])
    known_failure = KnownFailure(text, Signature(text, "scored", (("side", text),), text))
    states = [KnownState(known_failure, text, state, 2, text, text, "2030-01-01", text) for state in (SEEN, STALE)]
    run = GateRun(text, text, tally, short=[text], drawn="0" * 12)
    return GateResult([run], states, (0, 7), 7, complaints=[text], notes=[text], seconds=1.0)


@pytest.fixture(scope="module", params=[10, pytest.param(1, marks=pytest.mark.slow)], ids=["one in ten", "all"])
def results(request: pytest.FixtureRequest) -> list[GateResult]:
    return [result_of(text) for text in (*HOSTILE[:: request.param], HOSTILE[-1])]


def html_of(text: str) -> str:
    rendered: str = MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(text)
    return rendered


TAGS = {"h2", "h3", "p", "table", "thead", "tbody", "tr", "th", "td", "code", "pre", "ul", "li"}
"""The elements that our own Markdown makes."""


def test_no_foreign_word_makes_markup_in_the_summary(results: list[GateResult]) -> None:
    plain = shape(html_of(markdown.summary(result_of("word"))))
    for result in results:
        text = markdown.summary(result)
        assert len(text) <= markdown.LARGEST
        assert not UNSAFE.search(text)
        rendered = html_of(text)
        assert shape(rendered) == plain, result.runs[0].backend[:200]
        for attributes in re.findall(r"<\w+ ([^>]*)>", rendered):
            assert re.fullmatch(r'style="text-align:right"|class="language-text"', attributes)
        outside = re.sub(r"<(code|pre).*?</\1>", "", rendered, flags=re.DOTALL)
        assert not re.search(r"@\w", outside)


def shape(rendered: str) -> list[str]:
    """The tags of HTML in their order; all of them must be ours."""
    tags = re.findall(r"<(/?\w+)", rendered)
    assert {tag.strip("/") for tag in tags} <= TAGS
    return tags


def test_the_shape_sees_what_a_raw_word_would_do() -> None:
    assert "script" in re.findall(r"<(/?\w+)", html_of("- x <script>1</script>"))
    assert html_of("a | b\n--|--\n1 | 2").startswith("<table>")


def test_junit_is_well_formed_and_bounded(results: list[GateResult]) -> None:
    sound = [(case.name == "run", [type(element) for element in case.result]) for case in cases(result_of("word"))]
    for result in results:
        content = gate_junit(result)
        assert len(content) < 200_000
        assert not UNSAFE.search(content.decode())
        assert [(case.name == "run", [type(element) for element in case.result]) for case in cases(result)] == sound


def cases(result: GateResult) -> Iterator[Any]:
    for suite in JUnitXml.fromroot(JUnitXml.fromstring(gate_junit(result))._elem):
        yield from suite


def test_annotations_are_our_own_commands_alone(results: list[GateResult], tmp_path: Path) -> None:
    for result in results:
        lines = services.annotations(result, tmp_path).split("\n")
        assert lines.pop() == ""
        assert 0 < len(lines) <= services.MOST
        for line in lines:
            assert re.fullmatch(r"::error [^:\n]*::[^\n]*", line)
            assert len(line) < 2000
            assert not UNSAFE.search(line)


def test_the_page_obeys_no_control_code_and_is_bounded(results: list[GateResult]) -> None:
    for result in results:
        text = page.gate_page(result)
        assert not UNSAFE.search(text)
        assert len(text) < 100_000


def test_output_on_github_cannot_give_commands() -> None:
    walled = services.wall_off("\n::error::x\n").split("\n")
    stop = walled[0].removeprefix("::stop-commands::")
    assert re.fullmatch("[0-9a-f]{32}", stop)
    assert walled[-2] == f"::{stop}::"
    assert services.wall_off("x") != services.wall_off("x")


def test_the_result_is_valid_by_its_schema(results: list[GateResult]) -> None:
    validator = Draft202012Validator(record.schema())
    Draft202012Validator.check_schema(record.schema())
    for result in results[::5]:
        text = as_json(record.gate_fact(result))
        text.encode()
        validator.validate(json.loads(text))
    for field in record.schema()["required"]:
        full_fact = record.gate_fact(result_of("word"))
        del full_fact[field]
        assert not validator.is_valid(full_fact), field


def test_a_crash_is_shown_at_its_line_in_the_repository(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "kernel.py").write_text("x\n" * 9)
    lines = ("engine/kernel.py:7 in run: x", "elsewhere/lib.py:9 in f: y", "/etc/passwd:1 in g: z", "../a.py:1 in h: w")
    finding = Finding("lossless.completes", Stage.SCORED, 0, {}, FINISHED, "KeyError: 1", said=lines)
    result = result_of("mine")
    verdict = Verdict(ONE_CHILD, "mine", {"lossless.completes": "failed"}, (finding,))
    result.runs[0].tally.failures = [Failure(verdict, finding, "drawn")]
    (entry,) = services.code_quality(result, tmp_path)
    assert entry["location"] == {"path": "engine/kernel.py", "lines": {"begin": 7}}
    assert set(entry) == {"description", "check_name", "fingerprint", "severity", "location"}
    assert "::error file=engine/kernel.py,line=7,title=" in services.annotations(result, tmp_path)
    again = services.code_quality(result, tmp_path)
    assert again[0]["fingerprint"] == entry["fingerprint"]


def test_sarif_points_at_the_line_of_a_crash_and_holds_what_the_format_requires(tmp_path: Path) -> None:
    """The required fields of OASIS' schema; SPECVERIFY_SARIF_SCHEMA may name that schema's file."""
    name = "kérnel #1.py"
    (tmp_path / name).write_text("x\n" * 9)
    for text in HOSTILE[::10]:
        result = result_of(text)
        finding = Finding("lossless.completes", Stage.SCORED, 0, {}, FINISHED, text, said=(f"{name}:7 in run: {text}",))
        verdict = Verdict(ONE_CHILD, text, {"lossless.completes": "failed"}, (finding,))
        result.runs[0].tally.failures += [Failure(verdict, finding, "drawn")] * 2
        report = json.loads(as_json(services.sarif(result, tmp_path)).encode())
        assert (report["version"], set(report)) == ("2.1.0", {"$schema", "version", "runs"})
        (run,) = report["runs"]
        first, second = run["results"]
        assert first == second
        assert run["tool"]["driver"]["rules"][first["ruleIndex"]]["id"] == first["ruleId"] == "lossless.completes"
        where = first["locations"][0]["physicalLocation"]
        assert where["artifactLocation"]["uri"] == "k%C3%A9rnel%20%231.py"
        assert where["region"] == {"startLine": 7}
        assert not UNSAFE.search(first["message"]["text"])
        if schema := os.environ.get("SPECVERIFY_SARIF_SCHEMA"):
            Draft4Validator(json.loads(Path(schema).read_text())).validate(report)
    assert services.sarif(result_of("mine", failures=300), tmp_path)["runs"][0]["results"] == []


def test_many_failures_are_counted_where_they_are_not_shown(tmp_path: Path) -> None:
    result = result_of("mine", failures=200)
    assert "190 further failures" in markdown.summary(result)
    assert len(markdown.summary(result)) <= markdown.LARGEST
    assert "further problems are in the summary" in services.annotations(result, tmp_path)
    assert io.BytesIO(gate_junit(result)).getvalue().count(b"<failure") >= 200
