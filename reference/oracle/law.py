"""Law: the exact distribution of the block that one round emits.

Also its distance from the target's own law, and the contexts from which that distance comes.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational
from typing import cast

from specverify.reference.malformed import Malformed
from specverify.reference.oracle import acceptance, processing
from specverify.reference.oracle.acceptance import Answer, Program, ProgramArguments, Row, normalise
from specverify.reference.oracle.coin_source import Chance, Number, enumerate_law
from specverify.reference.oracle.tree_growth import DraftStop, Growth, LazyTable, Path, UnfinishedTree
from specverify.reference.probability_world import GivenTree, World
from specverify.reference.rules import Rule
from specverify.reference.tree import Shape, Tree

Law = dict[Path, Number]
"""Probability of each emitted block: the tokens below the root, and the token after the path."""

NONE: Number = 0
"""Probability 0; the int adds exactly to floats and to fractions."""


def given_tree_law(verification: GivenTree, sampled: bool, exact: bool = False, program: Program | None = None) -> Law:
    """The law of the block that one verification of a fixed tree emits.

    Args:
        verification: Tree and probabilities.
        sampled: Whether the tokens were drawn from the proposals; otherwise the proposals are one-hot.
        exact: Compute in fractions: each float at its exact value, each row normalised. Otherwise in float64.
        program: A rule to run in place of the rule that `verification` names.
    """
    target, proposal = (
        [_row(row.tolist(), exact and any(row)) for row in table]
        for table in (verification.target, verification.proposal)
    )
    rule, draws = verification.sampling.rule, verification.sampling.draws

    def program_of(chance: Chance) -> tuple[Path, tuple[Number, ...]]:
        return _verify(program, ProgramArguments(chance, rule, draws, verification.tree, target, proposal, sampled))

    return _block_law(enumerate_law(program_of))


def world_law(world: World, exact: bool = False, program: Program | None = None, whole_tree_first: bool = True) -> Law:
    """The law of the block that one round emits: drafting, verification, and the token after the path.

    `specverify.reference.oracle.processing` processes the rows, with the path as output; `exact` then turns them into
    fractions and normalises them. The other arguments are those of `round_law`.
    """
    target, draft = target_rows(world, exact), draft_rows(world, exact)
    rule, draws = world.sampling.rule, world.sampling.draws
    return round_law(world.shape, target, draft, rule, draws, world.tokens, program, whole_tree_first)


def round_law(
    shape: Shape,
    target: Callable[[Path], Row],
    draft: Callable[[Path, int], Row],
    rule: Rule,
    draws: str,
    tokens: Path | None = None,
    program: Program | None = None,
    whole_tree_first: bool = True,
    stop: DraftStop | None = None,
) -> Law:
    """The law of the block that one round emits, in the arithmetic of the rows.

    Args:
        shape: The tree to draft. A sibling for which the draft's law has no token left is not drafted, and neither are
            the nodes below it.
        target: The target's law after a path of tokens below the root.
        draft: The law, after a path, from which the k-th child there is named.
        rule: The acceptance rule.
        draws: One of DRAWS.
        tokens: The drafted tokens where they are given (the root's first); nothing is drawn then.
        program: A rule to run in place of `rule`'s.
        whole_tree_first: Draft the whole tree before the rule sees it, as engines do. Else a node's children are drawn
            when the rule first looks at them: the same law for any rule that reads no more than it needs (`children`
            and `token`), in far fewer runs.
        stop: The confidence at which the draft ends; None for a tree of the whole shape.
    """
    sampled = tokens is None and draws != "top-k"

    def program_of(chance: Chance) -> tuple[Path, tuple[Number, ...]]:
        growth = Growth(chance, shape, draft, draws, tokens, stop)
        if whole_tree_first:
            nodes, tree = growth.tree()
            rows = [target(growth.path[node]) for node in nodes]
            proposal: Sequence[Row] = [growth.proposal[node] for node in nodes]
        else:
            # Rules read `children` and `token` alone, so a tree without parents is enough.
            tree = cast(Tree, UnfinishedTree(LazyTable(growth.children), growth.token))
            rows = cast(list[Row], LazyTable(lambda node: target(growth.path[node])))
            proposal = cast(Sequence[Row], growth.proposal)
        return _verify(program, ProgramArguments(chance, rule, draws, tree, rows, proposal, sampled))

    return _block_law(enumerate_law(program_of))


def _verify(program: Program | None, arguments: ProgramArguments) -> tuple[Path, tuple[Number, ...]]:
    """Accepted tokens and the weights of the next one; raises Malformed where a rule of the user's own is wrong."""
    if program is None:
        path, weights = acceptance.verify(*arguments)
    else:
        try:
            answer = program(*arguments)
        except Exception as error:
            raise Malformed("rule", f"raised {type(error).__name__}: {error}") from error
        path, weights = _check_answer(answer, arguments.tree, len(arguments.target[0]))
    return tuple(arguments.tree.token[node] for node in path[1:]), tuple(weights)


def _check_answer(answer: Answer, tree: Tree, vocab: int) -> Answer:
    """A rule's answer, if it is a path from the root and a law over the vocabulary; raises Malformed otherwise."""
    try:
        path, weights = answer
        path, weights = tuple(operator.index(node) for node in path), list(weights)
        numbers = all(isinstance(weight, (Rational, float)) for weight in weights)
    except (TypeError, ValueError):
        numbers = False
    if not numbers:
        answer_text = " ".join(repr(answer).split())[:80]
        raise Malformed("rule", f"answered {answer_text}, not (path of node indices, weights as fractions or floats)")
    if not path or path[0] != 0:
        raise Malformed("rule", f"answered path {tuple(path)}, which does not begin at the root (0)")
    twins = [0]  # all nodes with the path's tokens: a rule such as eagle may treat twins as one node
    for node in path[1:]:
        candidates = [child for twin in twins for child in tree.children[twin]]
        if node not in candidates:
            raise Malformed("rule", f"answered path {tuple(path)}: {node} is no child of the node before it")
        twins = [child for child in candidates if tree.token[child] == tree.token[node]]
    if len(weights) != vocab:
        raise Malformed("rule", f"answered {len(weights)} weights for a vocabulary of {vocab}")
    # NaN is not >= 0 either.
    if not all(weight >= 0 for weight in weights) or not 0 < sum(weights) < float("inf"):
        raise Malformed("rule", f"answered weights that are no law: {[float(weight) for weight in weights]}")
    return path, weights


def _block_law(law: dict[tuple[Path, tuple[Number, ...]], Number]) -> Law:
    """The law of whole blocks from the law of (accepted tokens, weights of the token after them)."""
    blocks: Law = {}
    for (tokens, weights), mass in law.items():
        for token, weight in enumerate(normalise(weights)):
            if weight > 0:
                _add(blocks, (*tokens, token), mass * weight)
    return blocks


def _add(law: Law, block: Path, mass: Number) -> None:
    law[block] = law.get(block, NONE) + mass


def _sum(masses: Iterable[Number]) -> Number:
    return sum(masses, NONE)


def _difference(a: Number, b: Number) -> Number:
    return a - b if a > b else b - a


def _row(row: Sequence[float], exact: bool) -> list[Number]:
    """`row` as it is; with `exact`, its floats as fractions, normalised."""
    return normalise([Fraction(value) for value in row]) if exact else list(row)


def target_rows(world: World, exact: bool = False) -> Callable[[Path], Row]:
    """The target's processed law after a path of tokens below the root; each row is computed once."""
    rows: dict[Path, Row] = {}

    def continuation(path: Path) -> Row:
        if path not in rows:
            logits = world.target[world.row(path)]
            rows[path] = _row(processing.law(logits, world.sampling, world.stops, world.prompt, path).tolist(), exact)
        return rows[path]

    return continuation


def draft_rows(world: World, exact: bool = False) -> Callable[[Path, int], Row]:
    """The processed law that names the k-th child after a path; each row is computed once."""
    rows: dict[tuple[Path, int], Row] = {}

    def proposal(path: Path, k: int) -> Row:
        table = k % len(world.drafts)
        if (path, table) not in rows:
            logits = world.drafts[table][world.row(path)]
            row = processing.law(logits, world.sampling, world.stops, world.prompt, path).tolist()
            rows[path, table] = _row(row, exact)
        return rows[path, table]

    return proposal


def distance(a: Law, b: Law) -> Number:
    """Total variation of two laws over blocks."""
    return _sum(_difference(a.get(block, NONE), b.get(block, NONE)) for block in a.keys() | b.keys()) / 2


def expected_length(law: Law) -> Number:
    """Mean number of tokens emitted."""
    return _sum(len(block) * mass for block, mass in law.items())


def _prefixes(law: Law, height: int) -> dict[Path, dict[int, Number]]:
    """For each emitted prefix shorter than `height`: the mass of the blocks that continue it, by their next token."""
    next_masses: dict[Path, dict[int, Number]] = {(): {}}
    for block, mass in law.items():
        for length, token in enumerate(block[:height]):
            masses = next_masses.setdefault(block[:length], {})
            masses[token] = masses.get(token, NONE) + mass
    return next_masses


def total_variation(law: Law, continuation: Callable[[Path], Row], height: int) -> Number:
    """The distance of `law`, completed, from the target's own law of `height` tokens.

    Completed: a block shorter than `height` continues as the target does, so that P(x) is the sum over j of P(the block
    is x_1..j) * prod_{i > j} p(x_i | x_<i); lossless means P = prod p. Below a prefix that no block continues, both
    laws continue by p, so the differences below the prefix sum to the difference at the prefix, and only emitted
    prefixes need be visited. A longer block counts by its first `height` tokens.

    Args:
        law: The law of blocks, none of them empty.
        continuation: The target's law after a path.
        height: Number of tokens compared; the length of the longest block, for the whole claim.
    """
    masses: Law = {}
    for block, mass in law.items():
        # A longer block counts by its first `height` tokens.
        _add(masses, block[:height], mass)
    next_masses = _prefixes(law, height)

    def below(path: Path, completed_mass: Number, target_mass: Number) -> Number:
        """Sum of |P - prod p| over the sequences that begin with `path`, whose own masses are given."""
        # No block continues this prefix: see the docstring.
        if path not in next_masses:
            return _difference(completed_mass, target_mass)
        p = continuation(path)
        unseen_mass = _sum(value for token, value in enumerate(p) if token not in next_masses[path])
        seen_difference = _sum(
            below((*path, token), completed_mass * p[token] + masses.get((*path, token), NONE), target_mass * p[token])
            for token in next_masses[path]
        )
        return seen_difference + _difference(completed_mass, target_mass) * unseen_mass

    return below((), 0, 1) / 2


@dataclass(frozen=True)
class Bias:
    """The law of the token after one emitted prefix, beside the target's.

    Attributes:
        context: The prefix, tokens below the root.
        reach: Probability that a block continues the prefix.
        law: The law of the next token, given that the block continues.
        target: The target's law of that token.
    """

    context: Path
    reach: Number
    law: list[Number]
    target: list[Number]

    @property
    def total_variation(self) -> Number:
        """The total variation between `law` and `target`."""
        return _sum(_difference(a, b) for a, b in zip(self.law, self.target, strict=True)) / 2

    @property
    def weight(self) -> Number:
        """The total variation times the reach: the contribution of this prefix."""
        return self.reach * self.total_variation


def sorted_biases(law: Law, continuation: Callable[[Path], Row], height: int) -> list[Bias]:
    """The bias after every emitted prefix shorter than `height`, the worst first; lossless iff none has weight.

    For a lossless rule the token after an emitted prefix, given that the block continues, has the target's law: no
    correction for the length is needed (by induction on the completed law).
    """
    return sorted(_biases(law, continuation, height), key=lambda bias: (-bias.weight, bias.context))


def _biases(law: Law, continuation: Callable[[Path], Row], height: int) -> Iterator[Bias]:
    for context, masses in _prefixes(law, height).items():
        p = list(continuation(context))
        reach = _sum(masses.values())
        if reach > 0:
            yield Bias(context, reach, [masses.get(token, NONE) / reach for token in range(len(p))], p)
