"""Invariants of the coins: each random decision follows its own coin on the tape.

A coin is a uniform number in [0, 1). The tape gives each draw and each acceptance test of a step a coin of its own
(`reference/tape.py`). With the tape given, sampling is deterministic, so accepted path, bonus and drafted tokens are
compared exactly. No coin may decide twice, and a coin that decided nothing may not change the run.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from specverify.properties.invariants.applies import is_drawn, is_sampled
from specverify.properties.invariants.own_laws import EDGE, is_law_near_edge, law_tolerance, output_before
from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.invariant import TURNS, Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from specverify.properties.verdict.subject import Subject
from specverify.reference import tape
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.oracle import acceptance, processing, tree_growth
from specverify.reference.oracle.coin_source import TapeChance
from specverify.reference.oracle.draft.level_by_level import tree_of_step
from specverify.reference.oracle.sampled_step import one_hot
from specverify.reference.rules import RULES
from specverify.reference.trace import Array, Stage, Step
from specverify.reference.tree import Tree

NEEDS = needing(Stage.DRAFTED, Stage.SCORED, Stage.ACCEPTED)

UNUSED_TRIES = 2
"""Number of further runs of a case, each on a tape that keeps the used coins and replaces all others."""


def walk(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Each step accepts the path and emits the bonus that its rule gives for the tape's coins.

    The rule is evaluated on the laws and proposals that the step itself reveals, so that wrong logits or a wrong draft
    do not fail this check.
    """
    if not subject.takes_tape:
        raise Unobserved("the backend takes no tape")
    steps = judgeable_steps(case, subject)
    if not steps:
        raise Unobserved("the backend does not reveal laws and proposals")
    for number, inputs in steps:
        step = subject(case).steps[number]
        assert step.accepted is not None
        tree, target, proposal = inputs
        chance = _coins(case, number)
        if not _are_laws(target) or not _are_laws(proposal[1:]):
            raise NotApplicable("a row is no law; lossless.processors-per-node and proposal-consistent say so")
        sampling = case.sampling
        path, weights = acceptance.verify(
            chance, sampling.rule, sampling.draws, tree, target.tolist(), proposal.tolist(), is_drawn(case)
        )
        bonus = chance.choose("bonus", 0, weights)
        # A coin may lie so near to a threshold that the engine's rounding decides; such a step proves nothing. Nor does
        # one in which a rule without coins compares the likelihoods of two paths of the same tokens.
        clear = chance.margin >= EDGE[case.dtype] and not is_path_of_twins(case, tree, path, step.accepted.path)
        yield Comparisons(len(path) + 1 if clear else 0)
        if not clear:
            continue
        if (path, bonus) != (step.accepted.path, step.accepted.bonus):
            side = "path" if path != step.accepted.path else "bonus"
            expected, observed = (path, step.accepted.path) if side == "path" else (bonus, step.accepted.bonus)
            where: dict[str, int | str] = {"side": side, "node": path[-1]}
            yield Finding("acceptance.sampled-walk", Stage.ACCEPTED, number, where, expected, observed)
            return


def is_path_of_twins(case: Case, tree: Tree, path: tuple[int, ...], other_path: tuple[int, ...]) -> bool:
    """Whether a rule without coins takes one of two paths of the same tokens, which rounding alone tells apart."""
    if RULES[case.sampling.rule.name].takes_coins or path == other_path or len(path) != len(other_path):
        return False
    in_tree = all(0 <= node < len(tree) for node in other_path)
    return in_tree and [tree.token[node] for node in path] == [tree.token[node] for node in other_path]


def _are_laws(rows: Array) -> bool:
    """Whether every row is finite, has no negative entry, and has mass to draw from."""
    return bool(np.isfinite(rows).all() and (rows >= 0).all() and (rows.sum(-1) > 0).all())


def acceptance_inputs(step: Step) -> tuple[Tree, Array, Array] | None:
    """The tree of a step, and its target laws and proposals [nodes, vocabulary]; None if the step hides one of them."""
    if step.drafted is None or step.scored is None or step.accepted is None:
        return None
    if step.scored.law is None or step.drafted.proposal is None:
        return None
    if step.drafted.proposal.shape != step.scored.law.shape:
        return None  # proposal-consistent says so
    return step.drafted.tree, step.scored.law.astype(np.float64), step.drafted.proposal.astype(np.float64)


def judgeable_steps(case: Case, subject: Subject) -> list[tuple[int, tuple[Tree, Array, Array]]]:
    """The number and the acceptance inputs of each step that shows them.

    Without those where what a rejection leaves is rounding, under a rule that may reject there.

    Raises:
        NotApplicable: that is so in all steps.
    """
    inputs = [acceptance_inputs(step) for step in subject(case).steps]
    shown_steps = [(number, step_inputs) for number, step_inputs in enumerate(inputs) if step_inputs is not None]
    if not case.sampling.rule.promise.rejects_equal_laws:
        return shown_steps
    steps = [(number, step_inputs) for number, step_inputs in shown_steps if not _has_equal_laws(*step_inputs)]
    if shown_steps and not steps:
        raise NotApplicable("target and draft have one law: a rejection leaves what rounding makes of 0")
    return steps


