"""Evidence that two kinds of run accept by different laws, from pairs of independent runs.

Where both runs of a pair follow one law, whatever it is, they may trade places: the difference d of their shares has a
symmetric law, and given |d| its sign is a fair coin. So exp(t d) / cosh(t d) has mean 1 for every t, and the product
over pairs is an e-value at any time (the sign-flip test of Fisher, The Design of Experiments, 1935, as a bet).
"""

from collections.abc import Sequence

import numpy as np

from specverify.reference.trace import Array

TILTS = np.concatenate([-(0.5 * 2.0 ** np.arange(7)), 0.5 * 2.0 ** np.arange(7)])
"""Tilts of the bets on a difference of shares, .5 to 32 in both directions; the steep ones bet on its sign alone."""


def log_evidence_of_pairs(differences: Sequence[float] | Array) -> float:
    """Log of the e-value that differences, one for each pair, are not symmetric about 0: the mean over the tilts.

    >>> round(log_evidence_of_pairs([0.5] * 40)), log_evidence_of_pairs([]), log_evidence_of_pairs([0.0, 0.0])
    (26, 0.0, 0.0)
    """
    exponents = np.multiply.outer(TILTS, np.asarray(differences, dtype=float))
    # log cosh x = |x| + log((1 + exp(-2|x|)) / 2), without overflow.
    log_means = np.abs(exponents) + np.log1p(np.exp(-2.0 * np.abs(exponents))) - np.log(2.0)
    return float(np.logaddexp.reduce((exponents - log_means).sum(axis=1)) - np.log(len(TILTS)))


class PairedCounts:
    """The accepted tokens of pairs of runs, in all and by place of a chain, each for a step of its run.

    Attributes:
        accepted: Accepted tokens of the first runs and of the second ones, by place; at -1 those of all places.
        tried: Steps of the first runs and of the second ones.
        proposed: Drafted tokens of the first runs and of the second ones.
    """

    def __init__(self) -> None:
        self.accepted: dict[int, list[int]] = {-1: [0, 0]}
        self.tried = [0, 0]
        self.proposed = [0, 0]
        self._differences: dict[int, list[float]] = {-1: []}

    def __len__(self) -> int:
        return len(self._differences[-1])

    def add(
        self, counts: tuple[Sequence[int], Sequence[int]], steps: tuple[int, int], proposed: tuple[int, int]
    ) -> None:
        """Take a pair: for each run the accepted tokens in all and then by place, its steps, and its drafted tokens."""
        num_earlier = len(self)
        for place in range(-1, max(map(len, counts)) - 1):
            pair = [count[place + 1] if place + 1 < len(count) else 0 for count in counts]
            accepted = self.accepted.setdefault(place, [0, 0])
            self.accepted[place] = [total + count for total, count in zip(accepted, pair, strict=True)]
            shares = [count / max(steps_of_run, 1) for count, steps_of_run in zip(pair, steps, strict=True)]
            self._differences.setdefault(place, [0.0] * num_earlier).append(shares[1] - shares[0])
        for differences in self._differences.values():  # no run of this pair accepted anything there
            differences += [0.0] * (num_earlier + 1 - len(differences))
        self.tried = [total + count for total, count in zip(self.tried, steps, strict=True)]
        self.proposed = [total + count for total, count in zip(self.proposed, proposed, strict=True)]

    @property
    def log_es(self) -> dict[int, float]:
        """Log of the e-value of each place, and at -1 that of all together."""
        return {place: log_evidence_of_pairs(differences) for place, differences in self._differences.items()}

    @property
    def log_e(self) -> float:
        """Log of the mean of `log_es`."""
        log_es = list(self.log_es.values())
        return float(np.logaddexp.reduce(log_es) - np.log(len(log_es)))
