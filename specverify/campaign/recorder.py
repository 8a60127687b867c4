"""The work of the command `diff`: run the plan, show progress, write reports and records."""

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from specverify import __version__
from specverify.campaign.campaign import Campaign
from specverify.campaign.messages import Opened
from specverify.campaign.watching import Watched
from specverify.interrupts import Interrupts
from specverify.isolation.here import is_here
from specverify.plan import Plan
from specverify.properties.streams import Stream, Streams
from specverify.properties.tally import Failure, Tally
from specverify.properties.verdict.finding import Verdict
from specverify.records.read import DIFF, Fact
from specverify.records.write import Writer, manifest_of, step_fact
from specverify.reference.case import Case
from specverify.reference.case_json import case_to_json
from specverify.reference.trace import Stage
from specverify.reports import bundle, junit, record, writing
from specverify.reports.pages import sampling, summary, terminal
from specverify.reports.pages.screen import screen_of
from specverify.reports.progress import AnyProgress, Progress
from specverify.reports.record import finding_fact, verdict_line
from specverify.setup.files import check_apart, make_folder, write_or_reason


def run(
    plan: Plan,
    report: Path,
    progress: AnyProgress,
    *,
    trace: Path | None = None,
    here: bool = False,
    watched: Watched | None = None,
) -> tuple[Tally, int | None]:
    """Run `plan` and record its verdicts and failures in `report`; return the tally, and the exit code of a refusal.

    Args:
        plan: The plan.
        report: The folder, which is made if need be.
        progress: What is told while the run goes on.
        trace: A folder for a record of the run (`specverify.records`), or None.
        here: Whether one thread of this process searches in place of worker processes; so it is for a backend that is
            an object of this process.
        watched: A page that is written again and again while the run goes on, or None.

    Raises:
        Unwritable: The folder cannot be written.
    """
    make_folder(report)
    campaign_class, jobs = Campaign, plan.jobs
    if here or is_here(plan.backend):
        from specverify.campaign.crew_here import CampaignHere  # brings what workers alone need

        campaign_class, jobs = CampaignHere, 1
    identity = record.run_fact(__version__, plan.seed, plan.fault)
    with contextlib.ExitStack() as stack:
        writer = None if trace is None else stack.enter_context(Writer(trace, manifest_for(plan)))
        lines = stack.enter_context(record.RunLines(report, identity))
        stack.enter_context(progress)
        recorded_plan = replace(plan, jobs=jobs, recorded=writer is not None)
        campaign = campaign_class(recorded_plan, Recorder(plan, report, lines, progress, writer, watched))
        if watched is not None:
            watched.begin(campaign)
        campaign.run()
        return campaign.tally, campaign.code


def diff(
    plan: Plan,
    report: Path,
    *,
    junit_file: str | None = None,
    json_file: str | None = None,
    html_file: str | None = None,
    verbose: bool = False,
    trace: Path | None = None,
    watch: bool = False,
) -> int:
    """Run `plan` and write its reports into the folder `report`; with `verbose`, the page has every count.

    With `trace`, a record of the run is written there (`specverify.records`). With `watch`, the HTML page is written
    while the run goes on, too.

    Returns:
        0 agree, 1 differ, 2 wrong input, 3 could not judge, or could not write a requested report.

    Raises:
        UnusableInput: Two reports would be one file.
        Unwritable: The report folder or a requested file cannot be written; raised before any case runs if it can be
            known by then.
    """
    results = report / record.RESULTS
    make_folder(report)
    for file in filter(None, (junit_file, json_file, html_file)):
        writing.check_writable(file)
    results_name = "the run's own results"
    check_apart({results_name: str(results), "--json": json_file, "--junit": junit_file, "--html": html_file})
    with Interrupts():  # an interrupt during the writing of reports waits until they are written
        watched = Watched(html_file) if watch and html_file is not None else None
        tally, refused = run(plan, report, Progress(plan.drawn_and_saved), trace=trace, watched=watched)
        # A run that could not start has nothing to report, unless failures or cases came before the refusal.
        if refused is not None and not (tally.failures if refused == 2 else tally.cases):
            errors = "; ".join(" ".join(line.split()) for line in tally.errors)
            print(f"specverify: {errors}", file=sys.stderr)  # noqa: T201 - the shell's own voice
            return refused
        # A report on standard output must not be mixed with pages.
        out = sys.stderr if "-" in (json_file, junit_file, html_file) else sys.stdout
        show(tally, out, verbose)
        unwritten = []
        if junit_file is not None:
            unwritten += write_or_reason(junit_file, junit.junit(tally))
        if json_file is not None:
            unwritten += write_or_reason(json_file, writing.as_json(record.summary(tally), indent=1).encode())
        if html_file is not None:
            from specverify.reports.html.pages import diff_page  # Jinja is imported only for a page

            unwritten += write_or_reason(html_file, diff_page(tally, __version__))
        for line in unwritten:
            print(f"specverify: {line}", file=sys.stderr)  # noqa: T201
        # A difference (1) is more certain than a failed write, and is kept.
        return 3 if unwritten and tally.exit_code == 0 else tally.exit_code


