"""Processing: from a node's logits to the law of its next token.

One row at a time, in the order that `Sampling` states.
"""

import math
from dataclasses import dataclass

import numpy as np

from specverify.reference import user_processors
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.language import legal_after
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Array


def scores(logits: Array, sampling: Sampling, stops: Stops, prompt: tuple[int, ...], output: tuple[int, ...]) -> Array:
    """Logits [V] after penalties, bad words, min_tokens, custom processors and the grammar, as float64 [V].

    Where the grammar leaves no token, because the text has ended or is refused, the row has no grammar.

    Args:
        logits: The node's logits.
        sampling: The settings.
        stops: The request's stops; `min_tokens` bans their eos and stop tokens.
        prompt: The request's prompt.
        output: The tokens emitted so far, then the tokens from below the root down to the node.
    """
    row = np.array(logits, dtype=np.float64)
    context = prompt + output
    for token in set(context):
        if sampling.repetition_penalty != 1.0:
            penalty = sampling.repetition_penalty
            # Dividing a negative logit would make the token more likely.
            row[token] = row[token] * penalty if row[token] < 0 else row[token] / penalty
    for token in set(output):
        row[token] -= sampling.presence_penalty
    for token in set(output):
        row[token] -= sampling.frequency_penalty * output.count(token)
    for word in sampling.bad_words:
        prefix = word[:-1]
        # A word of one token has an empty `before`, which every context ends with.
        if context[len(context) - len(prefix) :] == prefix:
            row[word[-1]] = -math.inf
    if len(output) < sampling.min_tokens:
        for token in (*stops.eos, *stops.stop_tokens):
            row[token] = -math.inf
    for name in sampling.processors:
        row = user_processors.apply(name, context, row)
    if sampling.grammar is not None:
        legal = legal_after(sampling.grammar, stops.eos, output)
        legal_row = np.where(legal.tokens, row, -math.inf)
        row = row if np.isneginf(legal_row).all() else legal_row
    return row


def law(logits: Array, sampling: Sampling, stops: Stops, prompt: tuple[int, ...], output: tuple[int, ...]) -> Array:
    """The law float64 [V] of the token after a node; the arguments are those of `scores`.

    Raises:
        ValueError: The temperature is 0: the choice is the arg-max of the scores, and no law.
        Malformed: No token is left.
    """
    if sampling.greedy:
        raise ValueError("temperature 0 has no law: choose the arg-max of the scores")
    row = _top_k(_apply_temperature(scores(logits, sampling, stops, prompt, output), sampling), sampling.top_k)
    p = _top_p(softmax(row), sampling.top_p)
    # min_p compares with the largest probability after top-k and top-p; the share is the same before normalising.
    p = np.where(p >= sampling.min_p * p.max(), p, 0.0)
    return np.asarray(p / p.sum())


def logprob(logits: Array, token: int) -> float:
    """Log-softmax of the raw logits [V] at `token`, before any processing."""
    row = np.asarray(logits, dtype=np.float64)
    top = float(row.max())
    return float(row[token]) - top - math.log(float(np.exp(row - top).sum()))


def softmax(row: Array) -> Array:
    """Probabilities [V] of scores [V], at least one of which is finite."""
    exponentials = np.exp(row - row.max())
    return np.asarray(exponentials / exponentials.sum())


def margin(logits: Array, sampling: Sampling, stops: Stops, prompt: tuple[int, ...], output: tuple[int, ...]) -> float:
    """How near the row comes to keeping another set of tokens, relative; infinite where no rank or mass drops a token.

    The smallest of: the gap of log-probability between the last token that top-k keeps and the next (0 if equals are
    kept beyond k); the distance of the masses to top_p, and of the two probabilities at its edge; the distance of the
    probabilities to min_p's threshold. An engine whose error exceeds this margin may rightly keep another set.
    """
    row = _apply_temperature(scores(logits, sampling, stops, prompt, output), sampling)
    distances = [math.inf]
    sorted_scores = np.sort(row)[::-1]
    if 0 < sampling.top_k < len(row) and np.isfinite(sorted_scores[sampling.top_k - 1]):
        distances.append(float(sorted_scores[sampling.top_k - 1] - sorted_scores[sampling.top_k]))
    p = softmax(_top_k(row, sampling.top_k))
    if sampling.top_p < 1.0:
        sorted_p = np.sort(p[p > 0])[::-1]
        mass_before = np.cumsum(sorted_p) - sorted_p
        num_kept = int((mass_before[1:] < sampling.top_p).sum()) + 1
        distances += [float(gap) for gap in np.abs(mass_before[1:] - sampling.top_p) / sampling.top_p]
        distances += [float(1.0 - sorted_p[num_kept] / sorted_p[num_kept - 1])] if num_kept < len(sorted_p) else []
    p = _top_p(p, sampling.top_p)
    if sampling.min_p > 0.0:
        other_p = np.delete(p, p.argmax())
        distances += [float(gap) for gap in np.abs(other_p[other_p > 0] / p.max() / sampling.min_p - 1.0)]
    return min(distances)


