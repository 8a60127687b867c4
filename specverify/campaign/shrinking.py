"""Shrinking of a failing case, and the search for a near case that agrees.

First Hypothesis shrinks the values that it drew (`Search` calls `fails_alike` for each of its tries). Then greedy steps
shrink the case itself (`failure`). Both follow one rule: a smaller case counts only if the same invariant differs at
the same stage.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from specverify.backends.adapters import known_faults
from specverify.plan import Plan
from specverify.properties.known import without_known_findings
from specverify.properties.refused_settings import refused_setting
from specverify.properties.shrinking.cases import STEPS, Steps, attempts, distance, nearer, size
from specverify.properties.shrinking.sessions import smaller_batches
from specverify.properties.shrinking.without_draft import without_draft
from specverify.properties.tally import Failure
from specverify.properties.texts import texts_of
from specverify.properties.verdict.finding import (
    ASKED_BY,
    COMPLETES,
    TARGET_ALONE,
    Finding,
    Verdict,
    error_of,
    is_about_draft_numbers,
    is_about_target_alone,
)
from specverify.properties.verdict.invariant import Invariant, Oracle
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.properties.witnesses import mistake_of
from specverify.reference.case import Case
from specverify.reference.trace import Stage

LAW = "lossless.distribution"
"""The invariant of the law of sampled texts."""

BESIDE_LAW = (
    "lossless.deterministic",
    "lossless.state-isolated",
    "lossless.own-seed",
    "lossless.same-seed",
    "acceptance.rate",
    "acceptance.company-independent",
)
"""Invariants that compare sampled runs with others of the same seed, or count what was accepted: where the law is wrong
too, it says more."""

PLAIN_TEMPERATURE = 1.0
"""A temperature at which most faults of a law show."""

DRAWN_SHARE = 0.6
"""Hypothesis's share of a plan's shrinking time; the greedy steps get the rest."""

NEAREST_SHARE = 0.25
"""Additional time for the search of a case that agrees, as a share of a plan's shrinking time."""

HINT_S = 30.0
"""Most seconds in which requests are tried that tell mistakes of an adapter apart."""


