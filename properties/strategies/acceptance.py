"""Strategies for trees whose tokens are steered to a wanted acceptance.

Random tokens are almost never accepted. Steered trees hold the target's own next tokens, by the oracle, along a path,
so that nothing, everything, or the path down to a chosen node is accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import overload

import numpy as np
from hypothesis import strategies as st

from specverify.properties.strategies.prompts import tokens
from specverify.properties.strategies.trees import Parents
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.formulas import rotary
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Array
from specverify.reference.tree import Tree

LOOKAHEAD = 8
"""Number of greedy tokens that are computed after the prompt; nodes deeper than this are not steered."""

ORACLE = Oracle(keep=256)
"""The oracle that computes greedy continuations; it keeps the last 256 runs."""


class Continuation(Sequence[int]):
    """The next LOOKAHEAD tokens of greedy decoding behind a prompt, or the last of them.

    A token is computed when it is asked for: two drawn cases in five look at none, and half of the drawn cases are left
    out before they are judged.
    """

    def __init__(self, decoding: "GreedyDecoding", first: int = 0) -> None:
        self._decoding = decoding
        self._first = first

    def __len__(self) -> int:
        return LOOKAHEAD - self._first

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...

    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        places = range(self._first, LOOKAHEAD)[place]
        if isinstance(places, int):
            return self._decoding.token(places)
        if places.step == 1 and places.stop == LOOKAHEAD:
            return Continuation(self._decoding, places.start)
        return tuple(self._decoding.token(token) for token in places)


class GreedyDecoding:
    """Greedy decoding of a prompt by the oracle, as far as it was asked for.

    Raises:
        Malformed: The model has no room for LOOKAHEAD tokens, or would turn earlier positions otherwise on the way.
    """

    def __init__(self, model: Seeded, prompt: tuple[int, ...]) -> None:
        # float64 for every case: one cached continuation steers the cases of all working dtypes.
        self._case = Case(model, prompt, stops=Stops(max_new_tokens=LOOKAHEAD), dtype="float64")
        arch = model.architecture
        rotary.check_span(arch.rope, arch.max_positions, len(self._case.prefix), self._case.longest)
        self._rows: list[Array] = []
        self._tokens: list[int] = []

    def token(self, place: int) -> int:
        """The greedy token at `place`, from 0."""
        self._decode(place + 1)
        return self._tokens[place]

    @property
    def first_logits(self) -> Array:
        """The logits [vocabulary] of the first token."""
        self._decode(1)
        return self._rows[0]

    def _decode(self, count: int) -> None:
        if len(self._tokens) >= count:
            return
        target = ORACLE.target_of(self._case)
        while len(self._tokens) < count:
            text = (*self._case.prompt, *self._tokens)
            self._rows.append(target.nodes(text[:-1], Tree((0,), text[-1:])).logits[0])
            self._tokens.append(int(self._rows[-1].argmax()))  # the first of equal ones


@lru_cache(256)
def greedy_decoding(model: Seeded, prompt: tuple[int, ...]) -> GreedyDecoding:
    """The greedy decoding of `prompt`, one for all who ask."""
    return GreedyDecoding(model, prompt)


def continuation(model: Seeded, prompt: tuple[int, ...]) -> Sequence[int]:
    """The next LOOKAHEAD tokens of greedy decoding, from the oracle."""
    return Continuation(greedy_decoding(model, prompt))


def first_law(model: Seeded, prompt: tuple[int, ...], temperature: float) -> tuple[float, ...]:
    """The probabilities of the first token at `temperature`, in descending order; empty for greedy decoding.

    They are rounded to 12 decimals: the last bits of a product depend on where its operands lie in memory, and the
    thresholds of a case, which are drawn from these numbers, must not.
    """
    if temperature == 0.0:
        return ()
    logits = greedy_decoding(model, prompt).first_logits
    weight = np.sort(np.exp((logits - logits.max()) / temperature))[::-1]
    return tuple(np.round(weight / weight.sum(), 12).tolist())


def output_under_min_tokens(model: Seeded, prompt: tuple[int, ...], stops: Stops, least: int) -> tuple[int, ...]:
    """The next LOOKAHEAD greedy tokens if min_tokens bans the end tokens of `stops` from the first `least` tokens.

    End tokens after those do not end the text here.
    """
    least = min(least, LOOKAHEAD)
    if not least or not (stops.eos or stops.stop_tokens):
        return tuple(continuation(model, prompt))
    banned = Stops(least, stops.eos, stops.stop_tokens)
    first = ORACLE(Case(model, prompt, sampling=Sampling(min_tokens=least), stops=banned, dtype="float64")).output
    return (*first, *continuation(model, prompt + first))[:LOOKAHEAD]


@dataclass(frozen=True)
class SteeredTree:
    """A tree, and the number of its drafted tokens that a correct target accepts."""

    tree: Tree
    accepted: int


@st.composite
def steered_trees(
    draw: st.DrawFn,
    root: int,
    ahead: Sequence[int],
    vocab: int,
    shapes: st.SearchStrategy[Parents],
    through: bool = False,
) -> SteeredTree:
    """A tree of one of `shapes` under `root` whose tokens follow `ahead`, the target's own next tokens.

    They follow it down to one drawn node, the aim, or with `through` down to a deepest leaf. The aim may be any node,
    so accepted paths need not be the first rows. Other nodes hold random tokens, a sibling's token again, or the right
    token in the wrong place. Children of the path are changed so that they differ from the target's choice and the
    path ends at the aim; the drawn `spread` 1 leaves them as they are.
    """
    parent: Parents = draw(shapes)
    shape = Tree(parent, (root,) + (0,) * (len(parent) - 1))
    aim = shape.depth.index(shape.height) if through else draw(st.integers(0, len(parent) - 1))
    path = shape.path(aim)
    noise = draw(st.lists(tokens(vocab), min_size=min(len(parent), 4), max_size=min(len(parent), 8)))
    spread = draw(st.integers(0, 3))
    token = [root]
    for node in range(1, len(parent)):
        # With spread 0, nodes share a few tokens, so that siblings often hold the same one.
        filler = (noise[node % len(noise)] + (node if spread else 0)) % vocab
        token.append(filler)
    by_depth = sorted(range(1, len(parent)), key=lambda node: shape.depth[node])
    for node in by_depth:
        depth = shape.depth[node]
        next_token = ahead[depth - 1] if depth - 1 < len(ahead) else None
        if next_token is None:
            continue
        if node in path:
            token[node] = next_token
        elif parent[node] in path and token[node] == next_token and vocab > 1 and spread != 1:
            # Spread 1 keeps chance hits: a sibling with the accepted child's token, and right tokens below the aim.
            token[node] = (next_token + 1 + spread) % vocab if (1 + spread) % vocab else (next_token + 1) % vocab
    tree = Tree(parent, tuple(token))
    return SteeredTree(tree, len(accepted_path(tree, ahead)) - 1)


def accepted_path(tree: Tree, ahead: Sequence[int]) -> tuple[int, ...]:
    """Nodes of `tree`, root first, that a target with the next greedy tokens `ahead` accepts."""
    path = [0]
    while len(path) <= len(ahead):
        accepted_children = [child for child in tree.children[path[-1]] if tree.token[child] == ahead[len(path) - 1]]
        if not accepted_children:
            break
        path.append(accepted_children[0])
    return tuple(path)


def steer_again(trees: tuple[Tree, ...], old: tuple[int, ...], new: tuple[int, ...], vocab: int) -> tuple[Tree, ...]:
    """The successive `trees` of a script, steered again for a target with other greedy tokens.

    `old` and `new` are the greedy tokens of the old and the new target, pending root first. The new target accepts the
    nodes that the old one accepted, and each walk ends at the same node.
    """
    new_trees = []
    for tree in trees:
        path = accepted_path(tree.with_root(old[0]), old[1:])
        token = [old_token % vocab for old_token in tree.token]
        for depth, node in enumerate(path):
            token[node] = new[depth]
        for node in range(1, len(tree)):
            # A child that ended the walk before must not hold the new target's choice by chance.
            if tree.parent[node] == path[-1] and len(path) < len(new) and token[node] == new[len(path)]:
                token[node] = (token[node] + 1) % vocab
        new_trees.append(Tree(tree.parent, tuple(token)))
        if len(path) >= min(len(new), len(old)):
            break
        old, new = old[len(path) :], new[len(path) :]
    return tuple(new_trees)


def with_rejected_row(trees: tuple[Tree, ...], ahead: Sequence[int], vocab: int) -> tuple[Tree, ...]:
    """The successive `trees`, each with a node in row 1 that a target with the greedy tokens `ahead` rejects.

    The accepted paths then lie in other rows than those to which a commit brings them.
    """
    new_trees = []
    for tree in trees:
        path = accepted_path(tree, ahead)
        wrong = (ahead[0] + 1) % vocab if ahead else 0
        parent = (0, 0, *(row + (row > 0) for row in tree.parent[1:]))
        new_trees.append(Tree(parent, (tree.token[0], wrong, *tree.token[1:])))
        ahead = ahead[len(path) :]
    return tuple(new_trees)
