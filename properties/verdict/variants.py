"""Variants of a case for metamorphic invariants.

`focus` makes a one-step case of the largest tree; the functions after it read such a case or change its rows, tree or
tokens. `with_new_ids` renames the tokens of any case.
"""

from dataclasses import replace

import numpy as np

from specverify.properties.verdict.invariant import NotApplicable, Unobserved
from specverify.properties.verdict.subject import Crash, NoTrace, Subject
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.sampling import Stops
from specverify.reference.trace import Step, Trace
from specverify.reference.tree import Tree
from specverify.reference.weights import permutation, probe_architecture


def focus(case: Case, subject: Subject) -> Case:
    """The step of `case` with the largest tree, as a case of its own.

    The tree is scripted and the context is prefilled in one forward.
    """
    steps = [step for step in subject(case).steps if step.drafted is not None]
    if not steps:
        raise Unobserved("the backend does not reveal its trees")
    largest = max(steps, key=lambda step: len(step.drafted.tree) if step.drafted else 0)
    assert largest.drafted is not None
    unchunked = replace(case, layout=replace(case.layout, prefill_chunk=0))
    return unchunked.rebased(largest.context, largest.drafted.tree)


def tree_of(case: Case) -> Tree:
    """The scripted tree of a one-step case."""
    assert case.draft.trees is not None
    return case.draft.trees[0]


def with_tree(case: Case, tree: Tree) -> Case:
    """`case` proposing `tree` instead of its own tree, with room to emit a whole path."""
    return case.rebased(case.prefix, tree)


def run_first_step(case: Case, subject: Subject, extends: bool = False) -> Step:
    """The first step of the backend's run of a variant, as `first_step` gives it; see `Subject.run_variant`."""
    return first_step(subject.run_variant(case, extends))


def first_step(trace: Trace) -> Step:
    """The first step of the run of a variant.

    Raises:
        NoTrace: The run ended before its first step, which is a break of that run.
        Unobserved: The run emitted tokens and shows no step.
    """
    if trace.steps:
        return trace.steps[0]
    if trace.output:
        raise Unobserved("the backend does not reveal its steps")
    raise NoTrace(Crash(None, "a run that took no step"))


def pending_root(case: Case, subject: Subject, number: int) -> int:
    """The token that must be the root of step `number`: the prompt's last token, or the last token emitted before.

    Raises:
        Unobserved: The step before does not reveal the tokens that it emitted.
    """
    if number == 0:
        return case.prompt[-1]
    emitted = subject(case).steps[number - 1].emitted
    if emitted is None:
        raise Unobserved("the backend does not reveal what each step emitted")
    return emitted.tokens[-1] if emitted.tokens else case.prompt[-1]


def dice(case: Case, salt: str) -> np.random.Generator:
    """Random choices that depend on the case and `salt` alone, so that a replay makes the same choices."""
    return np.random.default_rng([int(case.id, 16), sum(salt.encode())])


def shuffled_order(case: Case) -> tuple[int, ...]:
    """A row order of the case's tree, root first, other than the tree's own order."""
    tree = tree_of(case)
    if len(tree) < 3:
        raise NotApplicable("fewer than two nodes under the root have one order only")
    order = (0, *(1 + dice(case, "order").permutation(len(tree) - 1)).tolist())
    # The permutation may be the identity: then the rows are reversed.
    return order if order != tuple(range(len(tree))) else (0, *range(len(tree) - 1, 0, -1))


def without_subtree(case: Case) -> tuple[Case, tuple[int, ...]]:
    """The case without one subtree, and the nodes that stayed, by their numbers in the full tree."""
    tree = tree_of(case)
    if len(tree) < 2:
        raise NotApplicable("the bare root has no subtree to remove")
    root = int(dice(case, "prune").integers(1, len(tree)))
    kept_nodes = tuple(node for node in range(len(tree)) if root not in tree.path(node))
    row = {node: index for index, node in enumerate(kept_nodes)}
    smaller = Tree(tuple(row[tree.parent[node]] for node in kept_nodes), tuple(tree.token[node] for node in kept_nodes))
    return with_tree(case, smaller), kept_nodes


RENAMINGS = 8
"""Number of permutations of a vocabulary that cases use."""


def with_new_ids(case: Case) -> tuple[Case, tuple[int, ...]]:
    """The case with every token id renamed, in the models and everywhere else, and the new id of each old id.

    Raises:
        NotApplicable: The vocabulary has one token, or the draft's rule depends on ids.
    """
    assert isinstance(case.model, Seeded)
    if case.model.vocab_size < 2:
        raise NotApplicable("a vocabulary of one token has one naming")
    # The seed depends on the root token and not on the case's digest, so that the renaming stays while a failing case
    # shrinks. Half of the permutations of two tokens are the identity: the next seed that changes a name is taken.
    seed = 1 + case.prompt[-1] % RENAMINGS
    identity = tuple(range(case.model.vocab_size))
    new = identity
    while new == identity:
        new = tuple(int(token) for token in permutation(seed, case.model.vocab_size))
        seed += new == identity

    def rename(tokens: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new[token] for token in tokens)

    draft = case.draft.with_renamed_tokens(rename, seed)
    if draft is None:
        raise NotApplicable("the draft's own rule names tokens by their ids")
    old_stops = case.stops
    pieces = tuple(old_stops.pieces[new.index(token)] for token in range(len(new))) if old_stops.pieces else ()
    stops = replace(old_stops, eos=rename(old_stops.eos), stop_tokens=rename(old_stops.stop_tokens), pieces=pieces)
    sampling = replace(case.sampling, bad_words=tuple(rename(word) for word in case.sampling.bad_words))
    grammar = sampling.grammar
    if grammar is not None:
        words = tuple(grammar.words[new.index(token)] for token in range(len(new)))
        markers = tuple(rename(marker) for marker in grammar.markers)
        sampling = replace(sampling, grammar=replace(grammar, words=words, markers=markers))
    model = replace(case.model, relabel=seed)
    return replace(
        case,
        model=model,
        prompt=rename(case.prompt),
        draft=draft,
        sampling=sampling,
        stops=stops,
    ), new