@dataclass
class Shrinking:
    """The work on one difference.

    Attributes:
        plan: The plan; it limits the time, and its names go into the failure.
        invariants: The invariants to check.
        oracle: The reference.
        subject: The backend.
        halted: Whether the work must end.
        first: The verdict on the case as drawn; it differs.
        began: `time.monotonic` at the beginning.
        smallest: The verdict on the smallest case so far with the same invariant and stage.
    """

    plan: Plan
    invariants: tuple[Invariant, ...]
    oracle: Oracle
    subject: Subject
    halted: Callable[[], bool]
    first: Verdict
    began: float = field(default_factory=time.monotonic)
    smallest: Verdict = field(init=False)
    _finding: Finding = field(init=False)
    _agreeing_case: Case | None = None
    _tried: int = 0

    def __post_init__(self) -> None:
        self.smallest = self.first
        self._finding = _first_finding(self.first)
        # The limit of Hypothesis's part; `failure` moves it to the whole time.
        self._until = self.began + DRAWN_SHARE * self.plan.shrink_s

    @property
    def failed_stages(self) -> set[tuple[str, Stage]]:
        """Invariant and stage of the difference, as drawn and as shrunk (`blame` may have changed them)."""
        return {(finding.invariant, finding.stage) for finding in (_first_finding(self.first), self._finding)}

    def out_of_time(self) -> bool:
        """Whether the time for shrinking is over, or the work was halted."""
        return time.monotonic() > self._until or self.halted()

    def blame(self) -> None:
        """Continue with a related case in place of the drawn one, if that case locates the fault better."""
        self._blame_broken_run()
        self._blame_law()
        self._blame_fewest_requests()
        self._blame_what_draft_and_target_share()
        self._locate_in_float32()

    def _blame_broken_run(self) -> None:
        """If a further run broke that an invariant asked for, continue with that run's case, if it breaks by itself."""
        asked_by = self._finding.where.get(ASKED_BY)
        if asked_by is None:
            return
        with self.subject.record_cases() as runs:
            self._verdict_on(self.smallest.case, self._invariant_of(self._finding))
        for run in runs:
            if self.out_of_time():
                return
            self._tried += 1
            judged = self._verdict_on(run, self._named(COMPLETES))
            if run != self.smallest.case and judged.first is not None and ASKED_BY not in judged.first.where:
                self.smallest = judged
                self._finding = judged.first
                return

    def _blame_law(self) -> None:
        """If a sampled case is no run of its seed, or its counts are wrong, continue with its law, if that is wrong."""
        if self._finding.invariant not in BESIDE_LAW or self.smallest.case.sampling.greedy or self.out_of_time():
            return
        sampling = self.smallest.case.sampling
        for temperature in dict.fromkeys((sampling.temperature, PLAIN_TEMPERATURE)):
            case = replace(self.smallest.case, sampling=replace(sampling, temperature=temperature))
            self._tried += 1
            judged = self._verdict_on(case, self._named(LAW))
            if judged.first is not None:
                self.smallest = judged
                self._finding = judged.first
                return

    def _blame_fewest_requests(self) -> None:
        """Continue with the fewest requests of a batch that differ alike, where the engine batches by itself."""
        is_smaller = True
        while is_smaller:
            case = self.smallest.case
            if case.session is None or not case.session.continuous:
                return
            request = self._finding.where.get("request")
            batches = smaller_batches(case, request if isinstance(request, int) else None)
            is_smaller = any(self.fails_alike(batch) is not None for batch in batches if not self.out_of_time())
            self._finding = _first_finding(self.smallest)

    def _locate_in_float32(self) -> None:
        """If a 16-bit case differs, continue with the same case in float32, provided it differs at an earlier stage.

        Rule N allows attention outputs and KV rows tens of 16-bit roundings (`specverify.properties.tolerance.bounds`),
        and logits fewer. So wrong attention may show in the logits alone. In float32 the bounds are a thousand times
        tighter.
        """
        case = self.smallest.case
        if case.dtype not in ("bfloat16", "float16") or "float32" not in self.plan.dtypes or self.out_of_time():
            return
        invariants = tuple(invariant for invariant in self.invariants if invariant.name in self.first.outcomes)
        self._tried += 1
        judged = self._verdict_on(replace(case, dtype="float32"), invariants)
        finding = judged.first
        # Tuples compare step first: an earlier step outweighs an earlier stage.
        if finding is not None and (finding.step, finding.stage) < (self._finding.step, self._finding.stage):
            self.smallest = judged
            self._finding = finding

    def _blame_what_draft_and_target_share(self) -> None:
        """If a model draft computes wrong numbers, continue with a case without a draft on which the target is wrong.

        Draft and target share attention, KV caches and masks. First the target verifies the trees that the draft
        proposed, then the draft's own model does so as the target. If one of them fails, the shared code is at fault.
        """
        drifted = next((finding for finding in self.first.findings if is_about_draft_numbers(finding)), None)
        if drifted is None or self.first.trace is None:
            return
        invariants = tuple(invariant for invariant in self.invariants if invariant.name in TARGET_ALONE)
        request = int(drifted.where.get("request", 0))
        for case in without_draft(self.first.case, self.first.trace, request, drifted.step):
            if self.out_of_time():
                return
            self._tried += 1
            judged = self._verdict_on(case, invariants)
            if judged.first is not None and is_about_target_alone(judged.first):
                self.smallest = judged
                self._finding = judged.first
                return

    def fails_alike(self, case: Case) -> Verdict | None:
        """The verdict on `case` if the same invariant differs at the same stage, else None.

        The smallest such case becomes `smallest`.
        """
        located = self._finding
        self._tried += 1
        verdict = self._verdict_on(case, self._invariant_of(located))
        finding = verdict.first
        if finding is None or (finding.invariant, finding.stage) != (located.invariant, located.stage):
            self._remember_agreeing(verdict)
            return None
        if size(case) < size(self.smallest.case):
            # An agreeing case was near to the larger case, so that it is forgotten.
            self.smallest = verdict
            self._agreeing_case = None
        return verdict

    def as_drawn(self) -> Failure:
        """The failure on the case as drawn, which is reported at once."""
        return self._failure(self.first, _first_finding(self.first))

    def failure(self, invariants: tuple[Invariant, ...], search_nearest: bool = True) -> Failure:
        """The failure: its smallest case judged by all `invariants`, and the nearest case that agrees.

        If shrinking met no case that agrees, one is searched for, unless `search_nearest` is false.
        """
        self._until = self.began + self.plan.shrink_s
        self._reduce()
        verdict = self._verdict_on(self.smallest.case, invariants)
        if verdict.first is None:
            # The smallest case fails only when judged by one invariant: report the verdict on the case as drawn.
            verdict = self.first
        verdict = self._verdict_on_variant(verdict, invariants)
        finding = _heading_of(verdict)
        nearest = self._agreeing_case if verdict.case == self.smallest.case else None
        if nearest is None and search_nearest:
            nearest = self._search_agreeing(verdict.case, finding)
        failure = self._failure(verdict, finding, nearest)
        until = time.monotonic() + HINT_S
        mistake = refused_setting(verdict.case, finding, self.subject)
        mistake = mistake or mistake_of(verdict.case, finding, self.oracle, self.subject, until)
        return replace(failure, mistake=mistake)

    def _verdict_on(self, case: Case, invariants: tuple[Invariant, ...]) -> Verdict:
        """The verdict on `case`, without findings that the plan's ledger knows."""
        return without_known_findings(judge(case, invariants, self.oracle, self.subject), self.plan.known_failures)

    def _failure(self, verdict: Verdict, finding: Finding, nearest: Case | None = None) -> Failure:
        return Failure(
            verdict=verdict,
            finding=finding,
            drawn=self.first.case.id,
            tried=self._tried,
            nearest=nearest,
            fault=self.plan.fault,
            backend=self.plan.backend,
            model=self.plan.model,
            against=self.plan.against,
            reference=self.plan.reference,
            texts=texts_of(verdict, finding, self.oracle),
            known=known_faults(self.plan.backend, verdict.case, finding.invariant, error_of(finding)),
        )

    def _remember_agreeing(self, verdict: Verdict) -> None:
        """Remember an agreeing case if it is nearer to the smallest differing case than the one remembered."""
        if not _agrees(verdict):
            return
        differing = self.smallest.case
        if self._agreeing_case is None or distance(verdict.case, differing) < distance(self._agreeing_case, differing):
            self._agreeing_case = verdict.case

    def _invariant_of(self, located: Finding) -> tuple[Invariant, ...]:
        """The invariant of the finding `located`, and of the run that broke: shrinking checks no other."""
        return self._named(located.invariant, located.where.get(ASKED_BY))

    def _named(self, *names: str | int | None) -> tuple[Invariant, ...]:
        return tuple(invariant for invariant in self.invariants if invariant.name in names)

    def _verdict_on_variant(self, verdict: Verdict, invariants: tuple[Invariant, ...]) -> Verdict:
        """The verdict on a variant of the case that differs by itself, at no later stage and with no more nodes.

        An invariant that compares runs of variants can only say where two runs part. The wrong variant, judged as a
        case of its own, has a finding with step and stage, and it can be replayed alone.
        """
        located = _first_finding(verdict)
        watchers = tuple(invariant for invariant in invariants if invariant.looks_at_run)
        if any(invariant.name == located.invariant for invariant in watchers):
            return verdict
        with self.subject.record_cases() as variants:
            self._verdict_on(verdict.case, self._invariant_of(located))
        for variant in variants:
            # The first entry of a size is the number of nodes of the largest tree.
            if variant == verdict.case or size(variant)[0] > size(verdict.case)[0]:
                continue
            finding = self._verdict_on(variant, watchers).first
            if finding is not None and finding.stage <= located.stage:
                return self._verdict_on(variant, invariants)
        return verdict

    def _reduce(self) -> None:
        """Take greedy steps to smaller cases until no smaller case differs, or the time is over.

        Each kind of step is repeated as long as it succeeds, then the next kind begins. Kinds that shorten budgets and
        prompts come early, since they make every later try cheap.
        """
        # A later kind of step may make an earlier one possible again, so that all kinds are tried until none succeeds.
        progress: bool = True
        while progress:
            progress = False
            for steps in STEPS:
                while led := self._step(steps):
                    progress = True
                if led is None:
                    return

    def _step(self, steps: Steps) -> bool | None:
        """Whether one of `steps` leads from the smallest case so far to a smaller one; None if the time is over."""
        for smaller in attempts(steps, self.smallest.case):
            if self.out_of_time():
                return None
            if size(smaller) < size(self.smallest.case) and self.fails_alike(smaller) is not None:
                return True
        return False

    def _search_agreeing(self, case: Case, located: Finding) -> Case | None:
        """The first case of `nearer` on which the invariant holds, or None."""
        deadline = time.monotonic() + NEAREST_SHARE * self.plan.shrink_s
        for neighbour in nearer(case):
            if time.monotonic() > deadline or self.halted():
                return None
            if _agrees(self._verdict_on(neighbour, self._invariant_of(located))):
                return neighbour
        return None


def _heading_of(verdict: Verdict) -> Finding:
    """The finding that heads the page: the law's, where the first is of BESIDE_LAW and the law is wrong too."""
    first = _first_finding(verdict)
    if first.invariant not in BESIDE_LAW:
        return first
    return next((finding for finding in verdict.findings if finding.invariant == LAW), first)


def _first_finding(verdict: Verdict) -> Finding:
    """The first finding of a verdict that differs."""
    finding = verdict.first
    assert finding is not None, "the verdict agrees"
    return finding


def _agrees(verdict: Verdict) -> bool:
    """Whether at least one invariant compared something, and nothing differed."""
    return verdict.agreed and "checked" in verdict.outcomes.values()
