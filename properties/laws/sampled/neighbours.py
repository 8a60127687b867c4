"""Neighbours: evidence that one request used the coins of another request."""

import numpy as np
from scipy.special import logsumexp

from specverify.reference.trace import Array

THETAS = 0.1 * 2.0 ** np.arange(7)
"""Tilts of the mixture, upwards only: .1 to 6.4. Requests on the same coins agree too often, never too seldom."""


class Neighbours:
    """The e-value of the claim that a request's tokens come by its own coins, with its neighbour's tokens as bets.

    Two requests with the same prompt and settings and independent coins are independent: given all tokens of the
    neighbour, each token of the request still follows the law after the tokens before it. While the two texts agree,
    the bet is that the next token is the neighbour's: for a token of probability u at most, exp(theta 1[it came]) / M
    with M = 1 + u (e^theta - 1) has mean at most 1 under every law in the band. So has the product over the stream, and
    the average over the tilts: at any time, P(E >= 1/a) <= a.
    """

    def __init__(self) -> None:
        self._sums = np.zeros(len(THETAS))
        self.bets = 0

    def add(self, most_likely: float, agrees: bool) -> None:
        """Take one token: `agrees` if it was the neighbour's, whose probability is `most_likely` at most."""
        if not 0.0 <= most_likely <= 1.0:
            raise ValueError(f"{most_likely} is no probability")
        self.bets += 1
        self._sums -= np.log1p(most_likely * np.expm1(THETAS))
        self._sums += THETAS * agrees

    def compare(self, output: tuple[int, ...], neighbour: tuple[int, ...], high: list[Array]) -> None:
        """Take the tokens of `output` up to the first that differs from its `neighbour`.

        Args:
            output: The request's tokens.
            neighbour: Tokens of an earlier request with the same prompt and settings.
            high: The highest probability [V] that each token of the vocabulary may have at each place of `output`.
        """
        for token, neighbour_token, bounds in zip(output, neighbour, high, strict=False):
            self.add(min(1.0, float(bounds[neighbour_token])), token == neighbour_token)
            # From here on the two contexts differ, and the neighbour's tokens predict nothing.
            if token != neighbour_token:
                return

    @property
    def parts(self) -> tuple[float, ...]:
        """Logarithms of the e-values of the bets, one for each tilt."""
        return tuple(float(value) for value in self._sums)

    @property
    def log_e(self) -> float:
        """Natural logarithm of the e-value so far; 0 before the first bet."""
        return float(logsumexp(self._sums) - np.log(len(THETAS)))
