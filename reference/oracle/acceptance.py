"""Acceptance by definition: the greedy walk, and each sampling rule as a program.

A program decides by the coins of a `Chance`, so the same code runs on a tape and yields the exact law.
"""

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from typing import NamedTuple

from specverify.reference.oracle.coin_source import Chance, Number
from specverify.reference.rules import Rule
from specverify.reference.trace import Accepted, Array
from specverify.reference.tree import Tree

Row = Sequence[Number]
Answer = tuple[tuple[int, ...], list[Number]]
Program = Callable[[Chance, Rule, str, Tree, Sequence[Row], Sequence[Row], bool], Answer]
"""The signature of an acceptance rule; `verify` describes its arguments and its answer."""


class ProgramArguments(NamedTuple):
    """The arguments of a Program, in their order, for code that passes all of them on."""

    chance: Chance
    rule: Rule
    draws: str
    tree: Tree
    target: Sequence[Row]
    proposal: Sequence[Row]
    sampled: bool


def greedy_token(row: Array) -> int:
    """The greedy token of one row of logits: the arg-max, the lowest id among equals."""
    best = 0
    for token in range(1, len(row)):
        if row[token] > row[best]:
            best = token
    return best


def greedy_walk(tree: Tree, logits: Array) -> Accepted:
    """The accepted path and bonus token for `logits` [nodes, vocabulary]; of equal siblings the first is accepted.

    >>> import numpy as np
    >>> greedy_walk(Tree((0, 0, 0), (5, 1, 2)), np.eye(3)[[2, 0, 1]])
    Accepted(path=(0, 2), bonus=1, coins=None)
    """
    path = [0]
    while True:
        # Both pick the lowest id among equals; `argmax` spares a large vocabulary the Python loop.
        token = int(logits[path[-1]].argmax()) if len(logits[0]) > 4096 else greedy_token(logits[path[-1]])
        accepted_children = [child for child in tree.children[path[-1]] if tree.token[child] == token]
        if not accepted_children:
            return Accepted(tuple(path), token)
        path.append(accepted_children[0])


def verify(
    chance: Chance,
    rule: Rule,
    draws: str,
    tree: Tree,
    target: Sequence[Row],
    proposal: Sequence[Row],
    sampled: bool,
) -> Answer:
    """One verification by the case's rule.

    Args:
        chance: The coins.
        rule: The rule; its name selects the program.
        draws: How siblings were named, one of DRAWS.
        tree: The drafted tree; a rule reads its `children` and `token` alone.
        target: The target's law after each node.
        proposal: For each node the law from which its token was drawn, before earlier siblings were removed; one-hot
            for a token that was not drawn. Row 0 is not used.
        sampled: Whether the draft's tokens were drawn.

    Returns:
        The accepted nodes, root first, and the weights of the law of the token after them.
    """
    return RULES[rule.name](chance, rule, draws, tree, target, proposal, sampled)


def normalise(row: Row) -> list[Number]:
    """`row` divided by its sum; a row of zeros stays a row of zeros."""
    total = sum(row)
    return [value / total for value in row] if total > 0 else list(row)


def without_tokens(row: Row, tokens: Collection[int]) -> list[Number]:
    """`row` with `tokens` set to 0."""
    # `0 * value` keeps the arithmetic: a Fraction stays a Fraction, a float a float.
    return [0 * value if token in tokens else value for token, value in enumerate(row)]


def residual(p: Row, q: Row) -> list[Number]:
    """The residual of `p` after `q` was rejected: relu(p - q), normalised."""
    return normalise([max(a - b, 0 * a) for a, b in zip(p, q, strict=True)])


def _ratio(p: Number, q: Number) -> Number:
    """The ratio p / q; 0 where q is 0, since the draft cannot have drawn the token."""
    return p / q if q > 0 else 0


def _in_arithmetic_of(value: float, number: Number) -> Number:
    """A threshold in the arithmetic of `number`; as a Fraction it is the exact value of the float."""
    return value if isinstance(number, float) else Fraction(value)


Level = Callable[[int], tuple[int | None, list[Number]]]
"""A rule's decision on the children of a node: the accepted child, or None with the law of the token to draw."""


