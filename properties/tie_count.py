"""Tie count: whether the ties of a whole run are too many for chance.

Also whether so many positions are near ties that the run decided nothing.
"""

from collections import Counter

from scipy.special import pdtrc

from specverify.properties.tally import Tally

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


EXPERT_INFLATION = 3.0
"""Ratio of measured to predicted choices of other experts, which are predicted from the least noise of scores.

Nothing measures the error of a backend's scores; clean runs came to at most 2.0 times the prediction.
"""


def excess_expert_choices(tally: Tally) -> str | None:
    """Why the rows of a whole run that took other experts than the oracle cannot be chance, or None."""
    ties, predicted = tally.routed.ties, tally.routed.predicted
    if ties and pdtrc(ties - 1, EXPERT_INFLATION * predicted) < ALPHA:
        return f"{ties} rows took other experts, where the noise of their scores predicts {predicted:.3g}"
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