@dataclass(frozen=True)
class KeptSizes:
    """How many tokens of a row top-k, top-p and min-p may keep, the most probable ones, where errors move their edges.

    Attributes:
        p: The probabilities float64 [V] before all three.
        fewest: The least number of tokens.
        most: The largest number of tokens.
    """

    p: Array
    fewest: int
    most: int


def kept_sizes(
    logits: Array, sampling: Sampling, stops: Stops, prompt: tuple[int, ...], output: tuple[int, ...], error: float
) -> KeptSizes:
    """The tokens that may stay where scores are off by `error`, and masses and thresholds by that share of them.

    The other arguments are those of `scores`. Of tokens with equal scores at the edge of top-k, all or some may stay.
    """
    row = _apply_temperature(scores(logits, sampling, stops, prompt, output), sampling)
    p = softmax(row)
    sorted_scores, sorted_p = np.sort(row)[::-1], np.sort(p)[::-1]
    fewest = most = int(np.isfinite(row).sum())
    if 0 < sampling.top_k < len(row):
        fewest = min(fewest, sampling.top_k)
        most = min(most, int((sorted_scores >= sorted_scores[sampling.top_k - 1] - error).sum()))
    # The fewer tokens top-k leaves, the sooner their mass reaches top_p.
    fewest = _nucleus_size(sorted_p[:fewest], sampling.top_p * (1.0 - error)) if sampling.top_p < 1.0 else fewest
    most = _nucleus_size(sorted_p[:most], sampling.top_p * (1.0 + error)) if sampling.top_p < 1.0 else most
    if sampling.min_p > 0.0:
        shares = sorted_p / sorted_p[0]
        fewest = min(fewest, int((shares >= sampling.min_p * (1.0 + error)).sum()))
        most = min(most, int((shares >= sampling.min_p * (1.0 - error)).sum()))
    return KeptSizes(p, max(fewest, 1), max(most, 1))


def _nucleus_size(sorted_p: Array, top_p: float) -> int:
    """Number of tokens, in descending order of probability, before which the mass has not reached `top_p`."""
    p = sorted_p / sorted_p.sum()
    return int((np.cumsum(p) - p < top_p).sum())


def _apply_temperature(row: Array, sampling: Sampling) -> Array:
    """Scores divided by the temperature.

    Where that overflows, the largest score is subtracted first, which changes no law.
    """
    if not np.isfinite(row.max()):
        raise Malformed("sampling", "what it bans leaves no token")
    with np.errstate(over="ignore"):
        scaled = row / sampling.temperature
        return np.asarray(scaled if np.isfinite(scaled.max()) else (row - row.max()) / sampling.temperature)


def _top_k(row: Array, top_k: int) -> Array:
    """The row with scores below the `top_k`-th largest set to -inf; scores equal to that one stay."""
    if not 0 < top_k < len(row):
        return row
    return np.where(row < np.sort(row)[-top_k], -np.inf, row)


def _top_p(p: Array, top_p: float) -> Array:
    """The row with 0 for each token before which the mass has reached `top_p`.

    The order is by descending probability, then ascending id.
    """
    if top_p >= 1.0:
        return p
    kept_p, mass = np.zeros_like(p), 0.0
    for token in sorted(range(len(p)), key=lambda candidate: (-p[candidate], candidate)):
        if mass >= top_p:
            break
        kept_p[token] = p[token]
        mass += p[token]
    return kept_p
