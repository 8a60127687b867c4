"""Results of the Python interface: whether the engine agrees, failures, JSON, a page for notebooks."""

import html
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from specverify import __version__
from specverify.campaign.replay import ReplayResult
from specverify.properties.tally import Failure, Tally
from specverify.properties.verdict.finding import Verdict
from specverify.reports.layout80 import WIDTH
from specverify.reports.pages.law import LawFacts, law_page, law_records
from specverify.reports.pages.summary import opening, summary_page
from specverify.reports.pages.terminal import failure_page, internal_lines
from specverify.reports.record import failure_fact, internal_fact, summary, verdict_line
from specverify.reports.writing import jsonable
from specverify.setup.environment import environment

FRAME_PX = 640
"""The height of a page in a notebook."""


def framed(page: bytes) -> str:
    """An HTML page as a frame of a notebook, which keeps the page's styles to itself."""
    return f'<iframe srcdoc="{html.escape(page.decode())}" style="width:100%;height:{FRAME_PX}px;border:0"></iframe>'


@dataclass(frozen=True)
class DiffResult:
    """The result of a `diff`.

    Attributes:
        tally: All counts of the run.
    """

    tally: Tally

    @property
    def outcome(self) -> str:
        """`agree`, `differ`, or `unjudged` where too little was compared: that is no pass."""
        return self.tally.outcome

    @property
    def agrees(self) -> bool:
        """Whether enough was compared, and nothing differs."""
        return self.outcome == "agree"

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The distinct causes that were found, each with its smallest case."""
        return tuple(self.tally.failures)

    @property
    def exit_code(self) -> int:
        """The exit code of the command: 0 agree, 1 differ, 3 could not judge."""
        return self.tally.exit_code

    def page(self, width: int = WIDTH, verbose: bool = False) -> str:
        """The pages that the command prints: those of the failures, then that of the run."""
        pages = [opening(self.tally, width)] if self.failures else []
        pages += [failure_page(failure, width=width) for failure in self.failures]
        return "\n".join([*pages, summary_page(self.tally, width, verbose)])

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` writes."""
        return summary(self.tally)

    def _repr_html_(self) -> str:
        from specverify.reports.html.pages import diff_page

        return framed(diff_page(self.tally, __version__))


@dataclass(frozen=True)
class JudgeResult:
    """The result of `judge`: one case on one engine.

    Attributes:
        verdict: The outcome of every invariant, with all findings.
        failure: The finding that lies nearest to the fault, with its texts; None where nothing differs.
    """

    verdict: Verdict
    failure: Failure | None = None

    @property
    def outcome(self) -> str:
        """`agree`, `differ`, or `unjudged` where nothing was compared, or the judge has no answer."""
        if self.verdict.findings:
            return "differ"
        return "agree" if self.verdict.judged and not self.verdict.internal else "unjudged"

    @property
    def agrees(self) -> bool:
        """Whether something was compared, and nothing differs."""
        return self.outcome == "agree"

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The failure, if there is one."""
        return () if self.failure is None else (self.failure,)

    def page(self, width: int = WIDTH) -> str:
        """The failure's page; else one line, with the errors of the judge if there are any."""
        if self.failure is not None:
            return failure_page(self.failure, width=width)
        errors = "".join(internal_lines(error, width) for error in self.verdict.internal)
        why = f": {self.verdict.unsupported}" if self.verdict.unsupported else ""
        word = {"agree": "AGREE", "unjudged": "COULD NOT JUDGE"}[self.outcome]
        return f"{errors}{word}  {self.verdict.backend}, case {self.verdict.case.id}{why}\n"

    def to_json(self) -> dict[str, Any]:
        """The line of the case as a run records it, with the failure."""
        return {**verdict_line(self.verdict), "failure": None if self.failure is None else failure_fact(self.failure)}

    def _repr_html_(self) -> str:
        return _replay_frame(self.outcome.upper(), self.page().splitlines()[-1], self.failure)


@dataclass(frozen=True)
class Replay:
    """The result of `replay`: one saved case that ran again.

    Attributes:
        result: The word, the sentence that explains it, and the failure.
    """

    result: ReplayResult

    @property
    def word(self) -> str:
        """FAILED, CHANGED, FIXED or UNJUDGED; DIFFER or AGREE for a file with a case and no finding."""
        return self.result.word

    @property
    def why(self) -> str:
        """One sentence that explains the word."""
        return self.result.why

    @property
    def agrees(self) -> bool:
        """Whether something was compared, and nothing differs."""
        return self.exit_code == 0

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The failure, if there is one."""
        return () if self.result.failure is None else (self.result.failure,)

    @property
    def exit_code(self) -> int:
        """The exit code of the command: 0 nothing differs, 1 something does, 3 could not judge."""
        return self.result.exit_code

    def page(self, width: int = WIDTH) -> str:
        """What the command prints."""
        pages = "".join(f"{failure_page(failure, width=width)}\n" for failure in self.failures)
        pages += "".join(f"{internal_lines(error, width)}\n" for error in self.result.internal)
        return f"{pages}{self.word}  {self.why}\n"

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` writes."""
        result = self.result
        facts: dict[str, Any] = {
            "result": result.word,
            "why": result.why,
            "finding": None if result.failure is None else failure_fact(result.failure),
            "emulated": result.emulated,
        }
        facts |= {"internal": [internal_fact(error) for error in result.internal]} if result.internal else {}
        return {**facts, "saved_fault": result.saved_fault, "residue": jsonable([*result.residue])}

    def _repr_html_(self) -> str:
        return _replay_frame(self.word, self.why, self.result.failure, self.result.emulated)


def _replay_frame(word: str, why: str, failure: Failure | None, emulated: bool = False) -> str:
    from specverify.reports.html.pages import replay_page

    return framed(replay_page(word, why, failure, emulated, environment(), __version__))


@dataclass(frozen=True)
class LawResult:
    """The result of `law`: the exact law of a rule in a small world, next to the target's.

    Attributes:
        facts: The law, the target's, and whether the rule promises that they are equal.
    """

    facts: LawFacts

    @property
    def agrees(self) -> bool:
        """Whether the rule keeps its promise: a rule that is declared to be lossy promises nothing."""
        return not self.facts.is_broken

    @property
    def total_variation(self) -> Fraction | float:
        """The total variation of the law from the target's; a fraction where the law is known exactly."""
        return self.facts.total_variation

    @property
    def failures(self) -> tuple[LawFacts, ...]:
        """The law, if it breaks the rule's promise."""
        return () if self.agrees else (self.facts,)

    def page(self) -> str:
        """What the command prints."""
        return law_page(self.facts, False)

    def to_json(self) -> Any:
        """The object that `--json` writes."""
        return law_records([self.facts])

    def _repr_html_(self) -> str:
        from specverify.reports.html import law

        return framed(law.law_page([self.facts], __version__))
