"""Trials: a generation taken apart into its draws, each with its law.

The law of a draw is that given all draws before it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from properties.laws.sampled.draft_faults import payments
from properties.laws.sampled.links import Trial, residual_band
from properties.laws.sampled.truncated import band
from properties.laws.worlds import deterministic
from properties.tolerance.bounds import UNIT
from properties.tolerance.closeness import Noise, forced_logits
from properties.verdict.invariant import NotApplicable, Oracle
from reference.case import Case
from reference.draft import Scripted
from reference.oracle import processing
from reference.oracle.acceptance import without
from reference.trace import Array, Step, Trace
from reference.tree import Tree

TRIED_IN_TURN = ("chain", "multi-round", "eagle")
"""Rules that try siblings one after the other, each with its own coin, against the residual of p."""

ROUNDING = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 2e-5, "float16": 2e-5}
"""How far an engine's arithmetic may move a score between its own logits and its law.

16-bit engines compute the law in float32 at least.
"""

LANES = 8
"""Least number of partial sums in an engine's softmax: a sum over V numbers then rounds V / LANES times."""

WIDEST = 300.0
"""Largest margin of scores: a band says nothing beyond it, and exp of twice this margin is still finite in float64."""

Tried = list[tuple[int, Array | None]]
"""Siblings in the order of their trials: token, and the law of its draw; None for a token proposed for sure."""


@dataclass(frozen=True)
class Point:
    """The oracle's law after some tokens, and bounds of the engine's law there.

    Attributes:
        p: The law by the oracle's logits [V].
        low: The smallest probabilities that the engine's law may have [V].
        high: The largest.
    """

    p: Array
    low: Array
    high: Array


def logit_bound(case: Case, control: Noise) -> float:
    """How far one logit of the engine may lie from the oracle's, wherever rule N holds.

    Rule N bounds the rms distance of a row by `Noise.of_logits`; no entry of a row of V numbers exceeds sqrt(V) times
    its rms. The control of a backend that shows no logits is not measured: its largest admissible error is assumed.
    """
    widest = control.logits_limit()
    if control.measured == 0.0 and control.logits > 0.0:
        widest = max(widest, widest * control.ceiling / control.logits)
    return float(widest * np.sqrt(case.model.vocab_size))


def points(case: Case, oracle: Oracle, trace: Trace, bound: float) -> list[Point]:
    """The oracle's law before each token of the output, given the tokens before it, and the band of the engine's.

    Every token of the output follows known tokens, so one forward of the oracle over the output gives all laws.

    Args:
        case: The case that was run; it samples.
        oracle: The oracle.
        trace: The trace of the run.
        bound: How far one logit of the engine may lie from the oracle's.

    Raises:
        NotApplicable: A token is outside the vocabulary, or the engine's law cannot be bounded.
    """
    output = trace.output
    if not output:
        return []
    if not all(0 <= token < case.model.vocab_size for token in output):
        raise NotApplicable("a token outside the vocabulary has no law")
    rows = forced_logits(case, oracle, output)
    seen = _revealed(trace, len(output))
    if case.sampling.processors and any(row is None for row in seen):
        raise NotApplicable("what custom processors make of another's logits has no bound")
    return [_point(case, rows[at], seen[at], output[:at], bound) for at in range(len(output))]


def high_of(known: list[Point]) -> list[Array]:
    """The largest probability that the engine's law may give each token [V], at each place of the output."""
    return [point.high for point in known]


def draft_bets(case: Case, oracle: Oracle, output: tuple[int, ...], known: list[Point]) -> list[Mapping[str, Array]]:
    """The payments of `properties.laws.sampled.draft_faults` at each place of the output.

    The draft's law q is the oracle's, of the draft as a target under the case's own settings.
    """
    assert case.draft.model is not None
    rows = forced_logits(replace(case, model=case.draft.model, draft=Scripted()), oracle, output) if output else ()
    bets: list[Mapping[str, Array]] = []
    for place, (row, point) in enumerate(zip(rows, known, strict=True)):
        q = processing.law(row, case.sampling, case.stops, case.prompt, output[:place])
        bets.append(payments(point.p, q, place))
    return bets