class Recorder:
    """The `Listener` of `diff`: it writes each verdict and each failure to its file at once."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        lines: record.Lines,
        progress: AnyProgress,
        writer: Writer | None = None,
        watched: Watched | None = None,
    ) -> None:
        self._watched = watched
        self._plan = plan
        self._writer = writer
        self._folder = folder
        self._lines = lines
        self._progress = progress
        self._environment = plan.environment
        self._before: set[str] = set()
        self._streams: dict[str, Stream] = {}

    def backend_opened(self, message: Opened) -> None:
        """See `specverify.campaign.campaign.Listener`."""
        self._progress.num_wanted = message.wanted if self._plan.model is not None else self._plan.drawn_and_saved
        self._environment |= message.environment
        if self._plan.model is not None and Stage.ACCEPTED in message.reveals:
            begun = f"{message.wanted} cases; its weights are being read"
            self._progress.say(f"specverify: {self._plan.model}: {begun}")
        # Where sampling is what the run is for, or all that it has, its power is told before its first case.
        planned = None if message.sampling is None else message.sampling.over(self._plan.cases)
        if planned is not None and (self._plan.focus is not None or message.tokens_alone):
            self._progress.say(f"specverify: sampling: {sampling.planned_line(planned)}")

    def time_estimated(self, line: str) -> None:
        """See `specverify.campaign.campaign.Listener`."""
        self._progress.say(f"specverify: {line}")

    def verdict_arrived(self, verdict: Verdict) -> str | None:
        """See `specverify.campaign.campaign.Listener`."""
        for test in (evidence for evidence in verdict.evidence if evidence.stream):
            stream = self._streams.setdefault(test.invariant, Stream(test.invariant))
            stream.add(test)
            smallest = Streams((stream,)).smallest(stream)
            self._progress.show_power(f"{stream.draws} draws show shifts of {sampling.percent(smallest)}")
        self._progress.advance(1, failures=int(bool(verdict.findings)))
        try:
            self._lines.add(verdict)
            if self._writer is not None:
                self._writer.turn(turn_for(verdict))
        except writing.Unwritable as why:
            return str(why)
        return None

    def failure_found(self, failure: Failure, before: Failure | None) -> tuple[Failure, str | None]:
        """See `specverify.campaign.campaign.Listener`."""
        self._progress.note("" if before is not None else "shrinking")
        path = self._folder / f"{failure.verdict.case.id}.json"
        if before is None and path.exists():
            self._before.add(str(path))  # the file of an earlier run, which must not be deleted below
        try:
            saved = replace(failure, file=str(bundle.save(self._folder, failure, self._environment)))
            if self._writer is not None:
                self._write_dump(failure, before)
        except writing.Unwritable as why:
            return replace(failure, file=None if before is None else before.file), str(why)
        # The shrunk case has another id, and thus another file than the case as drawn.
        if before is not None and before.file not in (None, saved.file) and before.file not in self._before:
            with contextlib.suppress(OSError):
                Path(before.file).unlink()
        return saved, None

    def judge_raised(self, failure: Failure) -> tuple[Failure, str | None]:
        """See `specverify.campaign.campaign.Listener`."""
        try:
            # The case may differ beside: its own file has the name of the case alone.
            name = f"{failure.verdict.case.id}-{failure.finding.invariant}.json"
            return replace(failure, file=str(bundle.save(self._folder, failure, self._environment, name))), None
        except writing.Unwritable as why:
            return failure, str(why)

    def _write_dump(self, failure: Failure, before: Failure | None) -> None:
        """Write the dump of a failure in place of that of the case before it was made smaller."""
        assert self._writer is not None
        dump = failure_for(failure, self._environment)
        path = self._writer.failure(failure.verdict.case.id, dump)
        if before is not None and before.verdict.case.id != failure.verdict.case.id:
            path.with_stem(before.verdict.case.id).unlink(missing_ok=True)

    def messages_recalled(self) -> None:
        """See `specverify.campaign.campaign.Listener`."""
        self._progress.restart()

    def tick_passed(self) -> None:
        """See `specverify.campaign.campaign.Listener`."""
        self._progress.wait()
        if self._watched is not None:
            self._watched.look()  # a page that cannot be written is told with the next message

    def message_heard(self, place: int, message: object) -> str | None:
        """See `specverify.campaign.campaign.Listener`."""
        return None if self._watched is None else self._watched.look()

    def worker_lost(self, case: Case) -> str | None:
        """See `specverify.campaign.campaign.Listener`."""
        path = self._folder / f"{case.id}.json"
        with contextlib.suppress(writing.Unwritable):
            bundle.save_case(path, case)
            return str(path)
        return None


def show(tally: Tally, out: TextIO, verbose: bool = False) -> None:
    """Print first sentences, the page of each failure (with its case, if no file holds it), and the page of the run."""
    screen = screen_of(out, os.environ)

    def put(page: str) -> None:
        print(screen.paint(page), file=out)

    if tally.failures:
        put(summary.opening(tally, screen.width))
    for failure in tally.failures:
        put(terminal.failure_page(failure, width=screen.width))
        if failure.file is None:
            print(writing.as_json(case_to_json(failure.verdict.case)), file=out)
    put(summary.summary_page(tally, screen.width, verbose))


def manifest_for(plan: Plan) -> Fact:
    """The manifest of a `diff`."""
    options: Fact = {
        "backend": plan.backend, "against": plan.against, "reference": plan.reference, "model": plan.model,
        "draft": plan.draft, "prompts": plan.prompts, "invariants": plan.invariants, "cases": plan.cases,
        "new_tokens": plan.new_tokens, "steps": plan.steps, "layers": plan.layers, "variants": plan.variants,
        "dtypes": plan.dtypes, "seed": plan.seed, "jobs": plan.jobs, "fault": plan.fault, "layout": plan.layout,
        "mode": plan.mode, "focus": plan.focus, "batch": plan.batch, "concurrency": plan.concurrency,
        "processors": plan.processors,
    }  # fmt: skip
    return manifest_of(DIFF, options, {}, seed=plan.seed)


def turn_for(verdict: Verdict) -> Fact:
    """The turn of a judged case; its run is empty where the backend declined it or broke."""
    run, line = verdict.run, verdict_line(verdict)
    fact: Fact = {
        "prompt": verdict.case.id,
        "way": verdict.backend,
        "tokens": () if run is None else run.tokens,
        "seconds": verdict.forward_s,
        "stages": {"forwards": verdict.forward_s},
        "accepted": () if run is None else tuple(len(path) - 1 for path in run.paths),
        "fallbacks": dict(verdict.fallbacks),
        "outcome": line["outcome"],
    }
    if run is not None:
        fact |= {"nodes": run.nodes, "height": run.height, "emitted": run.emitted, "paths": run.paths}
        fact |= {} if run.draft_calls is None else {"draft_calls": run.draft_calls}
    return fact


def failure_for(failure: Failure, environment: Mapping[str, str]) -> Fact:
    """The dump of a failure: its finding, the tree of its step as it was lowered, and the environment of the run."""
    verdict, finding = failure.verdict, failure.finding
    steps = () if verdict.trace is None else verdict.trace.steps
    shown_step = step_fact(steps[finding.step]) if 0 <= finding.step < len(steps) else {}
    return {
        "prompt": verdict.case.id,
        "way": failure.backend,
        "finding": finding_fact(finding),
        "step": finding.step,
        **shown_step,
        "environment": dict(environment),
    }
