"""Invariants of the accepted path: a path of the tree, greedy walk, support, variants of the tree.

The greedy walk is recomputed from the backend's own logits, so that no tolerance is needed. The variants (more nodes,
the accepted path as a chain, renamed tokens) run the backend again and compare the two runs.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from specverify.properties.invariants.applies import is_greedy
from specverify.properties.invariants.own_laws import are_decided, laws, node_scores, stretched
from specverify.properties.invariants.rows import compare_rows
from specverify.properties.tolerance.closeness import Noise, chain, noise
from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.invariant import TURNS, Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from specverify.properties.verdict.shown_tree import names_tokens, shown_tree, step_showing
from specverify.properties.verdict.subject import Subject
from specverify.properties.verdict.variants import dice, focus, run_first_step, tree_of, with_new_ids, with_tree
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.oracle.acceptance import greedy_walk
from specverify.reference.oracle.processing import scores
from specverify.reference.trace import Accepted, Array, Stage, Step
from specverify.reference.tree import Tree

NEEDS = needing(Stage.DRAFTED, Stage.SCORED, Stage.ACCEPTED)


def greedy(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Accepted path and bonus are those of the greedy definition on the backend's own logits, without tolerance.

    Where a step shows no tree, the bonus alone is compared, and the statement as a whole is unobserved.
    """
    hidden = False
    for number, step in enumerate(subject(case).steps):
        if step.scored is None or step.accepted is None:
            continue
        tree = shown_tree(step)
        if tree is None or not names_tokens(step) or len(tree) != len(step.scored.logits):
            hidden = True
            yield from _bonus_alone(case, number, step)
            continue
        expected_walk = greedy_walk(tree, processed_scores(case, step_showing(step, tree)))
        yield Comparisons(len(expected_walk.path) + 1)
        if expected_walk.path != step.accepted.path:
            yield Finding(
                "acceptance.greedy-walk",
                Stage.ACCEPTED,
                number,
                {"side": "path"},
                expected_walk.path,
                step.accepted.path,
            )
        elif expected_walk.bonus != step.accepted.bonus:
            where: dict[str, int | str] = {"side": "bonus", "node": expected_walk.path[-1]}
            yield Finding(
                "acceptance.greedy-walk", Stage.ACCEPTED, number, where, expected_walk.bonus, step.accepted.bonus
            )
    if hidden:
        raise Unobserved("the backend does not reveal its trees")


def _bonus_alone(case: Case, number: int, step: Step) -> Iterator[Fact]:
    """A finding where the bonus is not the arg-max at the last accepted node, whatever tree the nodes are of."""
    assert step.scored is not None
    assert step.accepted is not None
    node = step.accepted.path[-1]
    if case.sampling.processes or node >= len(step.scored.logits):
        return  # processing reads the tokens of the path
    expected_bonus = greedy_walk(Tree((0,), (0,)), step.scored.logits[node : node + 1]).bonus
    yield Comparisons()
    if expected_bonus != step.accepted.bonus:
        where: dict[str, int | str] = {"side": "bonus", "node": node}
        yield Finding("acceptance.greedy-walk", Stage.ACCEPTED, number, where, expected_bonus, step.accepted.bonus)


def processed_scores(case: Case, step: Step) -> Array:
    """The scores that greedy decoding compares at each node of `step`: the backend's logits after processing."""
    assert step.scored is not None
    assert step.drafted is not None
    if not case.sampling.processes:
        return step.scored.logits
    tree = step.drafted.tree
    output = (*step.context, step.drafted.tree.token[0])[len(case.prompt) :]
    rows = [
        scores(row, case.sampling, case.stops, case.prompt, output + tree.tokens_to(node)[1:])
        for node, row in enumerate(step.scored.logits)
    ]
    return np.stack(rows)