def trials(
    case: Case, trace: Trace, known: list[Point], bets: list[Mapping[str, Array]] | None = None
) -> Iterator[Trial]:
    """The draws of a generation in the order in which they happened, each given all that came before it.

    Where the rule tries siblings in turn and the trace shows trees, paths and proposals, a token makes one trial for
    each sibling that was tried; tokens that a stop cut from a block make none. For other rules, and for backends that
    show less, each token of the output is one draw from p given the tokens before it, which holds for every lossless
    rule. One of the two ways is taken for the whole generation.

    Args:
        case: The case that was run; it samples.
        trace: The trace of the run.
        known: The oracle's law before each token of the output, as `points` gives it.
        bets: Bets on each token of the output, as `draft_bets` gives them; None for none.
    """
    walks = walked(case, trace)
    for at, (token, point) in enumerate(zip(trace.output, known, strict=True)):
        if walks is None:
            made = None if bets is None else bets[at]
            yield Trial(point.p, replacement=token, low=point.low, high=point.high, bets=made)
        else:
            tried, accepted = walks[at]
            yield from _level(point, tried, accepted, token)


def walked(case: Case, trace: Trace) -> list[tuple[Tried, bool]] | None:
    """For each token of the output, the siblings that were tried for it, and whether the last of them was accepted.

    None where the rule tries no siblings in turn, or the trace does not show a walk that leads to its own output.
    """
    if case.sampling.rule.name not in TRIED_IN_TURN:
        return None
    found: list[tuple[Tried, bool]] = []
    emitted: tuple[int, ...] = ()
    for step in trace.steps:
        levels = _levels(case, step)
        if levels is None or step.emitted is None:
            return None
        found += levels[: len(step.emitted.tokens)]
        emitted += step.emitted.tokens
    return found if len(found) == len(trace.output) and emitted == trace.output else None


def _levels(case: Case, step: Step) -> list[tuple[Tried, bool]] | None:
    """The siblings tried at each node of the walk of one step; None where the step shows no consistent walk."""
    if step.drafted is None or step.accepted is None or step.emitted is None or step.drafted.proposal is None:
        return None
    tree, path, told = step.drafted.tree, step.accepted.path, step.drafted.proposal
    eagle = case.sampling.rule.name == "eagle"
    removed = not deterministic(case) and case.sampling.draws == "without-replacement"
    if told.shape != (len(tree), case.model.vocab_size) or path[:1] != (0,):
        return None
    # The emitted tokens must be the beginning of path and bonus: a stop may have cut the rest.
    block = (*(tree.token[node] for node in path[1:] if node < len(tree)), step.accepted.bonus)
    if block[: len(step.emitted.tokens)] != step.emitted.tokens:
        return None
    levels: list[tuple[Tried, bool]] = []
    # All nodes with the accepted token path: for eagle, the children of twins are tried together.
    same = [0]
    # None stands for the end of the walk, where all siblings tried were rejected or none existed.
    for node in (*path[1:], None):
        below = sorted(child for twin in same for child in tree.children[twin])
        # eagle tries equal tokens once; a chain has one child at most.
        below = _distinct(tree, below) if eagle else below[:1] if case.sampling.rule.name == "chain" else below
        if node is not None and node not in below:
            return None
        asked = below if node is None else below[: below.index(node) + 1]
        tried: Tried = []
        for child in asked:
            gone = {token for token, _ in tried} if removed else set()
            tried.append((tree.token[child], None if eagle else _drawn_from(told[child], tree.token[child], gone)))
        levels.append((tried, node is not None))
        if node is not None:
            twins = sorted(child for twin in same for child in tree.children[twin])
            same = [child for child in twins if tree.token[child] == tree.token[node]] if eagle else [node]
    return levels


def _distinct(tree: Tree, nodes: list[int]) -> list[int]:
    """The first of `nodes` with each token."""
    return [node for at, node in enumerate(nodes) if tree.token[node] not in {tree.token[one] for one in nodes[:at]}]


