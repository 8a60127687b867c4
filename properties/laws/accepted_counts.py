"""The law of the number of accepted tokens, given the text that an engine of chains wrote.

An engine drafts a chain of K tokens, accepts the first of them and adds a token of the target's. Let r be the
probability that the draft's token was accepted at a place of the text, given the token that stands there and that the
chain was alive up to there. Each place has its own r, whatever happened before it:

- The draft's best token d is tried: it was accepted where the text has d. What replaces a rejected d is another token.
- A token is drawn from q and accepted with min(1, p/q). The text has the token y by acceptance with probability
  min(p(y), q(y)), and in all with p(y): r = min(1, q(y)/p(y)).
- A token is drawn from q and accepted where the target draws the same token (sample and match): r = q(y).

So the text is cut into chains by a Markov chain over its places, and the generating function of what the chains add up
to is one recursion from the end: for a sum A and any t, exp(t A) / E exp(t A) has mean 1 (Chernoff's bound as a bet).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specverify.reference.trace import Array

TILTS = np.concatenate([-(0.1 * 2.0 ** np.arange(10)), 0.1 * 2.0 ** np.arange(10)])
"""Tilts of the bets on a count, .1 to 51.2 in both directions: the steep ones tell a count that is certain."""


@dataclass(frozen=True)
class Rates:
    """Bounds of the probability that a drafted token was accepted at each place of a text, float64 [tokens] each."""

    low: Array
    high: Array


Addend = Callable[[int, int], float]
"""The part of a chain in a sum, by its accepted tokens and by the tokens that its step gave the text."""


def log_moments(rates: Rates, chain: int, addend: Addend) -> Array:
    """Upper bounds of log E exp(t A) for each t of TILTS, where A is the sum of what the chains of a text add.

    An engine may draft for the first token of its text, or take that from the prompt's forward as a step without any.
    Behind the last token it may draft as many as ever, or no more than there is room for. Of each pair the larger bound
    holds.

    Args:
        rates: The probabilities, place by place.
        chain: Drafted tokens of a chain.
        addend: What each chain adds.
    """
    num_tokens = len(rates.low)
    with np.errstate(divide="ignore"):
        hit, miss = np.log(rates.high), np.log1p(-rates.low)
    # tail[s]: the bound of the text from s on, where a chain begins.
    tail = np.zeros((num_tokens + 1, len(TILTS)))
    for start in reversed(range(num_tokens)):
        alive = 0.0
        terms = list[Array]()
        room = num_tokens - start
        for length in range(min(chain, room)):
            place = start + length
            terms.append(alive + miss[place] + TILTS * addend(length, length + 1) + tail[place + 1])
            alive += hit[place]
        if room > chain:
            terms.append(alive + TILTS * addend(chain, chain + 1) + tail[start + chain + 1])
        else:
            # The engine may have left the last token to the target, or have drafted beyond it.
            sums = [addend(length, room) for length in range(room - 1, chain + 1)]
            terms.append(alive + np.maximum(TILTS * min(sums), TILTS * max(sums)))
        tail[start] = np.logaddexp.reduce(np.stack(terms), axis=0)
    bound: Array = np.maximum(tail[0], TILTS * addend(0, 1) + tail[1]) if num_tokens else tail[0]
    return bound


def expected_lengths(rates: Rates, chain: int) -> Array:
    """About how many chains of a text accept at least 0, 1, ... `chain` tokens, [chain + 1]; the first of them all."""
    rate = (rates.low + rates.high) / 2
    num_tokens = len(rate)
    tail = np.zeros((num_tokens + chain + 2, chain + 1))
    for start in reversed(range(num_tokens)):
        alive = 1.0
        for length in range(chain + 1):
            place = start + length
            if place >= num_tokens:
                break
            missed = alive * (1 - rate[place]) if length < chain else alive
            tail[start, length] += alive
            tail[start] += missed * tail[place + 1]
            alive -= missed
    lengths: Array = tail[0]
    return lengths


def log_evidence_of(value: float, moments: Array) -> float:
    """Log of the e-value that a sum with these `log_moments` is not what the rates give: the mean over the tilts."""
    return float(np.logaddexp.reduce(TILTS * value - moments) - np.log(len(TILTS)))


def possible_counts(moments: Array, shift: float, most: int, log_bar: float) -> tuple[int, int]:
    """The least and the largest count up to `most` whose sum, the count less `shift`, has evidence below `log_bar`.

    Where none has, both are the count with the least evidence.
    """
    evidence = [log_evidence_of(count - shift, moments) for count in range(most + 1)]
    possible = [count for count in range(most + 1) if evidence[count] < log_bar] or [int(np.argmin(evidence))]
    return possible[0], possible[-1]
