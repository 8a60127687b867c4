"""Shrinking: the first case that differs is made as small as it gets, and the nearest case that agrees is kept.

Hypothesis shrinks what it drew (`Search` calls `fails_alike` for each of its tries), greedy steps on the case itself
follow (`failure`). Both keep to one rule: a smaller case counts only if the same invariant differs at the same stage.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from properties.shrinking.cases import STEPS, Steps, apart, attempts, nearer, size
from properties.shrinking.without_draft import without_draft
from properties.tally import Failure
from properties.verdict.finding import TARGET_ALONE, Finding, Verdict, of_draft_numbers, of_target_alone
from properties.verdict.invariant import Invariant, Oracle
from properties.verdict.judge import judge
from properties.verdict.subject import Subject
from reference.case import Case
from reference.trace import Stage
from specverify.plan import Plan

DRAWN_SHARE = 0.6
"""The part of a plan's shrinking time that Hypothesis gets; the greedy steps get the rest."""

NEAREST_SHARE = 0.25
"""The part of a plan's shrinking time that the search for a case that agrees may take on top."""


@dataclass
class Shrinking:
    """The work on one difference.

    Attributes:
        plan: Whose seconds bound the work, and what the failure is told with.
        invariants: What is checked.
        oracle: The truth.
        subject: The backend.
        halted: Whether someone asked to end the work.
        first: The verdict on the case as it was drawn; it differs.
        began: `time.monotonic` at the beginning.
        smallest: The verdict on the smallest case so far that differs alike.
    """

    plan: Plan
    invariants: tuple[Invariant, ...]
    oracle: Oracle
    subject: Subject
    halted: Callable[[], bool]
    first: Verdict
    began: float = field(default_factory=time.monotonic)
    smallest: Verdict = field(init=False)
    _located: Finding = field(init=False)
    _agreed: Case | None = None
    _tried: int = 0

    def __post_init__(self) -> None:
        self.smallest = self.first
        self._located = _first_finding(self.first)
        self._until = self.began + DRAWN_SHARE * self.plan.shrink_s

    @property
    def failed_as(self) -> set[tuple[str, Stage]]:
        """Invariant and stage of the difference, as drawn and as it was followed."""
        return {(one.invariant, one.stage) for one in (_first_finding(self.first), self._located)}

    def out_of_time(self) -> bool:
        """Whether the shrinking is over."""
        return time.monotonic() > self._until or self.halted()

    def blame(self) -> None:
        """Go on with a case beside the drawn one where that one says better what is at fault."""
        self._blame_what_draft_and_target_share()
        self._locate_in_float32()

    def _locate_in_float32(self) -> None:
        """Where a 16-bit case differs, go on with the same case in float32 if that one differs at an earlier stage.

        Rule N grants attention outputs and KV rows tens of 16-bit roundings (`properties.tolerance.bounds`), and logits
        fewer: a wrong attention may show in the logits alone. The bounds of float32 lie a thousand times nearer.
        """
        case = self.smallest.case
        if case.dtype not in ("bfloat16", "float16") or "float32" not in self.plan.dtypes or self.out_of_time():
            return
        asked = tuple(one for one in self.invariants if one.name in self.first.outcomes)
        self._tried += 1
        judged = judge(replace(case, dtype="float32"), asked, self.oracle, self.subject)
        found = judged.first
        if found is not None and (found.step, found.stage) < (self._located.step, self._located.stage):
            self.smallest, self._located = judged, found

    def _blame_what_draft_and_target_share(self) -> None:
        """Where a model draft computes wrong numbers, go on with a case without one on which the target is wrong.

        Draft and target share attention, KV caches and masks. The target is asked first for the trees that the draft
        proposed, then the draft's own model in the target's place: if one of them fails, what they share is at fault.
        """
        drifted = next((finding for finding in self.first.findings if of_draft_numbers(finding)), None)
        if drifted is None or self.first.trace is None:
            return
        asked = tuple(one for one in self.invariants if one.name in TARGET_ALONE)
        request = int(drifted.where.get("request", 0))
        for case in without_draft(self.first.case, self.first.trace, request, drifted.step):
            if self.out_of_time():
                return
            self._tried += 1
            judged = judge(case, asked, self.oracle, self.subject)
            if judged.first is not None and of_target_alone(judged.first):
                self.smallest, self._located = judged, judged.first
                return

    def fails_alike(self, case: Case) -> Verdict | None:
        """The verdict of `case` if the same invariant differs at the same stage; remembered if it is the smallest."""
        located = self._located
        self._tried += 1
        verdict = judge(case, self._concerned(located), self.oracle, self.subject)
        found = verdict.first
        if found is None or (found.invariant, found.stage) != (located.invariant, located.stage):
            self._remember_agreeing(verdict)
            return None
        if size(case) < size(self.smallest.case):
            self.smallest, self._agreed = verdict, None
        return verdict

    def as_drawn(self) -> Failure:
        """The difference found, on the case as it was drawn: what is told at once."""
        return self._failure(self.first, _first_finding(self.first))

    def failure(self, invariants: tuple[Invariant, ...], search_nearest: bool = True) -> Failure:
        """The difference found: its smallest case judged by all `invariants`, and the nearest case that agrees.

        Where shrinking met no case that agrees, one is looked for apart, unless `search_nearest` says not to.
        """
        self._until = self.began + self.plan.shrink_s
        self._reduce()
        whole = judge(self.smallest.case, invariants, self.oracle, self.subject)
        if whole.first is None:
            # Only the narrowed judgement fails: report what was seen, on the case as it was drawn.
            whole = self.first
        whole = self._shown_by_itself(whole, invariants)
        finding = _first_finding(whole)
        nearest = self._agreed if whole.case == self.smallest.case else None
        if nearest is None and search_nearest:
            nearest = self._agreeing(whole.case, finding)
        return self._failure(whole, finding, nearest)

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
        )

    def _remember_agreeing(self, verdict: Verdict) -> None:
        """Remember a case that agrees if it is nearer to the smallest that differs than the one remembered."""
        if not _agrees(verdict):
            return
        differing = self.smallest.case
        if self._agreed is None or apart(verdict.case, differing) < apart(self._agreed, differing):
            self._agreed = verdict.case

    def _concerned(self, located: Finding) -> tuple[Invariant, ...]:
        """The invariants that shrinking asks: the one that located the difference."""
        return tuple(one for one in self.invariants if one.name == located.invariant)

    def _shown_by_itself(self, whole: Verdict, invariants: tuple[Invariant, ...]) -> Verdict:
        """The verdict on a variant of the case that differs by itself, at no later stage and with no more nodes.

        An invariant that compares the runs of variants can only say where two of them part. Judged as a case of its
        own, the variant that is wrong is located as any other, and needs nothing beside it to be replayed.
        """
        located = _first_finding(whole)
        looking = tuple(one for one in invariants if one.looks_at_run)
        if any(one.name == located.invariant for one in looking):
            return whole
        with self.subject.asked() as asked:
            judge(whole.case, self._concerned(located), self.oracle, self.subject)
        for variant in asked:
            if variant == whole.case or size(variant)[0] > size(whole.case)[0]:
                continue
            found = judge(variant, looking, self.oracle, self.subject).first
            if found is not None and found.stage <= located.stage:
                return judge(variant, invariants, self.oracle, self.subject)
        return whole

    def _reduce(self) -> None:
        """Greedy steps to smaller cases, on the case itself, until none of them still differs.

        A kind of step is taken as long as it leads on, and the next kind begins where it ended: prompts and budgets
        that are short make every later try cheap.
        """
        progress: bool = True
        while progress:
            progress = False
            for steps in STEPS:
                while led := self._step(steps):
                    progress = True
                if led is None:
                    return

    def _step(self, steps: Steps) -> bool | None:
        """Whether one of `steps` leads from the smallest case so far to a smaller one; None when time is over."""
        for smaller in attempts(steps, self.smallest.case):
            if self.out_of_time():
                return None
            if size(smaller) < size(self.smallest.case) and self.fails_alike(smaller) is not None:
                return True
        return False

    def _agreeing(self, case: Case, located: Finding) -> Case | None:
        """The nearest smaller or plainer case on which the invariant holds."""
        deadline = time.monotonic() + NEAREST_SHARE * self.plan.shrink_s
        for other in nearer(case):
            if time.monotonic() > deadline or self.halted():
                return None
            if _agrees(judge(other, self._concerned(located), self.oracle, self.subject)):
                return other
        return None


def _first_finding(verdict: Verdict) -> Finding:
    """The first finding of a verdict that differs."""
    found = verdict.first
    assert found is not None, "the verdict agrees"
    return found


def _agrees(verdict: Verdict) -> bool:
    """Whether something was compared and nothing differed."""
    return verdict.agreed and "checked" in verdict.outcomes.values()
