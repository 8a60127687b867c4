"""The evidence of all runs of a file on the law of sampled tokens: no coin counts twice."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specverify.properties.tally import Tally, excess_evidence
from specverify.properties.verdict.finding import Evidence
from specverify.reference.case import Case
from specverify.reference.trace import Trace


@dataclass
class LawEvidence:
    """The tests of sampled runs, and the runs that may share their coins with an earlier one.

    The e-values of runs multiply where each has coins of its own. A seed that two requests name gives both the same
    coins, so that the first alone is taken. Where a run that names no seed has the text of an earlier one, that may be
    chance or one run recorded twice: both are taken, and a file that is red with them alone is neither condemned nor
    passed.

    Attributes:
        same_seed: The number of runs that are left out, since an earlier run names their seed.
        repeats: The number of runs without a seed whose prompt, settings and text an earlier run has too.
    """

    same_seed: int = 0
    repeats: int = 0
    _seeds: set[int] = field(default_factory=set)
    _texts: set[tuple[object, ...]] = field(default_factory=set)
    _unrepeated: list[Evidence] = field(default_factory=list)

    def take(self, case: Case, trace: Trace, tests: Sequence[Evidence]) -> tuple[Evidence, ...]:
        """The tests of a run that count; seed 0 is that of a request that names none."""
        if not tests:
            return ()
        seed = case.sampling.seed
        if seed and seed in self._seeds:
            self.same_seed += 1
            return ()
        self._seeds.add(seed)
        text = (case.prompt, replace(case.sampling, seed=0), case.stops, trace.output)
        if not seed and text in self._texts:
            self.repeats += 1
        else:
            self._unrepeated += tests
        self._texts.add(text)
        return tuple(tests)

    def judge(self, tally: Tally) -> str | None:
        """Note in `tally` why all runs together break the law; a doubt where repeated texts alone make it so."""
        excess = excess_evidence(tally)
        if excess is None:
            return None
        if self.repeats and excess_evidence(replace(tally, evidence=self._unrepeated)) is None:
            return (
                f"{excess}, but only with {self.repeats} runs that repeat the text of another: name the seed of each "
                "request (`sampling.seed`), or record each run once"
            )
        tally.excess_evidence = excess
        return None
