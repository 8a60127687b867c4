"""A gate as Markdown: GitHub's step summary, GitLab's note on a merge request.

Foreign words stand in code, escaped: no name, prompt or message can make markup, a mention or a link of its own.
"""

import re

from specverify.properties.gate_result import ELSEWHERE, GateResult, GateRun
from specverify.properties.tally import Failure
from specverify.reports.bundle import replay_command
from specverify.reports.case_diff import case_summary
from specverify.reports.drawing import draw
from specverify.reports.format import HEADLINES, address, cut, escape, excess, expected_and_observed, number, outside
from specverify.reports.gate import words
from specverify.reports.gate.comparison import Comparison
from specverify.reports.tree_scene import scene_of

LARGEST = 60_000
"""Most characters of the summary: a comment on GitHub takes 65,536, a step summary a megabyte."""

MOST_FAILURES = 10
"""Most failures that the summary shows."""

MOST_LINES = 40
"""Most lines of a block."""

LONGEST_LINE = 200
"""Most characters of a line in a block."""


def code(text: str, longest: int = 240) -> str:
    """`text` as inline code that holds nothing but text, wherever in Markdown it stands.

    >>> print(code("a|b <i>"))
    <code>a&#124;b &#60;i&#62;</code>
    """
    return f"<code>{_escape_markup(text, longest)}</code>"


def _escape_markup(text: str, longest: int) -> str:
    """`text` on one line, with a character reference for all that Markdown or HTML could take for markup."""
    # A dash inside a word is no list and no line.
    plain = re.sub(r"[^A-Za-z0-9 .,=/()-]|(?<![A-Za-z0-9])-", lambda char: f"&#{ord(char[0])};", cut(text, longest))
    # GitHub and GitLab look for mentions after the references are resolved: a blank without width prevents one.
    return plain.replace("&#64;", "&#64;\u200b")


def block(text: str) -> str:
    """`text` as a fenced block, whose fence is longer than every run of backticks in it."""
    lines = [escape(line[:LONGEST_LINE]) for line in text[:LARGEST].split("\n")[:MOST_LINES]]
    content = "\n".join(lines).strip("\n")
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", content)), default=0))
    return f"{fence}text\n{content}\n{fence}\n"


def summary(result: GateResult) -> str:
    """The whole summary, of at most LARGEST characters."""
    sections = [_head(result), _table(result)]
    located = words.failures(result)
    sections += [_failure(run, failure) for run, failure in located[:MOST_FAILURES]]
    if len(located) > MOST_FAILURES:
        sections.append(
            f"{len(located) - MOST_FAILURES} further failures are in the JUnit report and in `gate.json`.\n"
        )
    sections += [_known_rows(result), _unjudged_lines(result), _foot(result)]
    kept_sections, size = [], 0
    for section in filter(None, sections):
        size += len(section) + 1
        if size > LARGEST - 200:
            kept_sections.append(
                "The rest is left out: see `gate.json` and `junit.xml` among the artefacts of the run.\n"
            )
            break
        kept_sections.append(section)
    return "\n".join(kept_sections)


def _head(result: GateResult) -> str:
    mark = {"agree": "✅", "differ": "❌", "unjudged": "⚠️"}[result.outcome]
    return f"## {mark} SpecVerify: {HEADLINES[result.outcome]}\n\n{_prose(words.verdict(result))}\n"


def _prose(text: str) -> str:
    """A sentence of ours that may hold foreign names."""
    return _escape_markup(text, 600)


def _table(result: GateResult) -> str:
    rows = ["| backend | result | judged | drawn | differ | known | invariants |", "|---|---|--:|--:|--:|--:|--:|"]
    for run in result.runs[:40]:
        tally = run.tally
        emulated = " EMULATED" if tally.emulated else ""
        excluded = f", not judged: {_escape_markup(outside(tally.excluded), 200)}" if tally.excluded else ""
        num_checked = sum(1 for counts in tally.invariants.values() if counts.checked)
        num_known = sum(1 for _ in tally.known.elements())
        counts = " | ".join(map(str, (tally.judged, tally.cases, tally.differed, num_known, num_checked)))
        rows.append(f"| {code(run.title, 60)} | {HEADLINES[run.outcome]}{emulated}{excluded} | {counts} |")
    return "\n".join(rows) + "\n"