def _walk(tree: Tree, target: Sequence[Row], level: Level) -> Answer:
    """Descend by `level` until a node has no children or all of them are rejected."""
    path = [0]
    while tree.children[path[-1]]:
        child, law = level(path[-1])
        if child is None:
            return tuple(path), _law_or_target(law, target[path[-1]])
        path.append(child)
    return tuple(path), list(target[path[-1]])


def _law_or_target(law: list[Number], row: Row) -> list[Number]:
    """`law`, or the target's own `row` where `law` gives no token any weight.

    In exact arithmetic that rejection has probability 0; rounding alone leads there.
    """
    return law if any(law) else list(row)


def chain(
    chance: Chance, rule: Rule, draws: str, tree: Tree, target: Sequence[Row], proposal: Sequence[Row], sampled: bool
) -> Answer:
    """Leviathan et al. 2023, algorithm 1: accept x if u < p(x)/q(x); a rejection leaves relu(p - q), normalised."""

    def level(node: int) -> tuple[int | None, list[Number]]:
        child = tree.children[node][0]
        p, q, x = target[node], proposal[child], tree.token[child]
        if chance.below("accept", child, _ratio(p[x], q[x])):
            return child, []
        return None, residual(p, q)

    return _walk(tree, target, level)


def multi_round(
    chance: Chance, rule: Rule, draws: str, tree: Tree, target: Sequence[Row], proposal: Sequence[Row], sampled: bool
) -> Answer:
    """Try siblings in row order, each against the residual of p after the siblings before it.

    For siblings drawn without replacement, q is the proposal without the tokens already tried, normalised.
    """
    without_earlier = sampled and draws == "without-replacement"

    def level(node: int) -> tuple[int | None, list[Number]]:
        p = list(target[node])
        tried_tokens: set[int] = set()
        for child in tree.children[node]:
            x = tree.token[child]
            q = normalise(without_tokens(proposal[child], tried_tokens)) if without_earlier else proposal[child]
            if chance.below("accept", child, _ratio(p[x], q[x])):
                return child, []
            p = residual(p, q)
            tried_tokens.add(x)
        return None, p

    return _walk(tree, target, level)


def specinfer(
    chance: Chance, rule: Rule, draws: str, tree: Tree, target: Sequence[Row], proposal: Sequence[Row], sampled: bool
) -> Answer:
    """Miao et al. 2024, algorithm 2: try a random one of the remaining siblings, against the draft that named it."""

    def level(node: int) -> tuple[int | None, list[Number]]:
        p, remaining = list(target[node]), list(tree.children[node])
        for trial in tree.children[node]:
            # The last sibling needs no coin.
            index = chance.choose("order", trial, [1] * len(remaining)) if len(remaining) > 1 else 0
            child = remaining.pop(index)
            x, q = tree.token[child], proposal[child]
            if chance.below("accept", child, _ratio(p[x], q[x])):
                return child, []
            p = residual(p, q)
        return None, p

    return _walk(tree, target, level)


def target_only(
    chance: Chance, rule: Rule, draws: str, tree: Tree, target: Sequence[Row], proposal: Sequence[Row], sampled: bool
) -> Answer:
    """SGLang: one coin a level, compared with the covered mass of p; a sibling's token counts as often as it occurs."""

    def level(node: int) -> tuple[int | None, list[Number]]:
        p = target[node]
        covered: Number = 0
        for child in tree.children[node]:
            x = tree.token[child]
            covered = covered + p[x]
            if chance.below("accept", node, covered / _in_arithmetic_of(rule.threshold_acc, covered)):
                return child, []
            if p[x] >= rule.threshold_single:
                return child, []
        return None, normalise(without_tokens(p, {tree.token[child] for child in tree.children[node]}))

    return _walk(tree, target, level)


def eagle(
    chance: Chance, rule: Rule, draws: str, tree: Tree, target: Sequence[Row], proposal: Sequence[Row], sampled: bool
) -> Answer:
    """EAGLE-2 and 3, evaluate_posterior: nodes with equal token paths count as one, as it compares token prefixes.

    The law of a level is read at the first such node. The accepted path is the way from the root to the last accepted
    node, as it reads the row of `retrieve_indices` that ends the search.
    """
    node, twins = 0, [0]
    paths: dict[int, tuple[int, ...]] = {0: (0,)}
    while True:
        below = {child: (*paths[twin], child) for twin in twins for child in tree.children[twin]}
        paths |= below
        candidates = sorted(below)
        if not candidates:
            return paths[node], list(target[node])
        p = list(target[node])
        tried_tokens: set[int] = set()
        for child in candidates:
            x = tree.token[child]
            if x in tried_tokens:
                continue
            if chance.below("accept", child, p[x]):
                break
            p = normalise(without_tokens(p, {x}))
            tried_tokens.add(x)
        else:
            return paths[node], _law_or_target(p, target[node])
        twins = [twin for twin in candidates if tree.token[twin] == x]
        node = twins[0]


