"""Trials: a generation taken apart into its draws, each with its law.

The law of a draw is that given all draws before it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from specverify.properties.laws.sampled.draft_faults import payments
from specverify.properties.laws.sampled.links import Trial, residual_band
from specverify.properties.laws.sampled.truncated import band
from specverify.properties.laws.worlds import is_deterministic
from specverify.properties.tolerance.bounds import UNIT
from specverify.properties.tolerance.closeness import Noise, forced_logits
from specverify.properties.verdict.invariant import NotApplicable, Oracle
from specverify.reference.case import Case
from specverify.reference.oracle import processing
from specverify.reference.oracle.acceptance import without_tokens
from specverify.reference.trace import Array, Step, Trace
from specverify.reference.tree import Tree

ROUNDING = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 2e-5, "float16": 2e-5}
"""How far an engine's arithmetic may move a score between its own logits and its law.

16-bit engines compute the law in float32 at least.
"""

LANES = 8
"""Least number of partial sums in an engine's softmax: a sum over V numbers then rounds V / LANES times."""

WIDEST = 300.0
"""Largest margin of scores: a band says nothing beyond it, and exp of twice this margin is still finite in float64."""

TriedSiblings = list[tuple[int, Array | None]]
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

    Rule N bounds the rms distance of a row by `Noise.logits_limit`; no entry of a row of V numbers exceeds sqrt(V)
    times its rms. The control of a backend that shows no logits is not measured: its largest admissible error is
    assumed.
    """
    widest = control.logits_limit()
    if control.measured == 0.0 and control.logits > 0.0:
        widest = max(widest, widest * control.ceiling / control.logits)
    return float(widest * np.sqrt(case.model.vocab_size))


def points(case: Case, oracle: Oracle, trace: Trace, bound: float) -> list[Point]:
    """The oracle's law before each token of the output, given the tokens before it, and the band of the engine's.

    Every token of the output follows known tokens, so one forward of the oracle over the output gives all laws.
    `bound` is how far one logit of the engine may lie from the oracle's.

    Raises:
        NotApplicable: A token is outside the vocabulary, or the engine's law cannot be bounded.
    """
    output = trace.output
    if not output:
        return []
    if not all(0 <= token < case.model.vocab_size for token in output):
        raise NotApplicable("a token outside the vocabulary has no law")
    rows = forced_logits(case, oracle, output)
    revealed_rows = _revealed_logits(trace, len(output))
    if case.sampling.processors and any(row is None for row in revealed_rows):
        raise NotApplicable("what custom processors make of another's logits has no bound")
    return [
        _point(case, rows[position], revealed_rows[position], output[:position], bound)
        for position in range(len(output))
    ]


def upper_bounds(law_points: list[Point]) -> list[Array]:
    """The largest probability that the engine's law may give each token [V], at each place of the output."""
    return [point.high for point in law_points]


def draft_bets(
    case: Case, oracle: Oracle, output: tuple[int, ...], law_points: list[Point]
) -> list[Mapping[str, Array]]:
    """The payments of `specverify.properties.laws.sampled.draft_faults` at each place of the output.

    The draft's law q is the oracle's, of the draft as a target under the case's own settings.
    """
    assert case.draft.model is not None
    rows = forced_logits(case.drafting_case, oracle, output) if output else ()
    bets: list[Mapping[str, Array]] = []
    for place, (row, point) in enumerate(zip(rows, law_points, strict=True)):
        q = processing.law(row, case.sampling, case.stops, case.prompt, output[:place])
        bets.append(payments(point.p, q, place))
    return bets