def _failure(run: GateRun, failure: Failure) -> str:
    finding = failure.finding
    scene = scene_of(failure.verdict, finding)
    excess_words = f" ({excess(finding)})" if excess(finding) else ""
    expected, observed = expected_and_observed(finding)
    parts = [
        f"### {code(run.title, 120)}: {code(finding.invariant, 80)}\n",
        f"{_prose(words.sentence(failure))}\n",
        block(draw(scene.tree, scene.path, scene.node)) if scene.tree else "",
        f"- began at {_prose(address(finding))}; {_prose(case_summary(failure.verdict.case))}",
        f"- expected {code(expected)}",
        f"- observed {code(observed + excess_words)}",
    ]
    parts += [f"- bundle {code(failure.file, 300)}"] if failure.file is not None else []
    if finding.said:
        parts.append("\nThe engine's last lines:\n\n" + block("\n".join(finding.said[-8:])))
    command = replay_command(failure)
    if command is not None:
        parts.append("\nReplay:\n\n" + block(command if len(command) <= LONGEST_LINE else _break_lines(command)))
    return "\n".join(part for part in parts if part) + "\n"


def _break_lines(command: str) -> str:
    return command.replace(" --", " \\\n  --")


def _known_rows(result: GateResult) -> str:
    known_failures = [known_failure for known_failure in result.known if known_failure.state != ELSEWHERE]
    if not known_failures:
        return ""
    rows = ["### Known failures\n", "| failure | state | cases | until | reason |", "|---|---|--:|---|---|"]
    for known_failure in known_failures[:20]:
        failure = f"{code(known_failure.backend, 60)} {code(str(known_failure.known.main), 120)}"
        why = f": {_escape_markup(known_failure.why, 100)}" if known_failure.why else ""
        reason = _escape_markup(known_failure.reason, 100) + (
            f" {code(known_failure.issue, 120)}" if known_failure.issue else ""
        )
        rows.append(
            f"| {failure} | {known_failure.state}{why} | {known_failure.cases} | {known_failure.until} | {reason} |"
        )
    hidden_rows = [f"- behind them: {code(name)} in {count} cases" for name, count in result.behind.most_common(10)]
    return "\n".join([*rows, "", *hidden_rows]) + "\n"


def _unjudged_lines(result: GateResult) -> str:
    lines = [f"- {_escape_markup(reason, 160)}" for reason in words.reasons(result)[:15]]
    lines += [f"- note: {_escape_markup(note, 160)}" for note in result.notes[:10]]
    return "\n".join(["### Not judged, and notes\n", *lines]) + "\n" if lines else ""


def _foot(result: GateResult) -> str:
    seeds = ", ".join(map(str, result.seeds))
    rerun_words = (
        f"Seeds {seeds}; {number(result.seconds)} s. The same cases again: {code(words.rerun_command(result))}"
    )
    return f"{rerun_words}\n\nThe page `gate.html` among the artefacts of the run has pictures of each failure.\n"


def comparison_summary(comparison: Comparison) -> str:
    """Two results compared, of at most LARGEST characters."""
    mark = {0: "✅", 1: "❌", 3: "⚠️"}[comparison.exit_code]
    lines = [f"## {mark} SpecVerify: this run beside the earlier one\n"]
    for name, section_lines in comparison.sections():
        lines += [f"### {name.capitalize()}\n", *(f"- {_escape_markup(line, 300)}" for line in section_lines[:50])]
        lines += [f"- and {len(section_lines) - 50} more", ""] if len(section_lines) > 50 else [""]
    lines += [] if comparison.sections() else ["No difference."]
    return "\n".join(lines)[:LARGEST] + "\n"