PROBE_FORWARDS = 4
"""Most forwards for each layer that the transparent probe may take."""


def probes(case: Case, layer: int) -> list[tuple[Case, tuple[int, ...]]]:
    """Cases with transparent weights for a one-step case, each with the KV columns that it probes, in code order.

    Context and tree keep their shape. A probed column holds the token of its code, every other row token 0, which
    embeds to zero; the logits of a node then show which probed columns the node sees in `layer`. One forward probes up
    to PROBE_CODES columns. Where a context is longer, PROBE_FORWARDS forwards probe the tree, the context's ends, the
    columns around the edges of every window and chunk and of the first and the last page, and others drawn by the case.
    """
    assert isinstance(case.model, Seeded)
    tree = tree_of(case)
    context = len(case.prefix)
    rows = context + len(tree)
    architecture = probe_architecture(case.model.architecture)
    model = Seeded(architecture, 0, "transparent", layer)
    nodes = list(range(context, rows))
    window, chunk = architecture.reaches[layer]
    positions = {context + depth for depth in tree.depth}
    edges = [position - window + offset for position in positions for offset in (0, 1, 2)] if window else []
    edges += [position - position % chunk + offset for position in positions for offset in (-1, 0)] if chunk else []
    page = case.layout.page_size
    edges += [boundary + offset for boundary in (page, context - context % page) for offset in (-1, 0)] if page else []
    ends = [column for column in (0, context - 1, *edges) if 0 <= column < context]
    drawn_columns = dice(case, "probe").permutation(context).tolist()
    candidates = list(dict.fromkeys([*nodes, *ends, *drawn_columns]))
    width = architecture.head_dim
    # A rounded value would not say which column it is.
    layout = replace(case.layout, kv_dtype="")
    probe_cases = []
    for begin in range(0, min(len(candidates), PROBE_FORWARDS * width), width):
        columns = tuple(sorted(candidates[begin : begin + width]))
        token = [0] * rows
        for code, column in enumerate(columns):
            token[column] = code + 1
        probe_tree = Tree(tree.parent, tuple(token[context:]))
        prompt = tuple(token[: context + 1])
        probe_cases.append(
            (
                replace(case, model=model, prompt=prompt, draft=Scripted((probe_tree,)), stops=Stops(1), layout=layout),
                columns,
            )
        )
    return probe_cases


def leak_designs(tree: Tree) -> list[frozenset[int]]:
    """Sets of nodes to keep while every other node changes; every pair of nodes is told apart by one of the sets.

    For each node i and each node j that is no ancestor of i, some set holds i and its path but not j. Sets of depth at
    most k tell deeper nodes apart. The rest is done by one set per leaf (its path), or, where that takes fewer runs,
    per level by the binary digits of the nodes' places (a wide star needs 2 log2(leaves) runs).
    """
    depths = [frozenset(node for node in range(len(tree)) if tree.depth[node] <= k) for k in range(tree.height)]
    paths = [frozenset(tree.path(leaf)) for leaf in tree.leaves]
    digits: list[frozenset[int]] = []
    for level in range(1, tree.height + 1):
        at_level = [node for node in range(len(tree)) if tree.depth[node] == level]
        for bit in range((len(at_level) - 1).bit_length()):
            for value in (0, 1):
                bit_nodes = {node for place, node in enumerate(at_level) if place >> bit & 1 == value}
                kept_nodes = {
                    node for node in range(len(tree)) if tree.depth[node] < level or tree.path(node)[level] in bit_nodes
                }
                digits.append(frozenset(kept_nodes))
    best = paths if len(paths) <= len(digits) or not digits else digits
    return [nodes for nodes in dict.fromkeys([*best, *depths]) if len(nodes) < len(tree)]


def change_outside(case: Case, kept_nodes: frozenset[int]) -> Case:
    """The case with another token at every node outside `kept_nodes`."""
    tree = tree_of(case)
    vocab = case.model.vocab_size
    shift = dice(case, "leak").integers(1, vocab, size=len(tree))
    token = tuple(
        old_token if node in kept_nodes else (old_token + int(shift[node])) % vocab
        for node, old_token in enumerate(tree.token)
    )
    return replace(case, draft=Scripted((Tree(tree.parent, token),)))
