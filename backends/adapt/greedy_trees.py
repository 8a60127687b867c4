"""Greedy tree speculation on an engine that brings no verifier.

The engine runs one forward of a whole tree and keeps the rows of the accepted path. The walk, the cut at an end token
and the trace are written here, once for all such engines.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from specverify.backends.adapt.drafting import TreeDraft
from specverify.backends.adapt.models import checkpoint_of
from specverify.backends.adapt.rounds import Round, needs_round, trace_of_rounds
from specverify.backends.base import Declaration
from specverify.reference.case import Case
from specverify.reference.trace import Trace
from specverify.reference.tree import Tree


class TreeForwards(Protocol):
    """An open model with a KV cache, for one request at a time."""

    def begin(self, prefix: Sequence[int]) -> None:
        """Forget the request before, and run the tokens `prefix` of a new one."""

    def verify(self, tree: Tree, length: int) -> Tensor:
        """Logits [nodes, vocabulary] of a forward of `tree`, whose root stands at position `length`.

        Parents stand before their children. Each node attends to the committed rows and to its own path.
        """

    def keep(self, path: Sequence[int]) -> None:
        """Commit the rows of the nodes `path` of the tree that was verified last, root first, and drop its others."""


class GreedyTrees:
    """Tree speculation on `TreeForwards`, one request at a time, greedy.

    Attributes:
        declaration: What the engine can do.
    """

    def __init__(self, declaration: Declaration, engine: Callable[[str], TreeForwards]) -> None:
        self.declaration = declaration
        self._engine = engine

    def run(self, case: Case) -> Trace:
        """Decode `case`; each tree is one forward of the engine."""
        running = self._engine(str(checkpoint_of(case.model, case.dtype)))
        ends = {*case.stops.eos, *case.stops.stop_tokens}
        room = case.stops.room(len(case.prompt))
        draft = TreeDraft(case)
        tokens = list(case.prompt)
        rounds = list[Round]()
        output = list[int]()
        running.begin(case.prefix)
        while needs_round(case, rounds, output):
            now = Round(draft.propose(tokens))
            now.logits = running.verify(now.tree, len(tokens) - 1)
            now.path, now.bonus = greedy_walk(now.tree, now.logits)
            running.keep((0, *now.path))
            emitted_tokens = cut_block(
                [*(now.tree.token[row] for row in now.path), now.bonus], room - len(output), ends
            )
            rounds.append(now)
            output += emitted_tokens
            tokens += emitted_tokens
        return trace_of_rounds(case, rounds, tuple(output))


def greedy_walk(tree: Tree, logits: Tensor) -> tuple[list[int], int]:
    """The accepted rows below the root by the greedy walk, and the token after them; ties go to the lowest id."""
    best = logits.numpy().argmax(axis=1)
    path = list[int]()
    node = 0
    while True:
        following = next((child for child in tree.children[node] if tree.token[child] == best[node]), None)
        if following is None:
            return path, int(best[node])
        path.append(following)
        node = following


def cut_block(block: list[int], room: int, ends: set[int]) -> list[int]:
    """The tokens of a block that are emitted: as many as there is room for, up to the first that ends the text."""
    kept_tokens = block[:room]
    last = next((place for place, token in enumerate(kept_tokens) if token in ends), len(kept_tokens) - 1)
    return kept_tokens[: last + 1]