def _exponential_of_entropy(p: Row) -> Number:
    """exp(-entropy of p); exact where p is uniform on its support, so that a token there lies on its threshold."""
    support = [value for value in p if value > 0]
    if len(set(support)) == 1:
        return support[0]
    return math.exp(math.fsum(float(value) * math.log(value) for value in support))


def typical(
    chance: Chance, rule: Rule, draws: str, tree: Tree, target: Sequence[Row], proposal: Sequence[Row], sampled: bool
) -> Answer:
    """Medusa: no coin at all. The longest acceptable path wins, then the likeliest, then the first end in row order."""
    paths: list[tuple[tuple[int, ...], tuple[float, ...]]] = [((0,), ())]
    for path, logs in paths:  # the list grows during the loop: each acceptable child is visited in turn
        p = target[path[-1]]
        epsilon: Number = rule.epsilon
        delta: Number = rule.delta
        if any(isinstance(value, Fraction) for value in p):
            # A float may lie on the other side of the fraction that it was written for.
            epsilon, delta = Fraction(str(epsilon)), Fraction(str(delta))
        least = min(epsilon, delta * _exponential_of_entropy(p))
        acceptable = [child for child in tree.children[path[-1]] if p[tree.token[child]] > least]
        paths += [((*path, child), (*logs, math.log(p[tree.token[child]]))) for child in acceptable]
    best, _ = min(paths, key=lambda end: (-len(end[0]), -math.fsum(end[1]), end[0][-1]))
    return best, list(target[best[-1]])


def block(
    chance: Chance, rule: Rule, draws: str, tree: Tree, target: Sequence[Row], proposal: Sequence[Row], sampled: bool
) -> Answer:
    """Sun et al. 2024, algorithm 2: accept up to the last node whose coin lies below its block ratio h.

    pi is the joint acceptance ratio of the chain up to a node.
    """
    path, num_accepted = [0], 0
    while tree.children[path[-1]]:
        path.append(tree.children[path[-1]][0])
    pi: Number = 1
    law = residual(target[0], proposal[path[1]]) if len(path) > 1 else list(target[0])
    for i, node in enumerate(path[1:], 1):
        x = tree.token[node]
        pi = min(1, pi * _ratio(target[path[i - 1]][x], proposal[node][x]))
        h, remaining = pi, list(target[node])
        if i + 1 < len(path):
            remaining = [max(pi * a - b, 0 * b) for a, b in zip(target[node], proposal[path[i + 1]], strict=True)]
            # Where this is 0/0, target and draft agree from here on and a later node is accepted for certain.
            h = _ratio(sum(remaining), sum(remaining) + 1 - pi)
        # No break: a later node may be accepted after an earlier one was not.
        if chance.below("accept", node, h):
            num_accepted, law = i, normalise(remaining)
    return tuple(path[: num_accepted + 1]), _law_or_target(law, target[path[num_accepted]])


def traversal(
    chance: Chance, rule: Rule, draws: str, tree: Tree, target: Sequence[Row], proposal: Sequence[Row], sampled: bool
) -> Answer:
    """Weng et al. 2025, algorithm 2: try a node after all nodes below it, up to the first accepted node.

    `weight` is the joint acceptance ratio of the path down to a node. A rejected child takes its share of the node's
    law and weight, as the residual of block verification does.
    """
    without_earlier = sampled and draws == "without-replacement"

    def try_below(path: tuple[int, ...], weight: Number) -> Answer | None:
        node = path[-1]
        law = list(target[node])
        tried_tokens: set[int] = set()
        for child in tree.children[node]:
            x = tree.token[child]
            q = normalise(without_tokens(proposal[child], tried_tokens)) if without_earlier else proposal[child]
            answer = try_below((*path, child), min(1, weight * _ratio(law[x], q[x])))
            if answer is not None:
                return answer
            remaining = [max(weight * a - b, 0 * b) for a, b in zip(law, q, strict=True)]
            weight = _ratio(sum(remaining), sum(remaining) + 1 - weight)
            law = normalise(remaining)
            tried_tokens.add(x)
        if node == 0 or chance.below("accept", node, weight):
            return path, _law_or_target(law, target[node])
        return None

    accepted = try_below((0,), 1)
    assert accepted is not None
    return accepted


