"""The work of the command `gate`: run it, print its page, write its reports."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from specverify import __version__
from specverify.fleet.shards import Shard, common_head
from specverify.gate.profile import Profile, Wishes
from specverify.gate.run import Gate
from specverify.interrupts import Interrupts
from specverify.properties.gate_result import GateResult
from specverify.reports import writing
from specverify.reports.gate import markdown, page, record, services
from specverify.reports.html.pages import gate_page
from specverify.reports.junit import gate_junit
from specverify.reports.pages.screen import screen_of
from specverify.setup.files import make_folder, write_or_reason

FILES = ("gate.json", "summary.md", "junit.xml", "code-quality.json", "specverify.sarif", "gate.html")
"""The files of a report folder, beside results.jsonl and the bundles."""

STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
"""The variable of GitHub that names the file to which a step adds its summary."""


def run_and_report(
    profile: Profile,
    wishes: Wishes,
    folder: Path,
    *,
    json_file: str | None,
    out: TextIO,
    variables: Mapping[str, str],
    html_file: str | None = None,
    verbose: bool = False,
    merged: list[Shard] | None = None,
) -> int:
    """Run the gate and write its reports into `folder`; the exit code.

    Args:
        profile: The profile.
        wishes: What the command line asks.
        folder: The folder of reports, which is made if need be.
        json_file: A further file for the result as JSON, `-` for standard output, or None.
        out: Where pages go.
        variables: The environment: those of GitHub decide on annotations and the step summary.
        html_file: A further file for the page, or None.
        verbose: Whether the pages hold the counts of every invariant.
        merged: Shards, whose common result is told in place of a run; None to run.

    Raises:
        Unwritable: The folder cannot be made.
        UnusableInput, MissingInput: The profile asks for what is not there.
    """
    make_folder(folder)
    github = variables.get("GITHUB_ACTIONS") == "true"
    with Interrupts():  # an interrupt during the writing of reports waits until they are written
        if merged:
            result = Gate(profile, replace(wishes, seed=common_head(merged).fresh), folder).merge(merged)
        else:
            gate = Gate(profile, wishes, folder)
            print(f"specverify gate: {page.seeds_line(gate.result)}", file=sys.stderr)  # noqa: T201
            result = gate.run()
        screen = screen_of(out, variables)
        text = screen.paint(page.gate_output(result, screen.width, verbose))
        # Words of engines must not be taken for commands of the workflow.
        print(services.wall_off(text) if github else text, file=out)
        if github:
            print(services.annotations(result, root_of(variables)), end="", file=out)
        unwritten = _write_reports(result, folder, json_file, html_file, variables)
    for line in unwritten:
        print(f"specverify: {line}", file=sys.stderr)  # noqa: T201
    return 3 if unwritten and result.exit_code == 0 else result.exit_code


def root_of(variables: Mapping[str, str]) -> Path:
    """The folder of the repository: the one that the CI names, or the current one."""
    return Path(variables.get("GITHUB_WORKSPACE") or variables.get("CI_PROJECT_DIR") or ".")


def _write_reports(
    result: GateResult, folder: Path, json_file: str | None, html_file: str | None, variables: Mapping[str, str]
) -> list[str]:
    """Write every report; a line for each that could not be written."""
    as_json = writing.as_json(record.gate_fact(result), indent=1).encode()
    summary = markdown.summary(result)
    quality = writing.as_json(services.code_quality(result, root_of(variables)), indent=1).encode()
    scanning = writing.as_json(services.sarif(result, root_of(variables)), indent=1).encode()
    html = gate_page(result, __version__)
    contents = (as_json, summary.encode(), gate_junit(result), quality, scanning, html)
    files = [(str(folder / name), content) for name, content in zip(FILES, contents, strict=True)]
    files += [(file, content) for file, content in ((json_file, as_json), (html_file, html)) if file]
    unwritten = [reason for file, content in files for reason in write_or_reason(file, content)]
    step = variables.get(STEP_SUMMARY)
    return unwritten + (_append(step, summary) if step else [])


def _append(file: str, text: str) -> list[str]:
    """Add `text` to the summary of a step, to which other commands add too; the reason where that fails."""
    try:
        with Path(file).open("a", encoding="utf-8") as summary:
            summary.write(text + "\n")
    except OSError as why:
        return [f"cannot write {file}: {why.strerror or why}"]
    return []
