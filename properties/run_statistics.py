"""Statistics of a whole run: is plain decode less exact than its dtype, are its ties too many.

Plain decode is the unit of rule N, so that an error which it shares with trees widens its own tolerance: the cap of
`specverify.properties.tolerance.closeness` leaves a factor of three. What no single prompt shows, a run does. The error
of plain decode over the movement of its rows (`ControlError.ratio`) has a known law: its logarithm has the mean MEAN
and the deviation DEVIATION over models and prompts. The statistic of a run is the mean over architectures of their own
means, beyond the factor within which MEAN is known, in deviations of such a mean. Architectures count, not prompts,
because a model may be rounded worse than others at every prompt.

`python -m tests.measure control` measured the law with torch 2.13 on x86-64, on `cpu-eager`; it says how large the
statistic of clean runs becomes.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import exp, inf, log, sqrt

from scipy.special import pdtrc

from specverify.properties.tally import Tally
from specverify.properties.verdict.finding import ControlError
from specverify.reference.oracle.choices import COLUMNS, EXPERTS

MEAN = {"float32": 0.0, "bfloat16": -0.7, "float16": -0.7}
"""Mean logarithm of the ratio."""

DEVIATION = 0.35
"""Deviation of the logarithm of a ratio over models and prompts."""

KNOWN_WITHIN = 1.2
"""The factor within which the usual error is known.

It depends on the models that are drawn and on the libraries of a machine. A run of 1,555 cases of a right engine had
1.1 times the usual error; over its 329 architectures that alone is more than RED deviations of their mean.
"""

FARTHEST = 4.0
"""Deviations at which one architecture is cut, so that fewer than three of them condemn no run."""

RED = 6.0
"""The statistic above which a run differs: reached by chance in one run of 1e9, by the normal law."""


@dataclass(frozen=True)
class Exactness:
    """The exactness of plain decode in one dtype over a run.

    Attributes:
        quantity: `logits` or `attended`.
        times: How many times the usual error plain decode shows, as the geometric mean over architectures.
        statistic: The mean logarithm beyond that of KNOWN_WITHIN, in its deviations; RED or more condemns the run.
    """

    dtype: str
    quantity: str
    targets: int
    prompts: int
    times: float
    statistic: float


def exactness(errors: Iterable[ControlError]) -> list[Exactness]:
    """The exactness of plain decode by dtype and quantity."""
    return sorted(_exactness(errors), key=lambda entry: (entry.dtype, entry.quantity))


def _exactness(errors: Iterable[ControlError]) -> Iterator[Exactness]:
    by_kind: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for error in errors:
        if error.dtype in MEAN:
            by_kind[error.dtype, error.quantity][error.target].append(_deviations(error))
    for (dtype, quantity), by_target in by_kind.items():
        means = [sum(values) / len(values) for values in by_target.values()]
        mean = sum(means) / len(means)
        prompts = sum(map(len, by_target.values()))
        excess = mean - log(KNOWN_WITHIN) / DEVIATION
        yield Exactness(dtype, quantity, len(means), prompts, exp(mean * DEVIATION), excess * sqrt(len(means)))


def _deviations(error: ControlError) -> float:
    """The logarithm of the ratio in deviations from its mean; NaN and infinity are as far as FARTHEST."""
    if error.ratio <= 0:
        return -FARTHEST
    if not error.ratio < inf:
        return FARTHEST
    return max(-FARTHEST, min(FARTHEST, (log(error.ratio) - MEAN[error.dtype]) / DEVIATION))


def excess_error(errors: Iterable[ControlError]) -> str | None:
    """Why plain decode is less exact than its dtype over the whole run, or None."""
    worst = max(exactness(errors), key=lambda entry: entry.statistic, default=None)
    if worst is None or worst.statistic < RED:
        return None
    noun = {"logits": "logits", "attended": "attention outputs"}[worst.quantity]
    return (
        f"plain decode in {worst.dtype} is less exact than its dtype: the errors of its {noun} are {worst.times:.1f} "
        f"times the usual ones, over {worst.prompts} prompts on {worst.targets} targets"
    )


INFLATION = 1.3
"""Ratio of measured to predicted ties in clean runs."""

ALPHA = 1e-9
"""Probability of calling the number of ties too high if the backend is right."""

VACUOUS = 0.25
"""Share of positions in the tie zone above which the greedy comparison of a run decides nothing."""


UNPREDICTED = ("pair.greedy-match",)
"""Invariants whose ties no control predicts: two engines chose tokens, of whose rivals no score is known."""


def excess_ties(tally: Tally) -> str | None:
    """Why the ties of a whole run cannot be chance, or None; each invariant's ties are counted by themselves.

    Ties of greedy positions say nothing of drafted nodes: each population has its own control.
    """
    counts = Counter(tie.invariant for tie in tally.ties if tie.invariant not in UNPREDICTED)
    for name, count in counts.items():
        predicted = tally.predicted_ties.get(name, 0.0)
        # pdtrc(k, m) is the probability that a Poisson variable of mean m exceeds k.
        if pdtrc(count - 1, INFLATION * predicted) < ALPHA / len(counts):
            return f"{count} ties of {name} where the noise of its control predicts {predicted:.3g}"
    return None


CHOICE_INFLATION = 3.0
"""Ratio of measured to predicted choices of other experts or columns, predicted from the least noise of scores.

Nothing measures the error of a backend's scores. Clean runs came to at most 2.0 times the prediction for experts, and
0.4 times for columns in 16 bits.
"""


def excess_choices(tally: Tally) -> str | None:
    """Why the rows of a whole run that took other experts or columns than the oracle cannot be chance, or None."""
    for kind, counts in ((EXPERTS, tally.routed), (COLUMNS, tally.indexed)):
        if counts.ties and pdtrc(counts.ties - 1, CHOICE_INFLATION * counts.predicted) < ALPHA:
            predicted = f"where the noise of their scores predicts {counts.predicted:.3g}"
            return f"{counts.ties} rows took other {kind}, {predicted}"
    return None


def undecided_comparison(tally: Tally) -> str | None:
    """Why the greedy comparison of a whole run decided too little, or None."""
    judged, near = tally.positions.judged, tally.positions.near
    if judged and near > VACUOUS * judged:
        return (
            f"{near} of {judged} greedy positions lie in the tie zone: the token comparison is inconclusive; "
            "run in float32, or with another model"
        )
    return None