def sample_and_match(
    chance: Chance, rule: Rule, draws: str, tree: Tree, target: Sequence[Row], proposal: Sequence[Row], sampled: bool
) -> Answer:
    """llama.cpp: each row draws its own token, which accepts the first child that carries it, or else is emitted."""

    def level(node: int) -> tuple[int | None, list[Number]]:
        drawn_token = chance.choose("accept", node, target[node])
        for child in tree.children[node]:
            if tree.token[child] == drawn_token:
                return child, []
        return None, [0 * value + (token == drawn_token) for token, value in enumerate(target[node])]

    return _walk(tree, target, level)


Acceptance = Callable[[Row, Row, int], Number]
"""The probability that a token x is accepted, from p, q and x."""


def _walk_chain(
    chance: Chance, tree: Tree, target: Sequence[Row], proposal: Sequence[Row], acceptance: Acceptance
) -> Answer:
    """Accept each node of a chain with `acceptance`, but no token of probability 0; a rejection leaves relu(p - q)."""

    def level(node: int) -> tuple[int | None, list[Number]]:
        child = tree.children[node][0]
        p, q, x = target[node], proposal[child], tree.token[child]
        if chance.below("accept", child, acceptance(p, q, x) if p[x] > 0 else 0):
            return child, []
        return None, residual(p, q)

    return _walk(tree, target, level)


def ensemble(
    chance: Chance, rule: Rule, draws: str, tree: Tree, target: Sequence[Row], proposal: Sequence[Row], sampled: bool
) -> Answer:
    """DIVERSED, static ensemble: v = weight p + (1 - weight) q accepts x with v(x)/q(x); relu(v - q) is relu(p - q)."""

    def acceptance(p: Row, q: Row, x: int) -> Number:
        weight = _in_arithmetic_of(rule.weight, p[x])
        return 1 - weight + weight * _ratio(p[x], q[x])

    return _walk_chain(chance, tree, target, proposal, acceptance)


def synthetic(
    chance: Chance, rule: Rule, draws: str, tree: Tree, target: Sequence[Row], proposal: Sequence[Row], sampled: bool
) -> Answer:
    """vLLM, synthetic: every node is accepted with one probability, whatever p and q say."""
    return _walk_chain(chance, tree, target, proposal, lambda p, q, x: _in_arithmetic_of(rule.acceptance_rate, p[x]))


def fly(
    chance: Chance, rule: Rule, draws: str, tree: Tree, target: Sequence[Row], proposal: Sequence[Row], sampled: bool
) -> Answer:
    """FLy: the decisions of the rule chain on all nodes first; then rejections with a window behind them are lifted."""
    path = [0]
    while tree.children[path[-1]]:
        path.append(tree.children[path[-1]][0])
    rows = [(target[node], proposal[child], child) for node, child in itertools.pairwise(path)]
    accepted = [
        chance.below("accept", child, _ratio(p[tree.token[child]], q[tree.token[child]])) for p, q, child in rows
    ]
    window = int(rule.window)
    for i, (p, q, child) in enumerate(rows):
        following = accepted[i + 1 : i + 1 + window]
        is_lifted = (
            p[tree.token[child]] > 0 and _entropy(p) >= rule.entropy and len(following) == window and all(following)
        )
        if not (accepted[i] or is_lifted):
            return tuple(path[: i + 1]), _law_or_target(residual(p, q), p)
    return tuple(path), list(target[path[-1]])


def _entropy(p: Row) -> float:
    """The entropy of `p` in nats."""
    return -math.fsum(float(value) * math.log(value) for value in p if value > 0)


RULES: dict[str, Program] = {
    "chain": chain,
    "multi-round": multi_round,
    "eagle": eagle,
    "specinfer": specinfer,
    "target-only": target_only,
    "typical": typical,
    "block": block,
    "traversal": traversal,
    "sample-and-match": sample_and_match,
    "ensemble": ensemble,
    "fly": fly,
    "synthetic": synthetic,
}
"""The program of each rule of `specverify.reference.rules`."""
