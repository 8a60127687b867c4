"""Variants of a case for metamorphic invariants.

`focus` makes a one-step case of the largest tree; the functions after it read such a case or change its rows, tree or
tokens. `relabelled` renames the tokens of any case.
"""

from dataclasses import replace

import numpy as np

from properties.verdict.invariant import NotApplicable, Unobserved
from properties.verdict.subject import Crashed, NoTrace, Subject
from reference.architecture import Seeded
from reference.case import Case
from reference.draft import Scripted
from reference.sampling import Stops
from reference.trace import Step, Trace
from reference.tree import Tree
from reference.weights import permutation, probe_architecture


def focus(case: Case, subject: Subject) -> Case:
    """The step of `case` with the largest tree, as a case of its own.

    The tree is scripted and the context is prefilled in one forward.
    """
    steps = [step for step in subject(case).steps if step.drafted is not None]
    if not steps:
        raise Unobserved("the backend does not reveal its trees")
    largest = max(steps, key=lambda step: len(step.drafted.tree) if step.drafted else 0)
    assert largest.drafted is not None
    whole = replace(case, layout=replace(case.layout, prefill_chunk=0))
    return whole.rebased(largest.context, largest.drafted.tree)


def tree_of(case: Case) -> Tree:
    """The scripted tree of a one-step case."""
    assert case.draft.trees is not None
    return case.draft.trees[0]


def with_tree(case: Case, tree: Tree) -> Case:
    """`case` proposing `tree` instead of its own tree, with room to emit a whole path."""
    return case.rebased(case.prefix, tree)


def first(case: Case, subject: Subject) -> Step:
    """The first step of the backend's run of `case`, as `first_step` gives it."""
    return first_step(subject(case))


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
    raise NoTrace(Crashed(None, "a run that took no step"))


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


def shuffled(case: Case) -> tuple[int, ...]:
    """A row order of the case's tree, root first, other than the tree's own order."""
    tree = tree_of(case)
    if len(tree) < 3:
        raise NotApplicable("fewer than two nodes under the root have one order only")
    order = (0, *(1 + dice(case, "order").permutation(len(tree) - 1)).tolist())
    # The permutation may be the identity: then the rows are reversed.
    return order if order != tuple(range(len(tree))) else (0, *range(len(tree) - 1, 0, -1))


def pruned(case: Case) -> tuple[Case, tuple[int, ...]]:
    """The case without one subtree, and the nodes that stayed, by their numbers in the full tree."""
    tree = tree_of(case)
    if len(tree) < 2:
        raise NotApplicable("the bare root has no subtree to remove")
    gone = int(dice(case, "prune").integers(1, len(tree)))
    kept = tuple(node for node in range(len(tree)) if gone not in tree.path(node))
    row = {node: at for at, node in enumerate(kept)}
    smaller = Tree(tuple(row[tree.parent[node]] for node in kept), tuple(tree.token[node] for node in kept))
    return with_tree(case, smaller), kept


RENAMINGS = 8
"""Number of permutations of a vocabulary that cases use."""


def relabelled(case: Case) -> tuple[Case, tuple[int, ...]]:
    """The case with every token id renamed, in the models and everywhere else, and the new id of each old id.

    Raises:
        NotApplicable: The vocabulary has one token, or the draft's rule depends on ids.
    """
    assert isinstance(case.model, Seeded)
    if case.model.vocab_size < 2:
        raise NotApplicable("a vocabulary of one token has one naming")
    # The seed depends on the root token and not on the case's digest, so that the renaming stays while a failing case
    # shrinks. Half of the permutations of two tokens are the identity: the next seed that changes a name is taken.
    seed, same = 1 + case.prompt[-1] % RENAMINGS, tuple(range(case.model.vocab_size))
    new = same
    while new == same:
        new = tuple(int(token) for token in permutation(seed, case.model.vocab_size))
        seed += new == same

    def renamed(tokens: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new[token] for token in tokens)

    draft = case.draft.renamed(renamed, seed)
    if draft is None:
        raise NotApplicable("the draft's own rule names tokens by their ids")
    held = case.stops
    pieces = tuple(held.pieces[new.index(token)] for token in range(len(new))) if held.pieces else ()
    stops = replace(held, eos=renamed(held.eos), stop_tokens=renamed(held.stop_tokens), pieces=pieces)
    sampling = replace(case.sampling, bad_words=tuple(renamed(word) for word in case.sampling.bad_words))
    grammar = sampling.grammar
    if grammar is not None:
        words = tuple(grammar.words[new.index(token)] for token in range(len(new)))
        sampling = replace(sampling, grammar=replace(grammar, words=words))
    model = replace(case.model, relabel=seed)
    return replace(
        case,
        model=model,
        prompt=renamed(case.prompt),
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
    tree, context = tree_of(case), len(case.prefix)
    rows = context + len(tree)
    architecture = probe_architecture(case.model.architecture)
    model = Seeded(architecture, 0, "transparent", layer)
    nodes = list(range(context, rows))
    window, chunk = architecture.reaches[layer]
    positions = {context + depth for depth in tree.depth}
    edges = [at - window + off for at in positions for off in (0, 1, 2)] if window else []
    edges += [at - at % chunk + off for at in positions for off in (-1, 0)] if chunk else []
    page = case.layout.page_size
    edges += [at + off for at in (page, context - context % page) for off in (-1, 0)] if page else []
    ends = [column for column in (0, context - 1, *edges) if 0 <= column < context]
    others = dice(case, "probe").permutation(context).tolist()
    wanted = list(dict.fromkeys([*nodes, *ends, *others]))
    wide = architecture.head_dim
    made = []
    for at in range(0, min(len(wanted), PROBE_FORWARDS * wide), wide):
        columns = tuple(sorted(wanted[at : at + wide]))
        token = [0] * rows
        for code, column in enumerate(columns):
            token[column] = code + 1
        named = Tree(tree.parent, tuple(token[context:]))
        prompt = tuple(token[: context + 1])
        made.append((replace(case, model=model, prompt=prompt, draft=Scripted((named,)), stops=Stops(1)), columns))
    return made


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
                kept = {node for place, node in enumerate(at_level) if place >> bit & 1 == value}
                below = {
                    node for node in range(len(tree)) if tree.depth[node] < level or tree.path(node)[level] in kept
                }
                digits.append(frozenset(below))
    best = paths if len(paths) <= len(digits) or not digits else digits
    return [kept for kept in dict.fromkeys([*best, *depths]) if len(kept) < len(tree)]


def changed_outside(case: Case, kept: frozenset[int]) -> Case:
    """The case with another token at every node outside `kept`."""
    tree = tree_of(case)
    vocab = case.model.vocab_size
    shift = dice(case, "leak").integers(1, vocab, size=len(tree))
    token = tuple(one if node in kept else (one + int(shift[node])) % vocab for node, one in enumerate(tree.token))
    return replace(case, draft=Scripted((Tree(tree.parent, token),)))