def _drawn_from(told: Array, token: int, gone: set[int]) -> Array | None:
    """The law of a token's draw, without the siblings drawn before; None if the token was proposed for sure."""
    # A one-hot proposal: the token was proposed for sure.
    if told[token] == 1.0:
        return None
    left = np.array(without(told.astype(np.float64).tolist(), gone)) if gone else told.astype(np.float64)
    total = left.sum()
    return np.asarray(left / total if total > 0 else left)


def _revealed(trace: Trace, count: int) -> list[Array | None]:
    """The engine's own logits before each token of the output; None where it does not reveal them."""
    rows: list[Array | None] = []
    for step in trace.steps:
        if step.emitted is None:
            break
        for depth in range(len(step.emitted.tokens)):
            node = step.accepted.path[depth] if step.accepted and depth < len(step.accepted.path) else -1
            shown = step.scored is not None and 0 <= node < len(step.scored.logits)
            rows.append(step.scored.logits[node] if shown and step.scored is not None else None)
    return rows[:count] + [None] * (count - len(rows))


def _point(case: Case, row: Array, seen: Array | None, output: tuple[int, ...], bound: float) -> Point:
    """The oracle's law after `output`, and its band.

    Noise of logits becomes noise of scores: a repetition penalty r stretches it by up to max(r, 1/r), penalties that
    are subtracted and bans leave it, the temperature divides it. Where the engine shows its logits, the distance of its
    scores is known: half the spread of the differences, since a shift of a whole row changes no law. The smaller of the
    two counts, so that wrong logits widen no band beyond what rule N admits.
    """
    sampling, stops = case.sampling, case.stops
    true = processing.scores(row, sampling, stops, case.prompt, output)
    stretch = max(sampling.repetition_penalty, 1.0 / sampling.repetition_penalty)
    noise = np.inf if sampling.processors else bound * stretch / sampling.temperature
    named = np.isfinite(true)
    if seen is not None and seen.shape == row.shape and np.isfinite(seen).all():
        own = processing.scores(seen, sampling, stops, case.prompt, output)
        if np.array_equal(np.isfinite(own), named):
            noise = min(noise, float(np.ptp(own[named] - true[named])) / 2 / sampling.temperature)
    if not np.isfinite(noise):
        raise NotApplicable("how far the engine's scores may lie off has no bound")
    # A shift changes no law and keeps exp in range.
    tempered = (true - true.max()) / sampling.temperature
    engine = UNIT["float64" if case.dtype == "float64" else "float32"]
    noise += ROUNDING[case.dtype] + engine * len(row) / LANES
    # Dividing and subtracting large scores rounds in proportion to their size.
    noise += 2 * engine * float(np.abs(true[named]).max()) / sampling.temperature
    low, high = band(tempered, min(noise, WIDEST), sampling)
    return Point(processing.law(row, sampling, stops, case.prompt, output), low, high)


def _level(point: Point, tried: Tried, accepted: bool, token: int) -> Iterator[Trial]:
    """The trials at one node: each sibling in turn, with the token drawn after the last one if it was rejected.

    Without siblings the one trial is the drawn token.
    """
    if not tried:
        yield Trial(point.p, replacement=token, low=point.low, high=point.high)
    p, low, high = point.p, point.low, point.high
    for at, (drafted, q) in enumerate(tried):
        last = at == len(tried) - 1
        # The draft has no token left to draw, or the residual of p may be empty: no further trial can be stated.
        if (q is not None and not q.any()) or not high.any():
            return
        came = token if last and not accepted else None
        yield Trial(p, q, drafted, last and accepted, came, low=low, high=high)
        # The residual after a token proposed for sure is p without that token.
        sure = np.zeros(len(p))
        sure[drafted] = 1.0
        told = sure if q is None else q
        left, (low, high) = np.maximum(p - told, 0.0), residual_band(low, high, told)
        p = left / left.sum() if left.sum() > 0 else high / max(high.sum(), np.finfo(np.float64).tiny)
