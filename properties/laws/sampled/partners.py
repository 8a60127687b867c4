"""Partners: a two-sample e-process over the tokens of engine and reference.

No law is known. Each token of the engine stands beside tokens that the reference drew after the same text.
"""

from collections import Counter
from collections.abc import Hashable

import numpy as np
from scipy.special import logsumexp

from specverify.properties.resolution import Resolution, ResolutionSums
from specverify.reference.trace import Array

PARTNERS = 4
"""Tokens that the reference draws beside each token of the engine.

With four in place of two, the fewest of which one can be the odd one out, as many of the engine's tokens showed two to
three times the evidence of a wrong temperature.
"""

THETAS = np.array([sign * 0.1 * 2.0**k for k in range(7) for sign in (1.0, -1.0)])
"""Tilts towards tokens that are likely after a text, and away from them: .1 to 6.4."""

LEARNED = np.array([0.25, 0.5, 1.0])
"""Tilts by the ratio of the engine's and the reference's counts of a token after the same text."""

PARTS = 2 * len(THETAS) + len(LEARNED)
"""Number of bets among which the money of the process is spread."""


class Partners:
    """The e-value of the claim that an engine and a reference draw each token from one law.

    Under the claim, the engine's token x and the reference's k tokens after the same text are k + 1 independent draws
    from one law, on coins of their own: which of them is the engine's is uniform, given all of them and the past. With
    scores s of the tokens, made of the set of them and the past alone, (k + 1) exp(theta s(x)) / sum exp(theta s) has
    mean 1. So has the product over the stream, and so has the average over scores and tilts: at any time,
    P(E >= 1/a) <= a, for any law, known to nobody (a test by betting, as in Shekhar & Ramdas, arXiv 2112.09162).

    Three scores tell what a token is like after its text: whether it is the one that the reference decodes greedily
    there; the logarithm of how often it came there, by either side; and the logarithm of the ratio of the two sides'
    earlier counts. The first two lean the same way after every text for a wrong temperature. The last finds a deviation
    of any shape where one text comes often.
    """

    def __init__(self) -> None:
        self._sums = np.zeros(PARTS)
        self._counts: dict[Hashable, tuple[Counter[int], Counter[int]]] = {}
        self._resolution_sums = ResolutionSums()

    def add(self, text: Hashable, token: int, partners: tuple[int, ...], best: int) -> None:
        """Take one token of the engine after `text`.

        The reference drew the `partners` after the same text, and decodes `best` greedily there.
        """
        engine_counts, reference_counts = self._counts.setdefault(text, (Counter(), Counter()))
        tokens = (token, *partners)
        occurrences = Counter(tokens)
        likeliest = np.array([float(candidate == best) for candidate in tokens])
        # A token does not count itself.
        common = np.log(
            [
                engine_counts[candidate] + reference_counts[candidate] + occurrences[candidate] - 0.5
                for candidate in tokens
            ]
        )
        learned = np.log(
            [(engine_counts[candidate] + 0.5) / (reference_counts[candidate] + 0.5) for candidate in tokens]
        )
        gains = (_gains(THETAS, likeliest), _gains(THETAS, common), _gains(LEARNED, learned))
        self._sums += np.concatenate(gains)
        self._resolution_sums.add_labels(int(likeliest.sum()), len(tokens))
        engine_counts.update((token,))
        reference_counts.update(partners)

    @property
    def rounds(self) -> int:
        """Number of tokens of the engine so far."""
        return self._resolution_sums.draws

    @property
    def parts(self) -> tuple[float, ...]:
        """Natural logarithms of the e-values of the bets [PARTS]."""
        return tuple(self._sums.tolist())

    @property
    def log_e(self) -> float:
        """Natural logarithm of the e-value so far: the mean of the bets'; 0 before the first token."""
        return float(logsumexp(self._sums) - np.log(PARTS))

    @property
    def resolution(self) -> Resolution:
        """The shifts that the bets on the likeliest token would have seen."""
        return self._resolution_sums.resolution


def _gains(thetas: Array, scores: Array) -> Array:
    """Logarithms of the factors of one round, for the first of `scores` as the engine's [len(thetas)]."""
    exponents = thetas[:, None] * scores[None]
    # Scores are small: no exponential overflows.
    return np.asarray(np.log(len(scores)) + exponents[:, 0] - np.log(np.exp(exponents).sum(axis=1)))