def trials(
    case: Case, trace: Trace, law_points: list[Point], bets: list[Mapping[str, Array]] | None = None
) -> Iterator[Trial]:
    """The draws of a generation in the order in which they happened, each given all that came before it.

    Where the rule tries siblings in turn and the trace shows trees, paths and proposals, a token makes one trial for
    each sibling that was tried; tokens that a stop cut from a block make none. For other rules, and for backends that
    show less, each token of the output is one draw from p given the tokens before it, which holds for every lossless
    rule. One of the two ways is taken for the whole generation.
    """
    walks = tried_siblings(case, trace)
    for position, (token, point) in enumerate(zip(trace.output, law_points, strict=True)):
        if walks is None:
            token_bets = None if bets is None else bets[position]
            yield Trial(point.p, replacement=token, low=point.low, high=point.high, bets=token_bets)
        else:
            tried, accepted = walks[position]
            yield from _level_trials(point, tried, accepted, token)


def tried_siblings(case: Case, trace: Trace) -> list[tuple[TriedSiblings, bool]] | None:
    """For each token of the output, the siblings that were tried for it, and whether the last of them was accepted.

    None where the rule tries no siblings in turn, or the trace does not show a walk that leads to its own output.
    """
    if not case.sampling.rule.promise.tries_in_turn:
        return None
    siblings: list[tuple[TriedSiblings, bool]] = []
    emitted: tuple[int, ...] = ()
    for step in trace.steps:
        levels = _levels(case, step)
        if levels is None or step.emitted is None:
            return None
        siblings += levels[: len(step.emitted.tokens)]
        emitted += step.emitted.tokens
    return siblings if len(siblings) == len(trace.output) and emitted == trace.output else None


def _levels(case: Case, step: Step) -> list[tuple[TriedSiblings, bool]] | None:
    """The siblings tried at each node of the walk of one step; None where the step shows no consistent walk."""
    if step.drafted is None or step.accepted is None or step.emitted is None or step.drafted.proposal is None:
        return None
    tree = step.drafted.tree
    path = step.accepted.path
    proposal = step.drafted.proposal
    rule = case.sampling.rule.promise
    without_replacement = not is_deterministic(case) and case.sampling.draws == "without-replacement"
    if proposal.shape != (len(tree), case.model.vocab_size) or path[:1] != (0,):
        return None
    # The emitted tokens must be the beginning of path and bonus: a stop may have cut the rest.
    block = (*(tree.token[node] for node in path[1:] if node < len(tree)), step.accepted.bonus)
    if block[: len(step.emitted.tokens)] != step.emitted.tokens:
        return None
    levels: list[tuple[TriedSiblings, bool]] = []
    # All nodes with the accepted token path: where twins are one candidate, their children are tried together.
    twins = [0]
    # None stands for the end of the walk, where all siblings tried were rejected or none existed.
    for node in (*path[1:], None):
        siblings = sorted(child for twin in twins for child in tree.children[twin])
        # Twins are tried once; a chain has one child at most.
        if rule.joins_twins:
            siblings = _distinct(tree, siblings)
        elif rule.chains_only:
            siblings = siblings[:1]
        if node is not None and node not in siblings:
            return None
        tried_nodes = siblings if node is None else siblings[: siblings.index(node) + 1]
        tried: TriedSiblings = []
        for child in tried_nodes:
            drawn_tokens = {token for token, _ in tried} if without_replacement else set()
            q = _proposal_law(proposal[child], tree.token[child], drawn_tokens) if rule.reads_draft_law else None
            tried.append((tree.token[child], q))
        levels.append((tried, node is not None))
        if node is not None:
            candidates = sorted(child for twin in twins for child in tree.children[twin])
            twins = (
                [child for child in candidates if tree.token[child] == tree.token[node]] if rule.joins_twins else [node]
            )
    return levels


def _distinct(tree: Tree, nodes: list[int]) -> list[int]:
    """The first of `nodes` with each token."""
    first_nodes: dict[int, int] = {}
    for node in nodes:
        first_nodes.setdefault(tree.token[node], node)
    return list(first_nodes.values())


def _proposal_law(proposal: Array, token: int, drawn_tokens: set[int]) -> Array | None:
    """The law of a token's draw, without the siblings drawn before; None if the token was proposed for sure."""
    # A one-hot proposal: the token was proposed for sure.
    if proposal[token] == 1.0:
        return None
    remaining = (
        np.array(without_tokens(proposal.astype(np.float64).tolist(), drawn_tokens))
        if drawn_tokens
        else proposal.astype(np.float64)
    )
    total = remaining.sum()
    return np.asarray(remaining / total if total > 0 else remaining)