LEAST_RESIDUAL = 1e-6
"""The least mass of a residual that tells more than the roundings of its two laws."""


def _has_equal_laws(tree: Tree, target: Array, proposal: Array) -> bool:
    """Whether the target's law at a node and the law of one of its children leave less than LEAST_RESIDUAL."""
    children = range(1, len(tree))
    return any(np.maximum(target[tree.parent[node]] - proposal[node], 0).sum() < LEAST_RESIDUAL for node in children)


def _coins(case: Case, number: int) -> TapeChance:
    """The coins of step `number`, as the working dtype holds them."""
    coins = tape.coins(case.sampling, number, case.most_nodes)
    # A tape that a case spells out may hold finer coins than an engine in 32 or 16 bits can represent.
    if case.dtype != "float64":
        coins = np.floor(coins / tape.RESOLUTION) * tape.RESOLUTION
    return TapeChance(coins, case.most_nodes)


def proposal_consistent(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """The proposal of each node is the law that its token was drawn from; it is one-hot for a token not drawn."""
    name = "acceptance.proposal-consistent"
    is_revealed = False
    for number, step in enumerate(subject(case).steps):
        if step.drafted is None or step.drafted.proposal is None:
            continue
        is_revealed = True
        tree, proposal = step.drafted.tree, step.drafted.proposal
        size = len(tree), case.model.vocab_size
        if proposal.shape != size:
            yield Finding(name, Stage.DRAFTED, number, {"side": "shape"}, str(size), str(proposal.shape))
            return
        expected_laws = one_hot(tree.token, proposal.shape[1])
        edges = [False] * len(tree)
        if is_drawn(case):
            if step.drafted.logits is None:
                raise Unobserved("the backend does not reveal its draft's logits")
            expected_laws, edges = _expected_proposals(case, step)
        yield Comparisons(len(tree) - 1)
        for node in range(1, len(tree)):
            distances = np.abs(expected_laws[node] - proposal[node])
            token = int(np.where(np.isnan(distances), np.inf, distances).argmax())
            # `not <=`, since a NaN in the proposal must fail the comparison.
            if not edges[node] and not distances[token] <= law_tolerance(case):
                where: dict[str, int | str] = {"node": node, "token": token}
                expected, observed = float(expected_laws[node, token]), float(proposal[node, token])
                measure = float(distances[token] / law_tolerance(case))
                yield Finding(name, Stage.DRAFTED, number, where, expected, observed, measure)
                return
        if is_drawn(case) and subject.takes_tape:
            for node, (expected_token, margin) in _draw_again(case, number, step).items():
                if margin >= EDGE[case.dtype] and expected_token != tree.token[node]:
                    where = {"node": node, "side": "token"}
                    yield Finding(name, Stage.DRAFTED, number, where, expected_token, tree.token[node])
                    return
    if not is_revealed:
        raise Unobserved("the backend does not reveal its proposals")


def _expected_proposals(case: Case, step: Step) -> tuple[Array, list[bool]]:
    """The law that each node's token should be drawn from [nodes, vocabulary], by definition from the draft's logits.

    With it, for each node whether its own proposal is another that rounding may make of its parent's row, which then
    lies near an edge (`is_law_near_edge`).
    """
    assert step.drafted is not None
    assert step.drafted.logits is not None
    assert step.drafted.proposal is not None
    tree = step.drafted.tree
    output = output_before(case, step)
    token_ids = np.array(case.draft.vocabulary or range(case.model.vocab_size))
    laws = np.full(step.drafted.proposal.shape, 1.0 / case.model.vocab_size)
    edges = [False] * len(tree)
    for node in range(len(tree)):
        if not tree.children[node]:
            continue
        spread = np.full(case.model.vocab_size, -np.inf)
        spread[token_ids] = step.drafted.logits[node]
        path = tree.tokens_to(node)[1:]
        row = processing.law(spread, case.sampling, case.stops, case.prompt, output + path)
        for rank, child in enumerate(tree.children[node]):
            earlier_tokens = {tree.token[sibling] for sibling in tree.children[node][:rank]}
            # Without replacement, a child is drawn from the row without the tokens of its earlier siblings.
            mass_left = sum(row[token] for token in range(len(row)) if token not in earlier_tokens)
            # Where the earlier siblings used up all mass, the draft names the best remaining token with certainty.
            spent = case.sampling.draws == "without-replacement" and not mass_left > 0
            laws[child] = one_hot((tree.token[child],), len(row))[0] if spent else row
            observed = step.drafted.proposal[child].astype(np.float64)
            edges[child] = not spent and is_law_near_edge(case, spread, path, output, observed)
    return laws, edges


def _draw_again(case: Case, number: int, step: Step) -> dict[int, tuple[int, float]]:
    """For each node that a coin drew: the token that its coin draws from the proposal, and the coin's margin."""
    assert step.drafted is not None
    assert step.drafted.proposal is not None
    tree = step.drafted.tree
    proposals = step.drafted.proposal.astype(np.float64)
    drawn_tokens = {}
    uncut_numbers = _uncut_numbers(case, number, step)
    for node in range(len(tree)):
        for rank, child in enumerate(tree.children[node]):
            earlier_tokens = {tree.token[sibling] for sibling in tree.children[node][:rank]}
            row = proposals[child].tolist()
            remaining = (
                acceptance.without_tokens(row, earlier_tokens) if case.sampling.draws == "without-replacement" else row
            )
            if (
                not np.isfinite(np.array(remaining, dtype=np.float64)).all()
                or max(remaining) >= 1.0
                or not any(remaining)
            ):
                continue  # certain, or a law that the comparison above has already refused
            chance = _coins(case, number)
            place = uncut_numbers[child]
            drawn_tokens[child] = (
                tree_growth.siblings(chance, "with-replacement", [remaining], [place])[place],
                chance.margin,
            )
    return drawn_tokens


def _uncut_numbers(case: Case, number: int, step: Step) -> list[int]:
    """For each node of the tree, its number in the draft's own shape.

    A tree may be cut at the end of an attention chunk, or where the draft's confidence ends a path, and the cut
    renumbers its nodes. Coins were drawn before that, by the numbers of the uncut shape. A tree that was cut in any
    other way keeps its own numbers here, and draft.fidelity or draft.stops reports it.
    """
    assert step.drafted is not None
    if case.draft.stopped is not None:
        tree = step.drafted.tree
        return list(case.draft.stopped.rows_in_tree(tree.children) or range(len(tree)))
    table = case.draft.dispatch
    shape = case.draft.shapes[0] if table is None else tree_of_step(table, number)
    count = len(step.drafted.tree)
    root = len(step.context)
    arch = case.model.architecture if isinstance(case.model, Seeded) else None
    chunks = [chunk for _, chunk in arch.reaches if chunk] if arch is not None else []
    if len(shape) == count or not chunks:
        return list(range(count))
    # First position after the attention chunk of the root: nodes from there on were cut off.
    end = root - root % min(chunks) + min(chunks)
    kept_nodes = [node for node in range(len(shape)) if root + shape.depth[node] < end]
    return kept_nodes if len(kept_nodes) == count else list(range(count))


def coins_once(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """No coin decides twice, and the run stays the same whatever values the unused coins have."""
    trace = subject(case)
    name = "acceptance.coins-once"
    used_coins: set[int] = set()
    # Places of coins repeat from step to step; over the whole tape, step n begins at n times the stride.
    stride = tape.stride(case.most_nodes)
    for number, step in enumerate(trace.steps):
        if step.accepted is None or step.accepted.coins is None:
            raise Unobserved("the backend does not reveal which coins it used")
        # Places of the used coins within this step's part of the tape.
        coins = step.accepted.coins
        repeated_place = next((place for index, place in enumerate(coins) if place in coins[:index]), None)
        if repeated_place is not None:
            where: dict[str, int | str] = {"coin": repeated_place}
            yield Finding(name, Stage.ACCEPTED, number, where, "one decision", "another by the same coin")
            return
        yield Comparisons(len(coins))
        used_coins |= {number * stride + place for place in coins}
    if not subject.takes_tape or not trace.steps:
        return
    tape_coins = np.concatenate(
        [tape.coins(case.sampling, number, case.most_nodes) for number in range(len(trace.steps))]
    )
    if len(used_coins) == len(tape_coins):
        return
    for turn in range(UNUSED_TRIES):
        yield Comparisons(len(trace.output))
        # Multiples of the resolution, as seeded coins are: float32 and float64 engines read the same value.
        new_coins = (
            np.floor(np.random.default_rng([int(case.id, 16), turn]).random(len(tape_coins)) * 2**24) * tape.RESOLUTION
        )
        new_coins[sorted(used_coins)] = tape_coins[sorted(used_coins)]
        rerun = subject(replace(case, sampling=replace(case.sampling, tape=tuple(new_coins.tolist()))))
        if rerun.output != trace.output:
            where = {"coin": "unused", "side": "output"}
            yield Finding(name, Stage.ACCEPTED, 0, where, trace.output, rerun.output)
            return


INVARIANTS = (
    Invariant(
        "acceptance.sampled-walk",
        "By the tape's coins, a step accepts and emits what its rule does with the step's own laws and proposals.",
        NEEDS,
        walk,
        is_sampled,
    ),
    Invariant(
        "acceptance.coins-once",
        "No coin decides twice, and a coin that decided nothing changes nothing.",
        needing(Stage.ACCEPTED),
        coins_once,
        is_sampled,
        every=TURNS,
    ),
    Invariant(
        "acceptance.proposal-consistent",
        "What the verifier is told of a drafted token is the law it was drawn from.",
        needing(Stage.DRAFTED),
        proposal_consistent,
        is_sampled,
    ),
)