def support(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Every emitted token has probability above 0 at the node before it; in a greedy case it is an arg-max there."""
    for number, step in enumerate(subject(case).steps):
        if step.scored is None or step.accepted is None or step.emitted is None or step.drafted is None:
            continue
        rows = processed_scores(case, step) if case.sampling.greedy else laws(case, step)
        for position, token in enumerate(step.emitted.tokens):
            if position >= len(step.accepted.path):
                where: dict[str, int | str] = {"position": position, "side": "length"}
                expected = f"at most {len(step.accepted.path)} tokens"
                yield Finding("acceptance.support", Stage.EMITTED, number, where, expected, len(step.emitted.tokens))
                break
            node = step.accepted.path[position]
            yield Comparisons()
            if not 0 <= token < rows.shape[1] or not _is_possible(case, rows[node], token):
                best = int(rows[node].argmax())
                # The stage tells apart a wrong choice of the walk and a wrong token in the emission.
                stage = Stage.ACCEPTED if _is_from_walk(step, position, token) else Stage.EMITTED
                yield Finding("acceptance.support", stage, number, {"node": node, "position": position}, best, token)


def _is_possible(case: Case, row: Array, token: int) -> bool:
    """Whether `token` may follow: in a greedy case an arg-max of `row`, in a sampled one a token with mass in `row`."""
    return bool(row[token] == row.max() if case.sampling.greedy else row[token] > 0)


def _is_from_walk(step: Step, position: int, token: int) -> bool:
    """Whether the accepted block already holds `token` at place `position`, so that emission only passed it on."""
    assert step.accepted is not None
    assert step.drafted is not None
    block = [*(step.drafted.tree.token[node] for node in step.accepted.path[1:]), step.accepted.bonus]
    return position < len(block) and block[position] == token


def _clear_step(step_case: Case, subject: Subject, sigma: float) -> Step:
    """The single step of `step_case`.

    Raises:
        Unobserved: The backend reveals neither logits nor acceptance.
        NotApplicable: A row of the accepted path is a near-tie, which a forward of another shape may decide otherwise.
    """
    step = run_first_step(step_case, subject)
    if step.scored is None or step.accepted is None:
        raise Unobserved("the backend reveals neither logits nor acceptance")
    if not are_decided(step_case, step, step.accepted.path, sigma):
        raise NotApplicable("a near-tie on the accepted path")
    return step


def _check_choices(
    case: Case, error: Noise, step: Step, variant_step: Step, rows: list[int], variant_rows: list[int]
) -> None:
    """Raise NotApplicable where rows of the two runs made other choices, and may accept other tokens for that."""
    if variant_step.scored is None:
        return
    scores_of, sigma = node_scores(case, step), stretched(case, error.logits)
    if not error.chooses_alike(step, variant_step, rows, variant_rows, scores_of, sigma):
        raise NotApplicable("tied experts or columns decide a token of the accepted path")


def superset_accepts_no_less(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Two more nodes in the tree: the accepted path keeps its nodes and grows.

    One new node holds the bonus token under the last accepted node, so that the walk must accept it.
    """
    step_case = focus(case, subject)
    error = noise(case, oracle, subject)
    step = _clear_step(step_case, subject, error.logits)
    assert step.accepted is not None
    tree = tree_of(step_case)
    path = step.accepted.path
    bonus = step.accepted.bonus
    rng = dice(step_case, "superset")
    # The first new node hangs anywhere, with any token but the bonus, and comes before the node with the bonus.
    parent = int(rng.integers(len(tree)))
    wrong_token = int((bonus + 1 + rng.integers(max(1, case.model.vocab_size - 1))) % case.model.vocab_size)
    larger = Tree((*tree.parent, parent, path[-1]), (*tree.token, wrong_token, bonus))
    larger_step = run_first_step(with_tree(step_case, larger), subject)
    if larger_step.accepted is None:
        raise Unobserved("the backend does not reveal what it accepted of the larger tree")
    _check_choices(step_case, error, step, larger_step, list(path), list(path))
    yield Comparisons(len(path) + 1)
    if larger_step.accepted.path[: len(path)] != path or len(larger_step.accepted.path) <= len(path):
        yield Finding(
            "acceptance.superset-accepts-no-less",
            Stage.ACCEPTED,
            0,
            {"variant": f"with nodes {len(tree)} (token {wrong_token}) and {len(tree) + 1} (token {bonus})"},
            (*path, len(tree) + 1),
            larger_step.accepted.path,
        )


def chain_degenerate(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """The accepted path as a chain, committed by length, gives the same numbers (by rule D), tokens and commit."""
    step_case = focus(case, subject)
    error = noise(case, oracle, subject)
    step = _clear_step(step_case, subject, error.logits)
    assert step.accepted is not None
    tree = tree_of(step_case)
    path = step.accepted.path
    # One rejected child, where there is one, so that the chain too has a node to reject.
    deeper = tree.children[path[-1]][:1]
    line = chain(tuple(tree.token[node] for node in (*path, *deeper)))
    chain_case = with_tree(step_case, line)
    # A chain's accepted nodes are its first rows, so that cropping to a length commits them.
    chain_case = replace(chain_case, layout=replace(chain_case.layout, commit="length"))
    if chain_case == step_case:
        raise NotApplicable("the tree is a chain already, and committed by length")
    chain_step = run_first_step(chain_case, subject)
    name = "acceptance.chain-degenerate"
    variant = f"the chain of nodes {[*path, *deeper]}"
    if chain_step.accepted is None or chain_step.emitted is None or step.emitted is None:
        raise Unobserved("the backend reveals neither acceptance nor emission")
    _check_choices(step_case, error, step, chain_step, list(path), list(range(len(path))))
    yield Comparisons(len(path) + 1)
    if (len(chain_step.accepted.path), chain_step.accepted.bonus) != (len(path), step.accepted.bonus):
        observed = (len(chain_step.accepted.path) - 1, chain_step.accepted.bonus)
        expected = (len(path) - 1, step.accepted.bonus)
        yield Finding(name, Stage.ACCEPTED, 0, {"variant": variant, "side": "accepted and bonus"}, expected, observed)
    elif chain_step.committed is not None and chain_step.committed.fallback is not None:
        where: dict[str, int | str] = {"variant": variant, "side": "fallback"}
        yield Finding(name, Stage.COMMITTED, 0, where, "committed by length", chain_step.committed.fallback)
    else:
        rows = [*path, *deeper]
        yield from compare_rows(name, step, chain_step, rows, list(range(len(rows))), error, variant)


def vocabulary_permutation(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """After renaming every token id, the same nodes are accepted and the output is the renamed output."""
    renamed_case, new_ids = with_new_ids(case)
    trace, renamed_trace = subject(case), subject(renamed_case)
    sigma = noise(case, oracle, subject).logits
    for number, (step, twin) in enumerate(zip(trace.steps, renamed_trace.steps, strict=False)):
        if step.scored is None or step.accepted is None or step.drafted is None:
            continue
        if twin.accepted is None or twin.drafted is None:
            raise Unobserved("the backend reveals neither tree nor acceptance of the renamed case")
        if not are_decided(case, step, step.accepted.path, sigma):
            raise NotApplicable("a near-tie on the accepted path")
        if twin.drafted.tree.parent != step.drafted.tree.parent:
            raise NotApplicable("the draft gave the renamed case a tree of another shape")
        if tuple(new_ids[token] for token in step.drafted.tree.token) != twin.drafted.tree.token:
            if _draft_is_near_tie(step.drafted.logits):
                raise NotApplicable("two of the draft's scores are nearly equal")
            if subject.abilities is not None and not subject.abilities.drafts:
                raise NotApplicable("the engine drafts in its own way, which may depend on the ids of tokens")
            expected_tokens = tuple(new_ids[token] for token in step.drafted.tree.token)
            yield Finding(
                "acceptance.vocabulary-permutation",
                Stage.DRAFTED,
                number,
                {"side": "tree"},
                expected_tokens,
                twin.drafted.tree.token,
            )
            return
        yield Comparisons(len(step.accepted.path) + 1)
        expected_pair = (step.accepted.path, new_ids[step.accepted.bonus])
        if (twin.accepted.path, twin.accepted.bonus) != expected_pair:
            observed_pair = (twin.accepted.path, twin.accepted.bonus)
            where: dict[str, int | str] = {"side": "path and bonus"}
            yield Finding(
                "acceptance.vocabulary-permutation", Stage.ACCEPTED, number, where, expected_pair, observed_pair
            )
            return
    yield Comparisons(len(trace.output))
    expected_output = tuple(new_ids[token] for token in trace.output)
    if renamed_trace.output != expected_output:
        last = max(len(trace.steps) - 1, 0)
        where = {"side": "output"}
        yield Finding(
            "acceptance.vocabulary-permutation", Stage.EMITTED, last, where, expected_output, renamed_trace.output
        )


def _draft_is_near_tie(logits: Array | None) -> bool:
    """Whether two draft logits of a node lie within float32 noise, so that their order may differ between runs."""
    if logits is None:
        return False
    # Rows of leaves are NaN, since the draft never ranked children there.
    rows = np.sort(logits[~np.isnan(logits).any(axis=1)], axis=1)
    scale = float(np.abs(rows).max(initial=1.0))
    return bool((np.diff(rows, axis=1) < 1e-4 * scale).any())


def _relabels(case: Case) -> bool:
    if not case.sampling.greedy or case.sampling.processors:
        return False
    models = (case.model, case.draft.model or case.model)
    return all(isinstance(model, Seeded) and not model.relabel for model in models)


PATH = "acceptance.path-in-tree"


def path_in_tree(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Accepted nodes lead from the root downwards, and a step emits their tokens and the bonus.

    Where a stop cuts the block is judged by `lossless.stops`.
    """
    hidden = False
    for number, step in enumerate(subject(case).steps):
        if step.accepted is None:
            continue
        tree = shown_tree(step)
        if tree is None:
            hidden = True
            continue
        yield Comparisons(len(step.accepted.path))
        stray = _stray(number, tree, step.accepted)
        if stray is not None:
            yield stray
            continue
        if step.emitted is None or not names_tokens(step):
            continue
        block = (*(tree.token[node] for node in step.accepted.path[1:]), step.accepted.bonus)
        tokens = step.emitted.tokens
        yield Comparisons(len(tokens))
        if tokens != block[: len(tokens)]:
            yield Finding(PATH, Stage.EMITTED, number, {"side": "tokens"}, block, tokens)
    if hidden:
        raise Unobserved("the backend does not reveal its trees")


def _stray(number: int, tree: Tree, accepted: Accepted) -> Finding | None:
    """The finding at the first accepted node that is no child of the node accepted before it."""
    above: int | None = None
    for node in accepted.path:
        where: dict[str, int | str] = {"node": node, "side": "path"}
        if above is None:
            if node != 0:
                return Finding(PATH, Stage.ACCEPTED, number, where, "the root", f"node {node}")
        elif not 0 < node < len(tree) or tree.parent[node] != above:
            inside = 0 < node < len(tree)
            observed = "the root" if node == 0 else "no node"
            if inside:
                observed = f"a child of node {tree.parent[node]}"
            return Finding(PATH, Stage.ACCEPTED, number, where, f"a child of node {above}", observed)
        above = node
    return None


INVARIANTS = (
    Invariant(
        "acceptance.greedy-walk",
        "The accepted path and bonus are what greedy acceptance gives on the backend's own logits.",
        needing(Stage.SCORED, Stage.ACCEPTED),
        greedy,
        is_greedy,
    ),
    Invariant(
        "acceptance.support",
        "No emitted token has probability 0 at the node it follows.",
        needing(Stage.DRAFTED, Stage.SCORED, Stage.ACCEPTED, Stage.EMITTED),
        support,
    ),
    Invariant(
        "acceptance.superset-accepts-no-less",
        "A tree with more nodes accepts at least what the smaller one did.",
        NEEDS,
        superset_accepts_no_less,
        is_greedy,
        every=TURNS,
    ),
    Invariant(
        "acceptance.chain-degenerate",
        "A tree of branching 1 does what a chain does: same tokens, committed by length.",
        NEEDS,
        chain_degenerate,
        is_greedy,
        every=TURNS,
    ),
    Invariant(
        "acceptance.vocabulary-permutation",
        "Renaming every token id renames the output and changes nothing else.",
        NEEDS,
        vocabulary_permutation,
        _relabels,
        every=TURNS,
    ),
    Invariant(
        PATH,
        "Each accepted node is a child of the one before it, and the step emits their tokens and the bonus.",
        needing(Stage.ACCEPTED),
        path_in_tree,
    ),
)