def _revealed_logits(trace: Trace, count: int) -> list[Array | None]:
    """The engine's own logits before each token of the output; None where it does not reveal them."""
    rows: list[Array | None] = []
    for step in trace.steps:
        if step.emitted is None:
            break
        for depth in range(len(step.emitted.tokens)):
            node = step.accepted.path[depth] if step.accepted and depth < len(step.accepted.path) else -1
            is_shown = step.scored is not None and 0 <= node < len(step.scored.logits)
            rows.append(step.scored.logits[node] if is_shown and step.scored is not None else None)
    return rows[:count] + [None] * (count - len(rows))


def _point(case: Case, row: Array, engine_row: Array | None, output: tuple[int, ...], bound: float) -> Point:
    """The oracle's law after `output`, and its band.

    Noise of logits becomes noise of scores: a repetition penalty r stretches it by up to max(r, 1/r), penalties that
    are subtracted and bans leave it, the temperature divides it. Where the engine shows its logits, the distance of its
    scores is known: half the spread of the differences, since a shift of a whole row changes no law. The smaller of the
    two counts, so that wrong logits widen no band beyond what rule N admits.
    """
    sampling, stops = case.sampling, case.stops
    oracle_scores = processing.scores(row, sampling, stops, case.prompt, output)
    stretch = max(sampling.repetition_penalty, 1.0 / sampling.repetition_penalty)
    noise = np.inf if sampling.processors else bound * stretch / sampling.temperature
    finite = np.isfinite(oracle_scores)
    if engine_row is not None and engine_row.shape == row.shape and np.isfinite(engine_row).all():
        engine_scores = processing.scores(engine_row, sampling, stops, case.prompt, output)
        if np.array_equal(np.isfinite(engine_scores), finite):
            noise = min(noise, float(np.ptp(engine_scores[finite] - oracle_scores[finite])) / 2 / sampling.temperature)
    if not np.isfinite(noise):
        raise NotApplicable("how far the engine's scores may lie off has no bound")
    # A shift changes no law and keeps exp in range.
    tempered = (oracle_scores - oracle_scores.max()) / sampling.temperature
    engine = UNIT["float64" if case.dtype == "float64" else "float32"]
    noise += ROUNDING[case.dtype] + engine * len(row) / LANES
    # Dividing and subtracting large scores rounds in proportion to their size.
    noise += 2 * engine * float(np.abs(oracle_scores[finite]).max()) / sampling.temperature
    low, high = band(tempered, min(noise, WIDEST), sampling)
    return Point(processing.law(row, sampling, stops, case.prompt, output), low, high)


def _level_trials(point: Point, tried: TriedSiblings, accepted: bool, token: int) -> Iterator[Trial]:
    """The trials at one node: each sibling in turn, with the token drawn after the last one if it was rejected.

    Without siblings the one trial is the drawn token.
    """
    if not tried:
        yield Trial(point.p, replacement=token, low=point.low, high=point.high)
    p, low, high = point.p, point.low, point.high
    for index, (drafted, q) in enumerate(tried):
        last = index == len(tried) - 1
        # The draft has no token left to draw, or the residual of p may be empty: no further trial can be stated.
        if (q is not None and not q.any()) or not high.any():
            return
        replacement = token if last and not accepted else None
        yield Trial(p, q, drafted, last and accepted, replacement, low=low, high=high)
        # The residual after a token proposed for sure is p without that token.
        certain = np.zeros(len(p))
        certain[drafted] = 1.0
        proposal = certain if q is None else q
        residual = np.maximum(p - proposal, 0.0)
        low, high = residual_band(low, high, proposal)
        p = residual / residual.sum() if residual.sum() > 0 else high / max(high.sum(), np.finfo(np.float64).tiny)
